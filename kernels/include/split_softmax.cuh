// Online softmax of up to eight query heads, and how the sums of warps and of splits become one.
//
// Softmax is online (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018);
// splitting the keys is Flash-Decoding (Dao et al., 2023). -DWARPS, and those of kv_tile.cuh.
#pragma once
#include "kv_tile.cuh"

constexpr float LOG2E = 1.44269504f;
constexpr float LOWEST = -1e30f;  // finite: the difference of two of them is 0, not NaN
// INT8: probabilities carry their token's value scale into the product; without this factor a small
// scale would be a subnormal half.
constexpr float SCALE_LIFT = KV_BITS == 8 ? 64.f : 1.f;

struct Online {  // of the two heads 2 * pair and 2 * pair + 1
    float highest[2] = {LOWEST, LOWEST};
    float total[2] = {0.f, 0.f};  // this lane's tokens only, until the end
    float out[STEPS][4] = {};     // rows: values i and i + DIMS / 2; columns: the two heads
};

// One instruction; exp2f() would scale around subnormal results, which vanish here anyway.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float highest_of_rows(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

__device__ __forceinline__ float sum_of_rows(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// scores: c of the first product, times log2(e); becomes b of the second.
__device__ __forceinline__ void soften(float (&scores)[4], const float (&lift)[2], Online& state,
                                       unsigned (&b)[2]) {
    float shrink[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
        const float here = highest_of_rows(fmaxf(scores[head], scores[head + 2]));
        const float highest = fmaxf(state.highest[head], here);
        shrink[head] = power_of_two(state.highest[head] - highest);
        state.highest[head] = highest;
        scores[head] = power_of_two(scores[head] - highest);
        scores[head + 2] = power_of_two(scores[head + 2] - highest);
        state.total[head] = state.total[head] * shrink[head] + scores[head] + scores[head + 2];
    }
    if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            state.out[i][0] *= shrink[0], state.out[i][1] *= shrink[1];
            state.out[i][2] *= shrink[0], state.out[i][3] *= shrink[1];
        }
    }
    b[0] = transpose_tile(operand_pair(scores[0] * lift[0], scores[1] * lift[0]));
    b[1] = transpose_tile(operand_pair(scores[2] * lift[1], scores[3] * lift[1]));
}

// A warp's sums in shared memory, [dim][head]; a gap behind every eight dims keeps the lanes of one
// store in different banks.
constexpr int SUMS = HEAD_DIM * HEADS + HEAD_DIM / 8 * HEADS;

__device__ __forceinline__ int sum_at(int dim, int head) {
    return (dim + dim / 8) * HEADS + head;
}

struct Heights {  // of a block's warps and heads: the highest score, and the total
    float highest[WARPS][HEADS], total[WARPS][HEADS];

    __device__ __forceinline__ float highest_of(int head) const {
        float most = LOWEST;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) most = fmaxf(most, highest[w][head]);
        return most;
    }
    __device__ __forceinline__ float total_of(int head) const {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += total[w][head];
        return sum;
    }
};

// Bring the warps' sums and totals to the block's highest scores; the sums into sums[warp].
__device__ __forceinline__ void join_warps(const Online& state, float* sums, Heights& heights) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, pair = lane % 4;
    float total[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
        if (row == 0) heights.highest[warp][2 * pair + head] = state.highest[head];
        total[head] = sum_of_rows(state.total[head]);
    }
    __syncthreads();
    float shrink[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
        shrink[head] = power_of_two(state.highest[head] - heights.highest_of(2 * pair + head));
        if (row == 0) heights.total[warp][2 * pair + head] = total[head] * shrink[head];
    }
    float* mine = sums + warp * SUMS;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const float* out = state.out[i];
        *reinterpret_cast<float2*>(mine + sum_at(value_dim(row, i), 2 * pair)) =
            make_float2(out[0] * shrink[0], out[1] * shrink[1]);
        *reinterpret_cast<float2*>(mine + sum_at(value_dim(row, i + DIMS / 2), 2 * pair)) =
            make_float2(out[2] * shrink[0], out[3] * shrink[1]);
    }
    __syncthreads();
}

__device__ __forceinline__ void add_scaled(float4& sum, float4 more, float4 by) {
    sum.x += more.x * by.x, sum.y += more.y * by.y, sum.z += more.z * by.z, sum.w += more.w * by.w;
}

// Four heads' values of one dim; only the first `heads` exist. out: of head `first`.
__device__ __forceinline__ void store_heads(element* out, float4 sum, int first, int heads) {
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (first + i < heads) out[i * HEAD_DIM] = to_element(values[i]);
    }
}

struct Part {  // what one split leaves behind for one (sequence, head tile)
    float highest[HEADS], total[HEADS], sums[HEAD_DIM][HEADS];
};

// `parts` splits into one output, by the whole block and in the splits' order, so with equal bits
// each time. weights: shared memory, [2][parts][HEADS].
__device__ __forceinline__ void join_splits(const Part* part, int parts, int heads, float* weights,
                                            element* out) {
    constexpr int AT_ONCE = 8, EACH = HEAD_DIM * HEADS / 4;
    const int lane = threadIdx.x % 32;
    const auto sums_of = [&](int s, int i) {
        const float* at = &part[min(s, parts - 1)].sums[i % HEAD_DIM][i / HEAD_DIM * 4];
        return __ldcg(reinterpret_cast<const float4*>(at));
    };
    float4 got[AT_ONCE];  // the first ones are on their way while the heights come in
    const int begin = min(int(threadIdx.x), EACH - 1);
#pragma unroll
    for (int s = 0; s < AT_ONCE; ++s) got[s] = sums_of(s, begin);
    float* totals = weights + parts * HEADS;
    for (int head = threadIdx.x / 32; head < HEADS; head += WARPS) {
        float most = LOWEST, total = 0.f;
        for (int s = lane; s < parts; s += 32) {
            const float high = __ldcg(&part[s].highest[head]);
            totals[s * HEADS + head] = __ldcg(&part[s].total[head]);
            weights[s * HEADS + head] = high;
            most = fmaxf(most, high);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        }
        for (int s = lane; s < parts; s += 32) {
            const float weight = power_of_two(weights[s * HEADS + head] - most);
            weights[s * HEADS + head] = weight;
            total += totals[s * HEADS + head] * weight;
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
        const float share = __fdividef(1.f, total * SCALE_LIFT);
        for (int s = lane; s < parts; s += 32) weights[s * HEADS + head] *= share;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < EACH; i += WARPS * 32) {
        const int quad = i / HEAD_DIM * 4;
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int first = 0; first < parts; first += AT_ONCE) {
            if (first > 0 || i != threadIdx.x) {
#pragma unroll
                for (int s = 0; s < AT_ONCE; ++s) got[s] = sums_of(first + s, i);
            }
#pragma unroll
            for (int s = 0; s < AT_ONCE; ++s) {
                if (first + s >= parts) break;
                const float* by = weights + (first + s) * HEADS + quad;
                add_scaled(sum, got[s], *reinterpret_cast<const float4*>(by));
            }
        }
        store_heads(out + quad * HEAD_DIM + i % HEAD_DIM, sum, quad, heads);
    }
}

// Warps to a block, blocks to a sequence: the block's share of `parts` goes to `out` [heads,
// HEAD_DIM] where it is the only one, else into `partial`, and the last block of a sequence to
// finish, by a counter that it sets back to zero, adds all of them up. is_empty: no key is attended.
// grid (units, splits, sequences). sums: shared memory, [WARPS][SUMS].
__device__ __forceinline__ void finish(const Online& state, float* sums, Part* partial,
                                       unsigned* counters, int parts, int heads, bool is_empty,
                                       element* out) {
    __shared__ Heights heights;
    __shared__ bool is_last;
    const size_t unit = size_t(blockIdx.z) * gridDim.x + blockIdx.x;
    const int split = blockIdx.y;
    join_warps(state, sums, heights);
    Part* part = partial + unit * gridDim.y;
    for (int i = threadIdx.x; i < HEAD_DIM * HEADS / 4; i += WARPS * 32) {
        const int dim = i % HEAD_DIM, quad = i / HEAD_DIM * 4;
        const float4 one = make_float4(1.f, 1.f, 1.f, 1.f);
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float* at = sums + w * SUMS + sum_at(dim, quad);
            add_scaled(sum, *reinterpret_cast<const float4*>(at), one);
        }
        if (parts == 1) {
            const auto shared_out = [&](int head) {  // without keys all is 0
                const float total = heights.total_of(quad + head) * SCALE_LIFT;
                return is_empty ? 0.f : __fdividef(1.f, total);
            };
            sum.x *= shared_out(0), sum.y *= shared_out(1);
            sum.z *= shared_out(2), sum.w *= shared_out(3);
            store_heads(out + quad * HEAD_DIM + dim, sum, quad, heads);
        } else {
            *reinterpret_cast<float4*>(&part[split].sums[dim][quad]) = sum;
        }
    }
    if (parts == 1) return;
    if (threadIdx.x < HEADS) {
        part[split].highest[threadIdx.x] = heights.highest_of(threadIdx.x);
        part[split].total[threadIdx.x] = heights.total_of(threadIdx.x);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned* counter = counters + unit;
        unsigned before;  // behind a barrier, one thread's release covers the whole block's stores
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                     : "=r"(before) : "l"(counter) : "memory");
        is_last = before == unsigned(parts) - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    if (is_last) join_splits(part, parts, heads, sums, out);
}
