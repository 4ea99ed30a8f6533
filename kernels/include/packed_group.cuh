// What a group of a packed layer adds to its codes, chosen by -DAFFINE: w = s q (0), s q + o (1),
// s (q - z) (2). Needs packed_codes.cuh's rules of layout: scales, offsets and zeros are [N, G].
#pragma once
#include <cuda_fp16.h>

#ifndef AFFINE
#define AFFINE 0
#endif

#if AFFINE == 2
using shift_type = signed char;
#else
using shift_type = __half;
#endif

struct Group {
    float scale;
    float shift;

    __device__ __forceinline__ float weight(int code) const {
#if AFFINE == 0
        return scale * code;
#elif AFFINE == 1
        return fmaf(scale, code, shift);
#else
        return scale * (code - shift);
#endif
    }
};

// Group number `index` of the array of all groups, row-major.
__device__ __forceinline__ Group read_group(const __half* scales, const shift_type* shifts,
                                            size_t index) {
    Group group{__half2float(scales[index]), 0.f};
#if AFFINE == 1
    group.shift = __half2float(shifts[index]);
#elif AFFINE == 2
    group.shift = static_cast<float>(shifts[index]);
#endif
    return group;
}
