// The seed's kernels for few rows: y[m, n] = sum_k x[m, k] w[n, k] + bias[n], on the bytes on disk.
// A warp owns an output row, a block has 8 warps; a lane walks K eight codes at a time, sums in
// fp32. Weights are read once a launch where BATCH rows of x share them, once for each row of x
// (grid.y) where BATCH is 1. Loses to any kernel that keeps more loads in flight, and from 16 rows
// on to anything tiled. They are the historical baseline and run on any card.
//
// BITS 4 or 3; BATCH 1 (single row, or grid.y = batch) or 8 (batch tile); AFFINE see packed_group;
// WHOLE 1 where K is a multiple of 8. Groups are multiples of 8 columns or the whole row.
#include "packed_codes.cuh"
#include "packed_group.cuh"

constexpr int WARPS = 8;

// x[k .. k + 7] as floats, zeros past the end of the row.
__device__ __forceinline__ void eight_values(const __half* row, int k, int columns, float* value) {
#if WHOLE
    const uint4 words = *reinterpret_cast<const uint4*>(row + k);
    const __half2* pair = reinterpret_cast<const __half2*>(&words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 both = __half22float2(pair[i]);
        value[2 * i] = both.x, value[2 * i + 1] = both.y;
    }
#else
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = k + i < columns ? __half2float(row[k + i]) : 0.f;
#endif
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
seed_gemv(const __half* __restrict__ x, const unsigned char* __restrict__ codes,
          const __half* __restrict__ scales, const shift_type* __restrict__ shifts,
          const __half* __restrict__ bias, __half* __restrict__ y, int rows, int n, int k,
          int group) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= n) return;
    const int first = blockIdx.y * BATCH, bytes = row_bytes<BITS>(k), groups = (k + group - 1) / group;
    const unsigned char* mine = codes + static_cast<size_t>(row) * bytes;
    float sum[BATCH] = {};
    for (int at = lane * 8; at < k; at += 32 * 8) {
        int code[8];
        float weight[8];
        eight_codes<BITS, WHOLE>(mine, at, bytes, code);
        const Group its = read_group(scales, shifts, static_cast<size_t>(row) * groups + at / group);
#pragma unroll
        for (int i = 0; i < 8; ++i) weight[i] = its.weight(code[i]);
#pragma unroll
        for (int m = 0; m < BATCH; ++m) {
            if (BATCH > 1 && first + m >= rows) break;
            float value[8], part = 0.f;
            eight_values(x + static_cast<size_t>(first + m) * k, at, k, value);
#pragma unroll
            for (int i = 0; i < 8; ++i) part = fmaf(weight[i], value[i], part);
            sum[m] += part;
        }
    }
#pragma unroll
    for (int m = 0; m < BATCH; ++m) {
        const float total = warp_sum(sum[m]) + (bias ? __half2float(bias[row]) : 0.f);
        if (lane == 0 && first + m < rows)
            y[static_cast<size_t>(first + m) * n + row] = __float2half(total);
    }
}
