// From packed strip words to fp16 fragments of the A operand, scales applied, for the GEMMs.
//
// A code whose lowest bit is bit b of a 16-bit half, under the exponent of 2^(10-b), is the fp16
// number 2^(10-b) + code: one lop3 makes two codes such numbers, one subtraction makes them signed
// integers, exactly, and one multiplication applies the scale.
#pragma once
#include "strip.cuh"

namespace gemm {

using strip::as_half2;
using strip::as_word;
using strip::masked_or;

using Scales = strip::RowScales;

// Codes of two columns, in bits BIT .. BIT + WIDTH - 1 of either half of `word`, to weights.
template <int WIDTH, int BIT, bool WITH_OFFSETS>
__device__ __forceinline__ unsigned weights_at(unsigned word, const Scales& scales, int row) {
    constexpr unsigned mask = ((1u << WIDTH) - 1) << BIT;
    constexpr unsigned exponent = (25 - BIT) << 10;                  // fp16 bits of 2^(10 - BIT)
    constexpr unsigned bias = exponent | 1u << (WIDTH - 1) << BIT;  // and half the codes more
    const unsigned raised = masked_or(word, mask | mask << 16, exponent | exponent << 16);
    const __half2 code = __hsub2(as_half2(raised), as_half2(bias | bias << 16));
    return as_word(WITH_OFFSETS ? __hfma2(code, scales.scale[row], scales.offset[row])
                                : __hmul2(code, scales.scale[row]));
}

// Four pairs of codes, one above the other in either half of a word: rows g and g + 8 at the first
// two columns of a fragment, then both rows at the last two: the A operand of one product.
template <int WIDTH, bool WITH_OFFSETS>
__device__ __forceinline__ void fragment_of(unsigned word, const Scales& scales,
                                            unsigned (&a)[4]) {
    const unsigned upper = word >> (2 * WIDTH);
    a[0] = weights_at<WIDTH, 0, WITH_OFFSETS>(word, scales, 0);
    a[1] = weights_at<WIDTH, WIDTH, WITH_OFFSETS>(word, scales, 1);
    a[2] = weights_at<WIDTH, 0, WITH_OFFSETS>(upper, scales, 0);
    a[3] = weights_at<WIDTH, WIDTH, WITH_OFFSETS>(upper, scales, 1);
}

// The four fragments of a lane's 64-column block as it lies in the strip.
template <bool WITH_OFFSETS>
__device__ __forceinline__ void fragments_of(const unsigned (&words)[4], const Scales& scales,
                                             unsigned (&a)[4][4]) {
#pragma unroll
    for (int f = 0; f < 4; ++f) fragment_of<4, WITH_OFFSETS>(words[f], scales, a[f]);
}

template <bool WITH_OFFSETS>
__device__ __forceinline__ void fragments_of(const unsigned (&words)[3], const Scales& scales,
                                             unsigned (&a)[4][4]) {
    unsigned pairs[strip::PAIRS];
    strip::place_pairs<true>(words, pairs);
    strip::weigh<3, WITH_OFFSETS>(pairs, scales);
#pragma unroll
    for (int i = 0; i < strip::PAIRS; ++i) a[i / 4][i % 4] = pairs[i];
}

}  // namespace gemm
