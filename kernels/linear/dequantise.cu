// Rows first .. first + count - 1 of a packed layer as a dense matrix [count, K], from the bytes on
// disk: what cuBLAS multiplies where the rows of x are many. Reads each code once, writes 16 / BITS
// times as many bytes; bound by DRAM. A warp owns a row, a lane eight columns at a time.
//
// BITS 3, 4 or 8; AFFINE see packed_group; BF16 the type written; WHOLE 1 where K is a multiple of 8.
#include "element.cuh"
#include "packed_codes.cuh"
#include "packed_group.cuh"

constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(32 * WARPS)
dequantise_rows(const unsigned char* __restrict__ codes, const __half* __restrict__ scales,
                const shift_type* __restrict__ shifts, element* __restrict__ dense, int first,
                int count, int k, int group) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= count) return;
    const int bytes = row_bytes<BITS>(k), groups = (k + group - 1) / group;
    const unsigned char* from = codes + static_cast<size_t>(first + row) * bytes;
    const size_t base = static_cast<size_t>(first + row) * groups;
    element* to = dense + static_cast<size_t>(row) * k;
    for (int at = (blockIdx.y * 32 + lane) * 8; at < k; at += gridDim.y * 32 * 8) {
        int code[8];
        eight_codes<BITS, WHOLE>(from, at, bytes, code);
        const Group its = read_group(scales, shifts, base + at / group);
#if WHOLE
        unsigned pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pair[i] = element_pair(its.weight(code[2 * i]), its.weight(code[2 * i + 1]));
        *reinterpret_cast<uint4*>(to + at) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
#else
        for (int i = 0; i < 8; ++i)
            if (at + i < k) to[at + i] = to_element(its.weight(code[i]));
#endif
    }
}
