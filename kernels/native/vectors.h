// Eight floats at a time on any CPU: the compilers' own vector type, which becomes AVX, SSE or NEON.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

namespace native {

typedef float Eight __attribute__((vector_size(32)));
typedef int32_t EightInts __attribute__((vector_size(32)));

inline Eight load(const float *from) {
    Eight value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float *to, Eight value) { std::memcpy(to, &value, sizeof value); }

inline Eight splat(float value) { return Eight{} + value; }

// a * b + c, rounded once where the CPU can.
inline Eight fused(Eight a, Eight b, Eight c) {
#if defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

inline float sum(Eight v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// exp(x), relative error below 2e-7; x is held within -87..88, NaN stays NaN.
inline Eight exponential(Eight x) {
    const Eight low = splat(-87.0f), high = splat(88.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    // x = n * ln 2 + r: adding 1.5 * 2^23 leaves the integer n in the low bits.
    const Eight shifted = fused(x, splat(1.44269504f), splat(12582912.0f));
    const Eight n = shifted - splat(12582912.0f);
    Eight r = fused(n, splat(-0.693359375f), x);
    r = fused(n, splat(2.12194440e-4f), r);
    // Taylor's series to r^7 / 7!; |r| is at most ln 2 / 2.
    Eight value = splat(1.0f / 5040);
    value = fused(value, r, splat(1.0f / 720));
    value = fused(value, r, splat(1.0f / 120));
    value = fused(value, r, splat(1.0f / 24));
    value = fused(value, r, splat(1.0f / 6));
    value = fused(value, r, splat(0.5f));
    value = fused(value, r, splat(1.0f));
    value = fused(value, r, splat(1.0f));
    EightInts bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4B400000 + 127) << 23;
    Eight power;
    std::memcpy(&power, &bits, sizeof power);
    return value * power;
}

}  // namespace native
