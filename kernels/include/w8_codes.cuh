// 8-bit codes of rows of W as operands of mma.m16n8k16, and the type of what comes of them.
//
// The including source defines BF16 and WIDE (y in fp32, else in the element's type).
#pragma once
#include "tensor_core.cuh"

#if WIDE
using result = float;
__device__ __forceinline__ result to_result(float x) { return x; }
#else
using result = element;
__device__ __forceinline__ result to_result(float x) { return to_element(x); }
#endif

// What a lane holds of a chunk of K: COLUMNS codes of rows r and r + 8 of COUNT strips.
template <int COUNT, int COLUMNS>
struct RowCodes {
    Words<COLUMNS> row[COUNT][2];
};

// Four codes of a row to two pairs of elements, exactly.
__device__ __forceinline__ void to_operands(unsigned codes, unsigned& low, unsigned& high) {
#if BF16
    // 0x4b0000bb is 2^23 + bb in fp32; bf16 holds every 8-bit code exactly.
    const unsigned flipped = codes ^ 0x80808080;
    float value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        value[i] = __uint_as_float(__byte_perm(flipped, 0x4b000000, 0x7440 + i)) - 8388736.f;
    }
    low = element_pair(value[0], value[1]);
    high = element_pair(value[2], value[3]);
#else
    codes_to_halves(codes, low, high);
#endif
}
