// One projected head in eight lanes: its norm, its rotation, and how it goes into a cache. Both values
// of a rotated pair are in one lane, which has HEAD_DIM / 16 values of either half.
//
// Multiplications and additions are said one by one: whoever includes this gets the same bits.
//
// -DHEAD_DIM=64|96|128, -DBF16 (element.cuh).
#pragma once
#include "element.cuh"

constexpr int LANES = 8;
constexpr int HALF = HEAD_DIM / 2;
constexpr int MINE = HALF / LANES;  // values of either half
constexpr float LARGEST_CODE = 127.f;

// Reductions over one head's lanes only: the heads of a warp take different ways.
__device__ __forceinline__ unsigned lanes_of_head() { return 0xffu << (threadIdx.x & 24); }

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) x += __shfl_xor_sync(lanes_of_head(), x, step);
    return x;
}

__device__ __forceinline__ float largest_of_lanes(float x) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        x = fmaxf(x, __shfl_xor_sync(lanes_of_head(), x, step));
    }
    return x;
}

template <int COUNT>
__device__ __forceinline__ void load_floats(const float* from, float (&to)[COUNT]) {
    if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const float4 v = __ldcg(reinterpret_cast<const float4*>(from + i));
            to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            const float2 v = __ldcg(reinterpret_cast<const float2*>(from + i));
            to[i] = v.x, to[i + 1] = v.y;
        }
    }
}

// Of one position; both halves of a head turn by the same angles.
struct Angles {
    float cos[MINE], sin[MINE];

    // cosines, sines: HEAD_DIM each, the first half of the sines negated.
    __device__ __forceinline__ void load(const float* cosines, const float* sines, int lane) {
        load_floats(cosines + lane * MINE, cos);
        load_floats(sines + HALF + lane * MINE, sin);
    }
};

struct Head {
    float first[MINE], second[MINE];  // dims lane * MINE + i, and those + HALF

    __device__ __forceinline__ void load(const element* from, int lane) {
        const Words<2 * MINE> low = load_words<2 * MINE>(from + lane * MINE);
        const Words<2 * MINE> high = load_words<2 * MINE>(from + HALF + lane * MINE);
#pragma unroll
        for (int i = 0; i < MINE / 2; ++i) {
            const float2 a = pair_to_float2(low.word[i]), b = pair_to_float2(high.word[i]);
            first[2 * i] = a.x, first[2 * i + 1] = a.y;
            second[2 * i] = b.x, second[2 * i + 1] = b.y;
        }
    }

    __device__ __forceinline__ void store(element* to, int lane) const {
        Words<2 * MINE> low, high;
#pragma unroll
        for (int i = 0; i < MINE / 2; ++i) {
            low.word[i] = element_pair(first[2 * i], first[2 * i + 1]);
            high.word[i] = element_pair(second[2 * i], second[2 * i + 1]);
        }
        store_words(to + lane * MINE, low);
        store_words(to + HALF + lane * MINE, high);
    }

    __device__ __forceinline__ void normalise(const float* weight, float eps, int lane) {
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            squares = __fmaf_rn(first[i], first[i], squares);
            squares = __fmaf_rn(second[i], second[i], squares);
        }
        const float scale = rsqrtf(__fmaf_rn(sum_of_lanes(squares), 1.f / HEAD_DIM, eps));
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            first[i] *= scale * weight[lane * MINE + i];
            second[i] *= scale * weight[HALF + lane * MINE + i];
        }
    }

    __device__ __forceinline__ void rotate(const Angles& by, float scale) {
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const float a = first[i], b = second[i];
            first[i] = __fmaf_rn(a, by.cos[i], -__fmul_rn(b, by.sin[i])) * scale;
            second[i] = __fmaf_rn(b, by.cos[i], __fmul_rn(a, by.sin[i])) * scale;
        }
    }

    // Of this lane's values, without their signs.
    __device__ __forceinline__ float largest() const {
        float most = 0.f;
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            most = fmaxf(most, fmaxf(fabsf(first[i]), fabsf(second[i])));
        }
        return most;
    }

    // code = round(value * (1 / scale)), scale = largest / 127 as the half that a reader will use.
    __device__ __forceinline__ void store_codes(signed char* codes, __half* scale, int lane) const {
        const float most = largest_of_lanes(largest());
        const __half step = __float2half_rn(__fdiv_rn(most, LARGEST_CODE));
        const float wide = __half2float(step);
        const float inverse = wide > 0.f ? __frcp_rn(wide) : 0.f;
        if (lane == 0) *scale = step;
#pragma unroll
        for (int i = 0; i < MINE; i += 2) {
            unsigned short* to = reinterpret_cast<unsigned short*>(codes + lane * MINE + i);
            to[0] = pair_of(first[i], first[i + 1], inverse);
            to[HALF / 2] = pair_of(second[i], second[i + 1], inverse);
        }
    }

    // Two codes of a byte each. Rounded to the nearest, ties to even: 1.5 * 2^23 leaves no room behind
    // the point.
    static __device__ __forceinline__ unsigned short pair_of(float low, float high, float inverse) {
        return __byte_perm(code(low, inverse), code(high, inverse), 0x40);
    }

    static __device__ __forceinline__ unsigned code(float value, float inverse) {
        const float near = fminf(fmaxf(__fmul_rn(value, inverse), -LARGEST_CODE), LARGEST_CODE);
        return __float_as_uint(__fadd_rn(near, 12582912.f));
    }
};
