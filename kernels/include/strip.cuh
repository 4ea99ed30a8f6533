// What one lane of a warp reads of the strip layout (kernels/linear/strip.py) as mma operands.
//
// A code u whose lowest bit is bit b of a 16-bit half, alone in it, is the fp16 number u 2^(b-24),
// exactly: below the normal numbers a half is an integer. One lop3 makes two codes of a word two such
// numbers. Tensor cores multiply them at full speed; where b is made the same for all codes of a row
// (level(), on x or on the codes), the sums are the products times 2^(b-24), and lack 8 (or 4) times
// the sum of x, which is another product's. Elsewhere the lop3 puts the exponent of 2^(10-b) above
// the code, which makes it 2^(10-b) + u, and one subtraction of 2^(10-b) + 8 (or 4) the signed code.
// No integer is ever converted.
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

// Where level() leaves the codes of rows 8 .. 15 of a strip, above those of rows 0 .. 7.
template <int WIDTH>
constexpr int UPPER_PLACE = WIDTH;

// Bare codes at bit b are their values and MIDDLE, times 2^(b-24). A of the product with x that
// takes MIDDLE off: the bits of a power of two up to 2^11 are the number of as many 2^-24. And what
// sums of codes at bit 0, and above, are to be multiplied by in the end.
template <int WIDTH>
STRIP_INLINE constexpr unsigned less_at(int place) {
    return 0x80008000u + (MIDDLE<WIDTH> * 0x10001u << place);
}
constexpr float LOWER_UNIT = 16777216.0f;
template <int WIDTH>
constexpr float UPPER_UNIT = LOWER_UNIT / (1 << UPPER_PLACE<WIDTH>);

// The lowest bit of a pair's codes in either half, where the words' upper codes have been shifted
// down: of W4 by 8; of W3 in the first word by 8, in the second by 7, in the third by 6, so that the
// bits that five codes leave over in each come to lie side by side, and are the last pair's.
template <int WIDTH>
STRIP_INLINE constexpr int place_of(int pair) {
    if (WIDTH == 4) return pair % 2 * 4;
    const int plane = pair / 5, code = pair % 5;
    return plane == 3 ? 7 : code + plane / 2 < 3 ? 3 * code : 3 * code - 8 + plane;
}

// The fp16 pair 2^(10-b), above which codes at bit b are whole numbers.
STRIP_INLINE constexpr unsigned ones_at(int place) { return (25u - place) * 0x04000400u; }

// By what a biased pair is too large.
template <int WIDTH>
STRIP_INLINE constexpr unsigned bias_of(int pair) {
    return ones_at(place_of<WIDTH>(pair)) + (MIDDLE<WIDTH> * 0x00010001u << place_of<WIDTH>(pair));
}

template <bool BIASED>
STRIP_INLINE unsigned codes_at(unsigned word, unsigned mask, int place) {
    return BIASED ? masked_or(word, mask << place, ones_at(place)) : word & mask << place;
}

// The words of a block to 16 pairs of codes, each at its place, bare or biased.
template <bool BIASED>
STRIP_INLINE void place_pairs(const unsigned (&words)[4], unsigned (&pairs)[PAIRS]) {
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int p = 0; p < PAIRS; ++p) {
        const unsigned word = p % 4 < 2 ? words[p / 4] : words[p / 4] >> 8;
        pairs[p] = codes_at<BIASED>(word, 0x000f000f, place_of<4>(p));
    }
}

template <bool BIASED>
STRIP_INLINE void place_pairs(const unsigned (&words)[3], unsigned (&pairs)[PAIRS]) {
    const unsigned upper[3] = {words[0] >> 8, words[1] >> 7, words[2] >> 6};
    constexpr int last = PAIRS - 1;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int p = 0; p < last; ++p) {
        const int plane = p / 5;
        const unsigned word = p % 5 + plane / 2 < 3 ? words[plane] : upper[plane];
        pairs[p] = codes_at<BIASED>(word, 0x00070007, place_of<3>(p));
    }
    pairs[last] = codes_at<BIASED>(upper[0], 0x00010001, place_of<3>(last));
    pairs[last] = masked_or(upper[1], 0x01000100, pairs[last]);
    pairs[last] = masked_or(upper[2], 0x02000200, pairs[last]);
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

// An fp16 pair times 2 to the power of `of`: exact for codes, on a pipe that has little to do.
STRIP_INLINE unsigned times_power(unsigned pair, int of) {
    const unsigned power = static_cast<unsigned>(15 + of) * 0x04000400u;
    return as_word(__hmul2(as_half2(pair), as_half2(power)));
}

// By what power of two x of columns 2 c and 2 c + 1 of a lane is divided: bare codes of rows 0 .. 7
// then stay where they are. An x below 2^-8 may lose up to six bits at its end by it.
template <int WIDTH>
STRIP_INLINE constexpr int x_place(int c) {
    return place_of<WIDTH>(2 * c);
}

// Bare codes of rows 8 .. 15 to UPPER_PLACE above their neighbours', and x to what both take. words:
// 2 j and 2 j + 1 are B of the product whose A are pairs[4 j .. 4 j + 3].
template <int WIDTH>
STRIP_INLINE void level(unsigned (&pairs)[PAIRS]) {
#pragma unroll
    for (int c = 0; c < PAIRS / 2; ++c) {
        const int by = x_place<WIDTH>(c) + UPPER_PLACE<WIDTH> - place_of<WIDTH>(2 * c + 1);
        if (by != 0) pairs[2 * c + 1] = times_power(pairs[2 * c + 1], by);
    }
}

template <int WIDTH>
STRIP_INLINE void level_x(unsigned (&words)[PAIRS / 2]) {
#pragma unroll
    for (int c = 0; c < PAIRS / 2; ++c)
        if (x_place<WIDTH>(c) != 0) words[c] = times_power(words[c], -x_place<WIDTH>(c));
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

// An exact division would take its long way for each zero, which rows that are not there are.
STRIP_INLINE float silu(float gate) { return __fdividef(gate, 1.0f + __expf(-gate)); }

// What happens to a finished sum, in this order: bias, residual, fp16.
struct Epilogue {
    const __half* bias;      // [N] or null
    const __half* residual;  // [M, columns] or null
    __half* y;               // [M, columns]
    int columns;             // N, or N / 2 where gate and up become one

    STRIP_INLINE float biased(int n, float sum) const {
        return bias == nullptr ? sum : sum + __half2float(bias[n]);
    }
    // Whether two neighbouring columns, the first an even one, lie together; and four.
    STRIP_INLINE bool takes_pairs() const {
        const size_t both = reinterpret_cast<size_t>(y) | reinterpret_cast<size_t>(residual);
        return columns % 2 == 0 && both % 4 == 0;
    }
    STRIP_INLINE void store_pair(int m, int column, float low, float high) const {
        const size_t at = static_cast<size_t>(m) * columns + column;
        if (residual != nullptr) {
            const float2 more = __half22float2(*reinterpret_cast<const __half2*>(residual + at));
            low += more.x, high += more.y;
        }
        *reinterpret_cast<__half2*>(y + at) = __floats2half2_rn(low, high);
    }
    STRIP_INLINE bool takes_fours() const {
        const size_t both = reinterpret_cast<size_t>(y) | reinterpret_cast<size_t>(residual);
        return columns % 4 == 0 && both % 8 == 0;
    }
    STRIP_INLINE void store_four(int m, int column, const float (&values)[4]) const {
        const size_t at = static_cast<size_t>(m) * columns + column;
        float2 low = {values[0], values[1]}, high = {values[2], values[3]};
        if (residual != nullptr) {
            const uint2 more = *reinterpret_cast<const uint2*>(residual + at);
            const float2 a = __half22float2(as_half2(more.x)), b = __half22float2(as_half2(more.y));
            low.x += a.x, low.y += a.y, high.x += b.x, high.y += b.y;
        }
        *reinterpret_cast<uint2*>(y + at) =
            make_uint2(as_word(__float22half2_rn(low)), as_word(__float22half2_rn(high)));
    }
    STRIP_INLINE void store(int m, int column, float value) const {
        const size_t at = static_cast<size_t>(m) * columns + column;
        y[at] = __float2half_rn(residual == nullptr ? value : value + __half2float(residual[at]));
    }

    // Sums of row m, of rows n .. n + 3 of a strip, to y. All lanes of a warp come, four neighbours
    // with all rows of the strip; in_fours: takes_fours().
    template <bool IS_GATED>
    STRIP_INLINE void finish_four(bool in_fours, float4 sums, bool is_row, int m, int strip, int n,
                                  int out_features) const {
        float values[4] = {sums.x, sums.y, sums.z, sums.w};
        const int row = strip * HEIGHT + n;
        if (bias != nullptr)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (row + i < out_features) values[i] = biased(row + i, values[i]);
        if (IS_GATED)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                values[i] = silu(values[i]) * __shfl_xor_sync(~0u, values[i], 2);
        if (!is_row || row >= out_features || (IS_GATED && n >= 8)) return;
        const int column = IS_GATED ? strip * 8 + n : row;
        if (in_fours) {
            store_four(m, column, values);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (row + i < out_features) store(m, column + i, values[i]);
    }
};

}  // namespace strip
#endif
