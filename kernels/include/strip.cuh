// What one lane of a warp reads of the strip layout (kernels/linear/strip.py) as mma operands.
//
// A code u whose lowest bit is bit b of a 16-bit half, alone in it, is the fp16 number u 2^(b-24),
// exactly: below the normal numbers a half is an integer. One lop3 makes two codes of a word two such
// numbers. Tensor cores multiply them at full speed; where b is the same for all codes of a row, the
// sums are the products times 2^(b-24), and lack 8 (or 4) times the sum of x, which is another
// product's. Elsewhere the lop3 puts the exponent of 2^(10-b) above the code, which makes it
// 2^(10-b) + u, and one subtraction of 2^(10-b) + 8 (or 4) the signed code. No integer is ever
// converted.
//
// The integer part compiles for the host as well; tests/kernels_build runs it against the packers.
#pragma once

#if defined(__CUDACC__)
#define STRIP_INLINE __device__ __forceinline__
#else
#define STRIP_INLINE inline
#endif

namespace strip {

constexpr int HEIGHT = 16;  // out-features of a strip
constexpr int BLOCK = 64;   // columns whose codes a lane unpacks at once: four mma steps
constexpr int PAIRS = 16;   // registers they become
constexpr int LANES = 32;

template <int WIDTH>
struct Layout {
    static constexpr int STEP = WIDTH == 4 ? 128 : 256;  // columns a kernel takes at a time
    static constexpr int STEP_BLOCKS = STEP / BLOCK;
    static constexpr int VECTORS = WIDTH == 4 ? 2 : 3;  // 16-byte vectors a lane reads for a step
    static constexpr int WORDS = WIDTH == 4 ? 4 : 3;    // words of a block
};

STRIP_INLINE unsigned masked_or(unsigned word, unsigned mask, unsigned magic) {
#if defined(__CUDA_ARCH__)
    unsigned merged;  // 0xea is (a & b) | c; left to itself the compiler takes two instructions
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(merged) : "r"(word), "r"(mask), "r"(magic));
    return merged;
#else
    return (word & mask) | magic;
#endif
}

// What a code is above its value.
template <int WIDTH>
constexpr int MIDDLE = 1 << (WIDTH - 1);

// Where bare_pairs() leaves the codes of rows 0 .. 7 and 8 .. 15 of a strip: bit 0 and this one.
template <int WIDTH>
constexpr int UPPER_PLACE = WIDTH;

// So bare codes of rows 0 .. 7 are their values and MIDDLE, times 2^-24, of rows 8 .. 15 times
// 2^(WIDTH - 24). A of the product with x that takes MIDDLE off, and what sums are to be multiplied
// by in the end.
template <int WIDTH>
constexpr unsigned LESS_LOWER = 0x80008000u + MIDDLE<WIDTH> * 0x10001u;
template <int WIDTH>
constexpr unsigned LESS_UPPER = 0x80008000u + (MIDDLE<WIDTH> * 0x10001u << UPPER_PLACE<WIDTH>);
constexpr float LOWER_UNIT = 16777216.0f;
template <int WIDTH>
constexpr float UPPER_UNIT = LOWER_UNIT / (1 << UPPER_PLACE<WIDTH>);

// The words of a block to 16 pairs of bare codes: those of even pairs at bit 0, of odd at bit WIDTH.
STRIP_INLINE void bare_pairs(const unsigned (&words)[4], unsigned (&pairs)[PAIRS]) {
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int j = 0; j < 4; ++j) {
        const unsigned low = words[j], high = words[j] >> 8;
        pairs[4 * j + 0] = low & 0x000f000f, pairs[4 * j + 1] = low & 0x00f000f0;
        pairs[4 * j + 2] = high & 0x000f000f, pairs[4 * j + 3] = high & 0x00f000f0;
    }
}

STRIP_INLINE void bare_pairs(const unsigned (&words)[3], unsigned (&pairs)[PAIRS]) {
    constexpr unsigned even = 0x00070007, odd = 0x00380038;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int plane = 0; plane < 3; plane += 2) {
        const unsigned word = words[plane];
        unsigned* const five = pairs + 5 * plane;
        five[0] = word & even, five[1] = word & odd;
        five[2] = word >> 6 & even, five[3] = word >> 6 & odd;
        five[4] = word >> 12 & even;
    }
    // The five of the middle word begin with an odd pair.
    pairs[5] = words[1] << 3 & odd, pairs[6] = words[1] >> 3 & even;
    pairs[7] = words[1] >> 3 & odd, pairs[8] = words[1] >> 9 & even;
    pairs[9] = words[1] >> 9 & odd;
    const unsigned last = words[0] >> 12 & 0x00080008;
    pairs[15] = masked_or(words[2] >> 10, 0x00200020, masked_or(words[1] >> 11, 0x00100010, last));
}

// The fp16 pair 2^(10-b) + middle by which pair `pair` of a block is too large.
template <int WIDTH>
STRIP_INLINE constexpr unsigned bias_of(int pair) {
    if (WIDTH == 4) return pair % 2 ? 0x54805480u : 0x64086408u;  // 64 + 8, 1024 + 8
    const int place = pair == PAIRS - 1 ? 0 : pair % 5;
    return place == 4 ? 0x4d004d00u : place % 2 ? 0x58205820u : 0x64046404u;  // 16, 128, 1024 + 4
}

// The words of a block to 16 biased pairs.
STRIP_INLINE void biased_pairs(const unsigned (&words)[4], unsigned (&pairs)[PAIRS]) {
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int j = 0; j < 4; ++j) {
        const unsigned low = words[j], high = words[j] >> 8;
        pairs[4 * j + 0] = masked_or(low, 0x000f000f, 0x64006400);
        pairs[4 * j + 1] = masked_or(low, 0x00f000f0, 0x54005400);
        pairs[4 * j + 2] = masked_or(high, 0x000f000f, 0x64006400);
        pairs[4 * j + 3] = masked_or(high, 0x00f000f0, 0x54005400);
    }
}

STRIP_INLINE void biased_pairs(const unsigned (&words)[3], unsigned (&pairs)[PAIRS]) {
    unsigned last = 0x64006400;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int plane = 0; plane < 3; ++plane) {
        const unsigned low = words[plane], high = words[plane] >> 6;
        unsigned* const five = pairs + 5 * plane;
        five[0] = masked_or(low, 0x00070007, 0x64006400);
        five[1] = masked_or(low, 0x00380038, 0x58005800);
        five[2] = masked_or(high, 0x00070007, 0x64006400);
        five[3] = masked_or(high, 0x00380038, 0x58005800);
        five[4] = masked_or(high, 0x01c001c0, 0x4c004c00);
        // The bits that five codes leave over in each word are the last pair's.
        last = masked_or(words[plane] >> (15 - plane), 0x00010001u << plane, last);
    }
    pairs[PAIRS - 1] = last;
}

}  // namespace strip

#if defined(__CUDACC__)
#include <cuda_fp16.h>

namespace strip {

STRIP_INLINE __half2 as_half2(unsigned pair) { return *reinterpret_cast<const __half2*>(&pair); }
STRIP_INLINE unsigned as_word(__half2 pair) { return *reinterpret_cast<const unsigned*>(&pair); }

// The words of block `block` among the vectors a lane read for a step.
template <int WIDTH>
STRIP_INLINE void words_of(const uint4 (&vectors)[Layout<WIDTH>::VECTORS], int block,
                           unsigned (&words)[Layout<WIDTH>::WORDS]) {
    if constexpr (WIDTH == 4) {
        const uint4 v = vectors[block];
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
#pragma unroll
        for (int plane = 0; plane < 3; ++plane) {
            const uint4 v = vectors[plane];
            words[plane] = block == 0 ? v.x : block == 1 ? v.y : block == 2 ? v.z : v.w;
        }
    }
}

// Biased to signed codes: pairs[4 j .. 4 j + 3] is then the A fragment of mma step j.
template <int WIDTH>
STRIP_INLINE void unbias(unsigned (&pairs)[PAIRS]) {
#pragma unroll
    for (int p = 0; p < PAIRS; ++p)
        pairs[p] = as_word(__hsub2(as_half2(pairs[p]), as_half2(bias_of<WIDTH>(p))));
}

// Scales and offsets of a lane's two rows, g and g + 8, in one group.
struct RowScales {
    __half2 scale[2], offset[2];
};

// Biased codes to weights: s q, or s q + o, rounded once from the exact code. Even pairs are of row
// g, odd ones of row g + 8.
template <int WIDTH, bool WITH_OFFSETS>
STRIP_INLINE void weigh(unsigned (&pairs)[PAIRS], const RowScales& rows) {
    unbias<WIDTH>(pairs);
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
        const __half2 code = as_half2(pairs[p]);
        pairs[p] = as_word(WITH_OFFSETS ? __hfma2(code, rows.scale[p % 2], rows.offset[p % 2])
                                        : __hmul2(code, rows.scale[p % 2]));
    }
}

// What happens to a finished sum, in this order: bias, residual, fp16.
struct Epilogue {
    const __half* bias;      // [N] or null
    const __half* residual;  // [M, columns] or null
    __half* y;               // [M, columns]
    int columns;             // N, or N / 2 where gate and up become one

    STRIP_INLINE float biased(int n, float sum) const {
        return bias == nullptr ? sum : sum + __half2float(bias[n]);
    }
    STRIP_INLINE void store(int m, int column, float value) const {
        const size_t at = static_cast<size_t>(m) * columns + column;
        y[at] = __float2half_rn(residual == nullptr ? value : value + __half2float(residual[at]));
    }
};

STRIP_INLINE float silu(float gate) { return gate / (1.0f + __expf(-gate)); }

}  // namespace strip
#endif
