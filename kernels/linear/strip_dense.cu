// W in strips to fp16 rows, for a product by cuBLAS: a warp makes 16 rows by 64 columns.
//
// Defines: BITS 3 or 4; GROUP columns of a scale (0: the whole row); OFFSETS 0 or 1.
#include "strip_dequantise.cuh"

constexpr int WARPS = 8;

// dense [rows, k], k a multiple of 8, is filled with out-features from `first_strip` on. `blocks`
// of 64 columns lie in a stored strip; blockIdx.x counts them by WARPS, blockIdx.y counts strips.
extern "C" __global__ void __launch_bounds__(32 * WARPS) strip_dense(
    const uint4* words, const __half* scales, const __half* offsets, __half* dense, int first_strip,
    int rows, int k, int blocks, int groups) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int block = blockIdx.x * WARPS + (threadIdx.x >> 5), column = block * 64 + t * 16;
    if (column >= k) return;
    const size_t strip = first_strip + blockIdx.y;
    unsigned packed[BITS];
    if constexpr (BITS == 4) {
        const uint4 v = __ldcs(words + (strip * blocks + block) * 32 + lane);
        packed[0] = v.x, packed[1] = v.y, packed[2] = v.z, packed[3] = v.w;
    } else {
        const unsigned* from = reinterpret_cast<const unsigned*>(
            words + (strip * (blocks / 4) + block / 4) * 96 + lane) + block % 4;
#pragma unroll
        for (int plane = 0; plane < 3; ++plane) packed[plane] = __ldg(from + plane * 128);
    }
    const size_t at = (strip * groups + (GROUP == 0 ? 0 : column / (GROUP == 0 ? 1 : GROUP))) * 16;
    gemm::Scales own;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        own.scale[half] = __half2half2(scales[at + g + 8 * half]);
        if (OFFSETS) own.offset[half] = __half2half2(offsets[at + g + 8 * half]);
    }
    unsigned a[4][4];
    gemm::fragments_of<OFFSETS != 0>(packed, own, a);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = blockIdx.y * 16 + g + 8 * half;
        if (row >= rows) return;
        uint4* to = reinterpret_cast<uint4*>(dense + (size_t)row * k + column);
        to[0] = make_uint4(a[0][half], a[0][2 + half], a[1][half], a[1][2 + half]);
        if (column + 8 < k)
            to[1] = make_uint4(a[2][half], a[2][2 + half], a[3][half], a[3][2 + half]);
    }
}
