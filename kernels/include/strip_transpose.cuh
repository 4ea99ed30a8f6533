// Strip words to fragments of columns in their natural order, by exchanging words among the four
// lanes of a row.
//
// A lane of a strip holds 16 columns in a row; the four lanes of a row take turns. mma.sync does
// not mind, because x can be read in that order. wgmma reads x from shared memory by itself, in
// order: fragment f must be columns 16 f .. 16 f + 15 of the block, lane t holding 2 t, 2 t + 1,
// 2 t + 8 and 2 t + 9 of them. So what lane f holds is sorted by the lane that needs it, a word
// each, and the 4 x 4 words are transposed across the lanes.
#pragma once
#include "strip_dequantise.cuh"

namespace gemm {

// W3: words[t] = the codes of a lane that lane t needs, as four 3-bit fields in either half.
__device__ __forceinline__ void sort_w3(const unsigned (&w)[3], unsigned (&to)[4]) {
    // Pairs 0..4 lie in w[0], 5..9 in w[1], 10..14 in w[2], at 3, 6, ... ; lane t needs pairs 2 t,
    // 2 t + 1, 2 t + 8 and 2 t + 9; pair 15 lies in bits 15 and 31 of the three words.
    to[0] = masked_or(w[0], 0x003f003f, w[1] >> 3 & 0x0fc00fc0);
    to[1] = masked_or(w[0] >> 6, 0x003f003f, w[2] << 6 & 0x0fc00fc0);
    const unsigned middle = masked_or(w[1] << 3, 0x00380038, w[2] & 0x0fc00fc0);
    to[2] = masked_or(w[0] >> 12, 0x00070007, middle);
    unsigned last = w[2] >> 4 & 0x08000800;
    last = masked_or(w[1] >> 5, 0x04000400, last);
    last = masked_or(w[0] >> 6, 0x02000200, last);
    last = masked_or(w[2] >> 6, 0x01c001c0, last);
    to[3] = masked_or(w[1] >> 3, 0x003f003f, last);
}

// W4: a byte is one pair of rows at one pair of columns; two words give two lanes theirs.
// IS_TURNED: in odd lanes words 0 and 1 change places, and 2 and 3.
template <bool IS_TURNED>
__device__ __forceinline__ void sort_w4(const unsigned (&w)[4], unsigned (&to)[4]) {
    const unsigned first = IS_TURNED && threadIdx.x & 1 ? 0x7351 : 0x6240, second = first ^ 0x1111;
    to[0] = __byte_perm(w[0], w[2], first);
    to[1] = __byte_perm(w[0], w[2], second);
    to[2] = __byte_perm(w[1], w[3], first);
    to[3] = __byte_perm(w[1], w[3], second);
}

__device__ __forceinline__ void swap_if(bool swap, unsigned& a, unsigned& b) {
    const unsigned first = swap ? b : a, second = swap ? a : b;
    a = first, b = second;
}

// Lane t of four gives word[u] to lane u: afterwards word[u] is what lane u gave. Two rounds of
// pairwise exchange, each of them between lanes whose numbers differ in one bit. IS_TURNED: as
// sort_w4() leaves them, and as the first round would put them.
template <bool IS_TURNED>
__device__ __forceinline__ void transpose_words(unsigned (&word)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if ((i & bit) == 0) {
                unsigned &low = word[i], &high = word[i + bit];
                // high: what the other lane needs
                if (!IS_TURNED || bit > 1) swap_if(upper, low, high);
                high = __shfl_xor_sync(0xffffffff, high, bit);
                swap_if(upper, low, high);
            }
    }
}

// The codes of the block's four fragments, columns in order: word f is fragment f's. IS_TURNED
// saves instructions, and changes no bit.
template <int WIDTH, bool IS_TURNED>
__device__ __forceinline__ void natural_words(const unsigned (&words)[WIDTH],
                                              unsigned (&sorted)[4]) {
    if constexpr (WIDTH == 3) {
        sort_w3(words, sorted);
        transpose_words<false>(sorted);
    } else {
        sort_w4<IS_TURNED>(words, sorted);
        transpose_words<IS_TURNED>(sorted);
    }
}

// The block's four fragments, columns in order. scales: of its first and of its second half.
template <int WIDTH, bool WITH_OFFSETS>
__device__ __forceinline__ void natural_fragments(const unsigned (&words)[WIDTH],
                                                  const Scales& first, const Scales& second,
                                                  unsigned (&a)[4][4]) {
    unsigned sorted[4];
    natural_words<WIDTH, false>(words, sorted);
#pragma unroll
    for (int f = 0; f < 4; ++f)
        fragment_of<WIDTH, WITH_OFFSETS>(sorted[f], f < 2 ? first : second, a[f]);
}

}  // namespace gemm
