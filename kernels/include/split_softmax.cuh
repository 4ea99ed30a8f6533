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

struct Online {  // a warp's sums: of head `row` the first two, of heads 2 * pair and 2 * pair + 1 the last
    float highest = LOWEST;
    float total = 0.f;         // this lane's tokens only, until the end
    float out[STEPS][4] = {};  // rows: values 2 * i and 2 * i + 1; columns: the two heads
};

// One instruction; exp2f() would scale around subnormal results, which vanish here anyway.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float highest_of_pairs(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float sum_of_pairs(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Of this lane's group of `lanes`, a power of two.
__device__ __forceinline__ float highest_of_lanes(float x, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

__device__ __forceinline__ float sum_of_lanes(float x, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// scores: of this lane's head and tokens, times log2(e); becomes b of the second product.
__device__ __forceinline__ void soften(float (&scores)[4], const float (&lift)[4], Online& state,
                                       int pair, unsigned (&b)[2]) {
    const float here = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
    // Most tiles raise no highest score; then there is nothing to agree on.
    if (__any_sync(~0u, here > state.highest)) {
        const float highest = fmaxf(state.highest, highest_of_pairs(here));
        const float shrink = power_of_two(state.highest - highest);
        state.highest = highest;
        state.total *= shrink;
        const float first = __shfl_sync(~0u, shrink, 8 * pair);
        const float second = __shfl_sync(~0u, shrink, 8 * pair + 4);
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            state.out[i][0] *= first, state.out[i][1] *= second;
            state.out[i][2] *= first, state.out[i][3] *= second;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = power_of_two(scores[i] - state.highest);
    state.total += (scores[0] + scores[1]) + (scores[2] + scores[3]);
    b[0] = operand_pair(scores[0] * lift[0], scores[1] * lift[1]);
    b[1] = operand_pair(scores[2] * lift[2], scores[3] * lift[3]);
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

// Bring the warps' sums and totals to the block's highest scores; the sums of the first `active` warps,
// which had tiles, into sums[warp].
__device__ __forceinline__ void join_warps(const Online& state, int active, float* sums,
                                           Heights& heights) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, pair = lane % 4;
    const float total = sum_of_pairs(state.total);
    if (pair == 0) heights.highest[warp][row] = state.highest;
    __syncthreads();
    if (pair == 0) {
        heights.total[warp][row] = total * power_of_two(state.highest - heights.highest_of(row));
    }
    if (warp < active) {
        float shrink[2];
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            const int of = 2 * pair + head;
            shrink[head] = power_of_two(heights.highest[warp][of] - heights.highest_of(of));
        }
        float* mine = sums + warp * SUMS;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const float* out = state.out[i];
            *reinterpret_cast<float2*>(mine + sum_at(value_dim(row, 2 * i), 2 * pair)) =
                make_float2(out[0] * shrink[0], out[1] * shrink[1]);
            *reinterpret_cast<float2*>(mine + sum_at(value_dim(row, 2 * i + 1), 2 * pair)) =
                make_float2(out[2] * shrink[0], out[3] * shrink[1]);
        }
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
    float2 heights[HEADS];  // the highest score, and the total
    float4 sums[HEADS / 4][HEAD_DIM];  // four heads each
};

// A word of a Part that its split has not left yet: a NaN that no arithmetic makes. So every word says
// for itself whether it is there, and neither fence nor counter stands between who leaves and who takes.
constexpr unsigned ABSENT = 0xffffffff;

__device__ __forceinline__ unsigned present(float x) {
    const unsigned bits = __float_as_uint(x);
    return bits == ABSENT ? 0x7fffffff : bits;
}

__device__ __forceinline__ void leave(float2* to, float2 x) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(present(x.x)),
                 "r"(present(x.y)) : "memory");
}

__device__ __forceinline__ void leave(float4* to, float4 x) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(present(x.x)),
                 "r"(present(x.y)), "r"(present(x.z)), "r"(present(x.w)) : "memory");
}

__device__ __forceinline__ uint2 look(const float2* at) {
    uint2 got;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];"
                 : "=r"(got.x), "=r"(got.y) : "l"(at) : "memory");
    return got;
}

__device__ __forceinline__ uint4 look(const float4* at) {
    uint4 got;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w) : "l"(at) : "memory");
    return got;
}

__device__ __forceinline__ bool is_absent(uint2 x) { return x.x == ABSENT || x.y == ABSENT; }

__device__ __forceinline__ bool is_absent(uint4 x) {
    return x.x == ABSENT || x.y == ABSENT || x.z == ABSENT || x.w == ABSENT;
}

// What a lane has asked for of the splits of a unit. All that is missing is asked for again at once:
// one after another, each would wait for a round trip of its own.
struct Arrivals {
    static constexpr int AT_ONCE = 8;
    uint4 sums[AT_ONCE];
    uint2 height;

    // of(s): where this thread's sums of split s lie; splits first..last - 1, if it adds at all; and the
    // height at `at`, if any.
    template <typename Of>
    __device__ __forceinline__ void wait(const Of& of, int first, int last, const float2* at) {
        height = at == nullptr ? make_uint2(0, 0) : make_uint2(ABSENT, ABSENT);
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s) {
            sums[s] = first + s < last ? make_uint4(ABSENT, 0, 0, 0) : make_uint4(0, 0, 0, 0);
        }
        bool misses = true;
        while (misses) {
            if (is_absent(height)) height = look(at);
#pragma unroll
            for (int s = 0; s < AT_ONCE; ++s) {
                if (is_absent(sums[s])) sums[s] = look(of(first + s));
            }
            misses = is_absent(height);
#pragma unroll
            for (int s = 0; s < AT_ONCE; ++s) misses |= is_absent(sums[s]);
        }
    }
};

// The weights of a unit's splits by their heights, for the whole block: weights[split][HEADS]. Of head
// `warp`: own is the height of the last split, which is this block, came that of split `lane`.
__device__ __forceinline__ void weigh_splits(Part* part, int parts, float2 own, uint2 came,
                                             float* weights) {
    const int lane = threadIdx.x % 32, head = threadIdx.x / 32, lanes = parts > 8 ? 32 : 8;
    float* totals = weights + parts * HEADS;
    if (head < HEADS) {
        float most = own.x, total = 0.f;
        if (lane == 0) {
            weights[(parts - 1) * HEADS + head] = own.x;
            totals[(parts - 1) * HEADS + head] = own.y;
        }
        for (int s = lane; s < parts - 1; s += 32) {
            float2* at = &part[s].heights[head];
            uint2 got = came;
            if (s >= 32) got = look(at);
            while (is_absent(got)) got = look(at);
            *at = make_float2(__uint_as_float(ABSENT), __uint_as_float(ABSENT));
            const float high = __uint_as_float(got.x);
            totals[s * HEADS + head] = __uint_as_float(got.y);
            weights[s * HEADS + head] = high;
            most = fmaxf(most, high);
        }
        __syncwarp();
        most = highest_of_lanes(most, lanes);
        for (int s = lane; s < parts; s += 32) {
            const float weight = power_of_two(weights[s * HEADS + head] - most);
            weights[s * HEADS + head] = weight;
            total += totals[s * HEADS + head] * weight;
        }
        const float share = __fdividef(1.f, sum_of_lanes(total, lanes) * SCALE_LIFT);
        for (int s = lane; s < parts; s += 32) weights[s * HEADS + head] *= share;
    }
    __syncthreads();
}

// -DCLUSTER=1, on sm_90 and newer: blocks that were launched as a cluster, one for each split, meet in
// each other's shared memory.
#if defined(CLUSTER) && CLUSTER && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define MEETS_IN_CLUSTER 1
#else
#define MEETS_IN_CLUSTER 0
#endif

#if MEETS_IN_CLUSTER
__device__ __forceinline__ void arrive_in_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ bool is_in_cluster() {
    unsigned blocks;
    asm("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(blocks));
    return blocks > 1;
}

// The address of what lies at `at` here, in block `rank` of the cluster.
__device__ __forceinline__ unsigned in_block(const void* at, int rank) {
    unsigned there;
    const unsigned here = unsigned(__cvta_generic_to_shared(at));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    return there;
}

// Of `parts` blocks, the first of a cluster, each takes every parts-th four heads of a dim from all of
// them, and puts the whole into `out` [heads, HEAD_DIM]. sum: this thread's, if it adds. Blocks without
// tiles have left, and nobody waits for them.
__device__ __forceinline__ void join_cluster(float4 sum, bool adds, const Heights& heights, int parts,
                                             int heads, element* out) {
    constexpr int MOST = 8, EACH = HEAD_DIM * HEADS / 4;
    __shared__ float4 sums[EACH + MOST];  // [parts][each]
    __shared__ float2 height[MOST][HEADS];
    const int each = (EACH + parts - 1) / parts, split = blockIdx.y, thread = threadIdx.x;
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all have begun
    if (adds) {
        const unsigned to = in_block(&sums[split * each + thread / parts], thread % parts);
        asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(sum.x),
                     "f"(sum.y), "f"(sum.z), "f"(sum.w) : "memory");
    }
    if (thread < parts * HEADS) {
        const int head = thread % HEADS;
        const unsigned to = in_block(&height[split][head], thread / HEADS);
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(to),
                     "f"(heights.highest_of(head)), "f"(heights.total_of(head)) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
    for (int i = thread; i < 4 * each; i += WARPS * 32) {
        const int quad = i / 4 * parts + split;
        if (quad >= EACH) break;
        const int dim = quad % HEAD_DIM, head = quad / HEAD_DIM * 4 + i % 4;
        float2 came[MOST];
        float most = LOWEST, total = 0.f, whole = 0.f;
#pragma unroll
        for (int s = 0; s < MOST; ++s) {
            came[s] = s < parts ? height[s][head] : make_float2(LOWEST, 0.f);
            most = fmaxf(most, came[s].x);
        }
#pragma unroll
        for (int s = 0; s < MOST; ++s) {
            if (s >= parts) break;
            const float weight = power_of_two(came[s].x - most);
            total += came[s].y * weight;
            whole += reinterpret_cast<const float*>(sums + s * each)[i] * weight;
        }
        whole = __fdividef(whole, total * SCALE_LIFT);
        if (head < heads) out[head * HEAD_DIM + dim] = to_element(whole);
    }
}
#endif

// Warps to a block, blocks to a sequence: the block's share of `parts` goes to `out` [heads, HEAD_DIM]
// where it is the only one. Else all but the last leave theirs in `partial`, and the last one waits
// for them and adds them up in order, so with equal bits each time. Blocks begin in the order of their
// numbers, so those that it waits for have begun before it; cards do so, CUDA does not promise it. All
// blocks of a sequence must see the same length: one that never comes is waited for without end.
// active: of its warps had tiles. grid (units, splits, sequences). sums: shared memory, [WARPS][SUMS].
// partial: ABSENT in every word, before and after.
__device__ __forceinline__ void finish(const Online& state, int active, float* sums, Part* partial,
                                       int parts, int heads, element* out) {
    constexpr int EACH = HEAD_DIM * HEADS / 4;
    static_assert(WARPS >= HEADS, "a warp for each head's weights");
    static_assert(EACH <= WARPS * 32, "a thread for each four heads of a dim");
    __shared__ Heights heights;
    const size_t unit = size_t(blockIdx.z) * gridDim.x + blockIdx.x;
    const int split = blockIdx.y, dim = threadIdx.x % HEAD_DIM, quad = threadIdx.x / HEAD_DIM * 4;
    const bool adds = threadIdx.x < EACH;
    join_warps(state, active, sums, heights);
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    const float4 one = make_float4(1.f, 1.f, 1.f, 1.f);
    if (adds) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            if (w >= active) break;
            const float* at = sums + w * SUMS + sum_at(dim, quad);
            add_scaled(sum, *reinterpret_cast<const float4*>(at), one);
        }
    }
#if MEETS_IN_CLUSTER
    if (parts > 1 && is_in_cluster()) {
        join_cluster(sum, adds, heights, parts, heads, out);
        return;
    }
#endif
    out += quad * HEAD_DIM + dim;
    if (parts == 1) {
        const auto shared_out = [&](int head) {  // without keys all is 0
            const float total = heights.total_of(quad + head) * SCALE_LIFT;
            return active > 0 ? __fdividef(1.f, total) : 0.f;
        };
        if (!adds) return;
        sum.x *= shared_out(0), sum.y *= shared_out(1);
        sum.z *= shared_out(2), sum.w *= shared_out(3);
        store_heads(out, sum, quad, heads);
        return;
    }
    Part* part = partial + unit * gridDim.y;
    const auto sums_of = [&](int s) { return &part[s].sums[quad / 4][dim]; };
    if (split < parts - 1) {
        if (adds) leave(sums_of(split), sum);
        if (threadIdx.x < HEADS) {
            const int head = threadIdx.x;
            leave(&part[split].heights[head],
                  make_float2(heights.highest_of(head), heights.total_of(head)));
        }
        return;
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool asks = warp < HEADS && lane < parts - 1;
    const int head = warp % HEADS;
    const float2 own = make_float2(heights.highest_of(head), heights.total_of(head));
    Arrivals came = {};
    came.wait(sums_of, 0, adds ? parts - 1 : 0, asks ? &part[lane].heights[warp] : nullptr);
    __syncthreads();  // the sums of the warps are read: the weights take their place
    weigh_splits(part, parts, own, came.height, sums);
    if (!adds) return;
    const auto weight = [&](int s) {
        return *reinterpret_cast<const float4*>(sums + s * HEADS + quad);
    };
    const float none = __uint_as_float(ABSENT);
    float4 whole = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int first = 0; first < parts - 1; first += Arrivals::AT_ONCE) {
        if (first > 0) came.wait(sums_of, first, parts - 1, nullptr);
#pragma unroll
        for (int s = 0; s < Arrivals::AT_ONCE; ++s) {
            if (first + s >= parts - 1) break;
            add_scaled(whole, *reinterpret_cast<const float4*>(&came.sums[s]), weight(first + s));
            *sums_of(first + s) = make_float4(none, none, none, none);
        }
    }
    add_scaled(whole, sum, weight(parts - 1));
    store_heads(out, whole, quad, heads);
}
