// Decode attention over a paged KV cache: one query row a sequence, grouped query heads, split KV.
//
// grid (kv_heads * head_tiles, splits, sequences), block WARPS * 32. A block attends
// tiles_per_split tiles of 16 tokens for up to 8 query heads of one KV head. Its warps take every
// WARPS-th tile and ask for the next one's keys as soon as this one's are multiplied, and for its
// values likewise, so that one of both is always on its way. The blocks of a sequence that was split
// leave their sums in `partial`; the last of them to finish, by a counter that it sets back to zero,
// adds them up. So there is no second launch and a graph can replay it.
//
// Softmax is online (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018);
// splitting the keys is Flash-Decoding (Dao et al., 2023). Queries come scaled by 1 / sqrt(dim).
//
// -DHEAD_DIM -DKV_BITS -DBF16 (include/kv_tile.cuh), -DWARPS, -DBLOCK_TOKENS (a multiple of 16),
// -DMIN_BLOCKS: blocks a multiprocessor must be able to hold, a cap on registers.
#include "kv_tile.cuh"

constexpr float LOG2E = 1.44269504f;
constexpr float LOWEST = -1e30f;  // finite: the difference of two of them is 0, not NaN
// INT8: probabilities carry their token's value scale into the product; without this factor a small
// scale would be a subnormal half.
constexpr float SCALE_LIFT = KV_BITS == 8 ? 64.f : 1.f;

static_assert(BLOCK_TOKENS % TILE == 0, "a tile must not cross a block");

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

struct Cache {  // one sequence's view of one layer, for one KV head
    const char* keys;
    const unsigned* scales;
    const int* table;
    size_t token_bytes;
    int kv_heads;

    __device__ __forceinline__ size_t slot(int block, int tile) const {
        return size_t(block) * BLOCK_TOKENS + tile % (BLOCK_TOKENS / TILE) * TILE;
    }
    __device__ __forceinline__ int block_of(int tile) const {
        return __ldcg(table + tile / (BLOCK_TOKENS / TILE));
    }
    // Bring a warp's first tile nearer, all KV heads of it, while an earlier kernel still runs. Length
    // and table may be those of an earlier step then; what is right is read again (past L1) later.
    __device__ __forceinline__ void expect(int tile, int length, int kv_head) const {
        if (tile * TILE >= length || kv_head > 0 || threadIdx.x % 32 > 0) return;
        prefetch(keys + slot(block_of(tile), tile) * token_bytes, int(TILE * token_bytes));
    }
};

struct Scales {  // of tokens row and row + 8: a key's and its value's in one word
    unsigned both[2];

    __device__ __forceinline__ void load(const Cache& cache, size_t slot, int row) {
        if constexpr (KV_BITS == 8) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                load_once<4>(cache.scales + (slot + row + 8 * half) * cache.kv_heads, &both[half]);
            }
        }
    }
    // What turns a raw score into a power of two's exponent, and what a probability carries along.
    __device__ __forceinline__ void factors(float (&unit)[2], float (&lift)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unit[half] = LOG2E, lift[half] = SCALE_LIFT;
            if constexpr (KV_BITS == 8) {
                const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&both[half]));
                unit[half] *= scale.x, lift[half] *= scale.y;
            }
        }
    }
};

// Attend tiles first, first + WARPS, ... below `last`, of which tokens low..high - 1 count. blocks:
// of this lane's tile, first + lane * WARPS.
__device__ __forceinline__ void attend(const Cache& cache, const unsigned (&query)[STEPS][2],
                                       int first, int last, int low, int high, int blocks,
                                       Online& state) {
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
    const size_t stride = cache.token_bytes, value_offset = stride / 2;
    if (first >= last) return;
    KeyTile keys;
    ValueTile values;
    Scales scales;
    int round = 0;
    size_t slot = cache.slot(__shfl_sync(~0u, blocks, 0), first);
    keys.load(cache.keys + slot * stride, stride, row, pair);
    scales.load(cache, slot, row);
    values.load(cache.keys + slot * stride + value_offset, stride, row, pair);
    for (int tile = first; tile < last; tile += WARPS) {
        float scores[4] = {}, unit[2], lift[2];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            unsigned a[4];
            keys.fragment(step, a);
            mma_cached(scores, a, query[step]);
        }
        scales.factors(unit, lift);
        const int next = tile + WARPS, start = tile * TILE;
        if (next < last) {
            if (++round % 32 == 0) {
                const int mine = next + lane * WARPS;
                blocks = mine < last ? cache.block_of(mine) : 0;
            }
            slot = cache.slot(__shfl_sync(~0u, blocks, round % 32), next);
            keys.load(cache.keys + slot * stride, stride, row, pair);
            scales.load(cache, slot, row);
        }
        const bool whole = start >= low && start + TILE <= high;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = start + row + 8 * (i / 2);
            scores[i] = whole || (token >= low && token < high) ? scores[i] * unit[i / 2] : LOWEST;
        }
        if (!whole) {
            values.clear_outside(pair, low - start, high - start);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = start + row + 8 * half;
                if (token < low || token >= high) lift[half] = 0.f;
            }
        }
        unsigned b[2];
        soften(scores, lift, state, b);
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            unsigned a[4];
            values.fragment(i, a);
            mma_cached(state.out[i], a, b);
        }
        if (next < last) values.load(cache.keys + slot * stride + value_offset, stride, row, pair);
    }
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

// q, out [rows, kv_heads * group, HEAD_DIM]; kv [blocks, BLOCK_TOKENS, 2, kv_heads, HEAD_DIM];
// scales [blocks, BLOCK_TOKENS, kv_heads, 2] (INT8), a key's beside its value's; tables
// i32[sequences, table_width], behind a sequence's last block any valid one; lengths i32[sequences],
// 0: the row becomes zeros; rows i32[sequences]: which row is the sequence's (null: its number);
// window: keys a row sees, itself included (0: all). partial: Part[sequences, kv_heads * head_tiles,
// splits]; counters u32[sequences, kv_heads * head_tiles], zero.
extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
paged_decode(const element* q, const char* kv, const unsigned* scales, const int* tables,
             const int* lengths, const int* rows, element* out, Part* partial, unsigned* counters,
             int kv_heads, int group, int table_width, int tiles_per_split, int window) {
    extern __shared__ __align__(16) float sums[];  // [WARPS][SUMS]
    __shared__ Heights heights;
    __shared__ bool is_last;
    allow_next();
    const int sequence = blockIdx.z, split = blockIdx.y, warp = threadIdx.x / 32;
    const int kv_head = blockIdx.x % kv_heads, head_tile = blockIdx.x / kv_heads;
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
    const int heads = min(HEADS, group - head_tile * HEADS);
    const int* table = tables + size_t(sequence) * table_width;
    const size_t token_bytes = size_t(2) * kv_heads * HEAD_DIM * VALUE_BYTES;
    const Cache cache = {kv + size_t(kv_head) * HEAD_DIM * VALUE_BYTES, scales + kv_head, table,
                         token_bytes, kv_heads};
    if (window == 0) {
        cache.expect(split * tiles_per_split + warp, __ldcg(lengths + sequence), kv_head);
    }
    wait_for_previous();
    // Without a window it is known before the length which blocks these are: ask for both at once.
    constexpr int tiles_per_block = BLOCK_TOKENS / TILE;
    const int guess = (split * tiles_per_split + warp + lane * WARPS) / tiles_per_block;
    int blocks = window == 0 && guess < table_width ? __ldcg(table + guess) : 0;
    const int length = __ldcg(lengths + sequence);
    const int low = window > 0 ? max(0, length - window) : 0;
    const int begin = low / TILE, end = (length + TILE - 1) / TILE;
    const int first = begin + split * tiles_per_split, last = min(end, first + tiles_per_split);
    if (first >= last && split > 0) return;
    if (window > 0 && first + warp + lane * WARPS < last) {
        blocks = table[(first + warp + lane * WARPS) / tiles_per_block];
    }
    const int parts = max(1, (end - begin + tiles_per_split - 1) / tiles_per_split);
    const int out_row = rows == nullptr ? sequence : rows[sequence];
    const int head = kv_head * group + head_tile * HEADS;
    const size_t at = (size_t(out_row) * kv_heads * group + head) * HEAD_DIM;
    unsigned query[STEPS][2] = {};
    if (row < heads) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            query_fragment(q + at + row * HEAD_DIM, pair, step, query[step]);
        }
    }
    Online state;
    attend(cache, query, first + warp, last, low, length, blocks, state);
    join_warps(state, sums, heights);

    Part* part = partial + (size_t(sequence) * gridDim.x + blockIdx.x) * gridDim.y;
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
                return length > 0 ? __fdividef(1.f, total) : 0.f;
            };
            sum.x *= shared_out(0), sum.y *= shared_out(1);
            sum.z *= shared_out(2), sum.w *= shared_out(3);
            store_heads(out + at + quad * HEAD_DIM + dim, sum, quad, heads);
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
        unsigned* counter = counters + size_t(sequence) * gridDim.x + blockIdx.x;
        unsigned before;  // behind a barrier, one thread's release covers the whole block's stores
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                     : "=r"(before) : "l"(counter) : "memory");
        is_last = before == unsigned(parts) - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    if (is_last) join_splits(part, parts, heads, sums, out + at);
}
