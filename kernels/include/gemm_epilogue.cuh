// The end of a tile: sums of the splits, bias, gate, residual, fp16 rows of y.
//
// The including source also defines STRIPS and ROW_TILES (a warp's sixteens of out-features and
// eights of rows), SUMMING_THREADS (those of a block that hold sums) and SILU.
#pragma once
#include "gemm_units.cuh"
#include "tensor_core.cuh"

using Sums = float[STRIPS][ROW_TILES][4];

// Of the summing threads only; others of the block may be elsewhere.
__device__ __forceinline__ void sum_barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(SUMMING_THREADS) : "memory");
}

// Sums over the splits of a tile, by the block that arrives last and in the order of the splits, so
// always the same sum. True in that block. `thread`: 0 .. SUMMING_THREADS - 1.
__device__ __forceinline__ bool gather(const Problem& p, const Unit& u, Sums& sums, int thread) {
    constexpr int FRAGMENTS = STRIPS * ROW_TILES;
    constexpr int STRIDE = FRAGMENTS * SUMMING_THREADS;
    float4* first =
        reinterpret_cast<float4*>(p.partials) + (size_t)u.shared * p.splits * STRIDE + thread;
    float4* mine = first + u.split * STRIDE;
    __shared__ int arrived;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
        const float* c = sums[f / ROW_TILES][f % ROW_TILES];
        __stcg(mine + f * SUMMING_THREADS, make_float4(c[0], c[1], c[2], c[3]));
    }
    __threadfence();
    sum_barrier();
    if (thread == 0) {
        arrived = atomicAdd(p.arrivals + u.shared, 1);
        if (arrived == p.splits - 1) p.arrivals[u.shared] = 0;
    }
    sum_barrier();
    const bool is_last = arrived == p.splits - 1;
    if (!is_last) return false;
    __threadfence();
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
        float* c = sums[f / ROW_TILES][f % ROW_TILES];
        c[0] = c[1] = c[2] = c[3] = 0.0f;
    }
    for (int split = 0; split < p.splits; ++split)
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
            float* c = sums[f / ROW_TILES][f % ROW_TILES];
            const float4 v = __ldcg(first + split * STRIDE + f * SUMMING_THREADS);
            c[0] += v.x, c[1] += v.y, c[2] += v.z, c[3] += v.w;
        }
    return true;
}

__device__ __forceinline__ float silu(float v) { return v / (1.0f + __expf(-v)); }

// A lane's sums of strip s and eight rows with bias added: of its first and second out-feature, or
// what the gates and their ups come to.
__device__ __forceinline__ void finished(const float (&c)[4], const float (&bias)[2],
                                         unsigned (&tiles)[SILU ? 1 : 2]) {
    const float v[4] = {c[0] + bias[0], c[1] + bias[0], c[2] + bias[1], c[3] + bias[1]};
    if constexpr (SILU) {
        tiles[0] = transpose_tile(half_pair(silu(v[0]) * v[2], silu(v[1]) * v[3]));
    } else {
        tiles[0] = transpose_tile(half_pair(v[0], v[1]));
        tiles[1] = transpose_tile(half_pair(v[2], v[3]));
    }
}

// Two neighbouring out-features of one row, of an odd number of them: no pair lies on a word's edge.
__device__ __forceinline__ void store_odd(const Problem& p, int row, int feature, int width,
                                          unsigned pair) {
    if (row >= p.m) return;
    const __half2 v = *reinterpret_cast<const __half2*>(&pair);
    for (int i = 0; i < 2 && feature + i < width; ++i) {
        const size_t at = (size_t)row * width + feature + i;
        const __half one = i ? __high2half(v) : __low2half(v);
        p.y[at] = p.residual != nullptr ? __hadd(one, p.residual[at]) : one;
    }
}

// A lane has sums of one out-feature and two rows of x; transposed across the warp it has two
// out-features of one row, and four lanes write 16 bytes side by side. strip, row: the warp's first
// ones.
template <bool IS_ODD, bool WITH_RESIDUAL>
__device__ __forceinline__ void store_rows(const Problem& p, int strip, int row, Sums& sums) {
    constexpr int WIDTH = SILU ? 8 : 16;  // features of y that a strip makes
    const int lane = threadIdx.x & 31, width = SILU ? p.n / 2 : p.n;
    row += lane >> 2;
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) {
        if (strip + s >= strips_of(p)) break;
        float bias[2] = {0.0f, 0.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = (strip + s) * 16 + (lane >> 2) + 8 * half;
            if (p.bias != nullptr && own < p.n) bias[half] = __half2float(p.bias[own]);
        }
        const int feature = (strip + s) * WIDTH + 2 * (lane & 3);
        size_t at = (size_t)row * width + feature;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r, at += 8 * (size_t)width) {
            unsigned tiles[WIDTH / 8];
            finished(sums[s][r], bias, tiles);
#pragma unroll
            for (int half = 0; half < WIDTH / 8; ++half) {
                if constexpr (IS_ODD) {
                    store_odd(p, row + r * 8, feature + 8 * half, width, tiles[half]);
                } else if (row + r * 8 < p.m && feature + 8 * half < width) {
                    __half2 v = *reinterpret_cast<const __half2*>(&tiles[half]);
                    const size_t here = at + 8 * half;
                    if constexpr (WITH_RESIDUAL)
                        v = __hadd2(v, *reinterpret_cast<const __half2*>(p.residual + here));
                    *reinterpret_cast<__half2*>(p.y + here) = v;
                }
            }
        }
    }
}

__device__ __forceinline__ void store_tile(const Problem& p, int strip, int row, Sums& sums) {
    const int width = SILU ? p.n / 2 : p.n;
    if (width & 1) store_rows<true, true>(p, strip, row, sums);
    else if (p.residual != nullptr) store_rows<false, true>(p, strip, row, sums);
    else store_rows<false, false>(p, strip, row, sums);
}
