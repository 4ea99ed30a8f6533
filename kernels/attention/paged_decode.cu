// Decode attention over a paged KV cache: one query row a sequence, grouped query heads, split KV.
//
// grid (kv_heads * head_tiles, splits, sequences), block WARPS * 32. A block attends
// tiles_per_split tiles of 16 tokens for up to 8 query heads of one KV head. Its warps take every
// WARPS-th tile and ask for the next one's keys as soon as this one's are multiplied, and for its
// values likewise, so that one of both is always on its way. The blocks of a sequence that was split
// leave their sums in `partial` and the last of them adds them up as they come. So there is no second
// launch and a graph can replay it.
//
// Softmax is online (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018);
// splitting the keys is Flash-Decoding (Dao et al., 2023). Queries come scaled by 1 / sqrt(dim).
//
// -DHEAD_DIM -DKV_BITS -DBF16 (include/kv_tile.cuh), -DWARPS, -DBLOCK_TOKENS (a multiple of 16),
// -DMIN_BLOCKS: blocks a multiprocessor must be able to hold, a cap on registers.
#include "paged_stream.cuh"

// Eight query heads from global memory, `heads` of them there, by the block's first four warps: a warp
// takes two heads, 16 lanes each.
__device__ __forceinline__ void put_queries(const element* from, int heads, Queries& queries) {
    constexpr int LANES = 16, MINE = HEAD_DIM / LANES;
    const int head = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (head >= HEADS) return;
    Words<2 * MINE> got = {};
    if (head < heads) got = load_words<2 * MINE>(from + head * HEAD_DIM + lane * MINE);
    float values[MINE], largest = 0.f, inverse = 1.f;
#pragma unroll
    for (int i = 0; i < MINE; i += 2) {
        const float2 two = pair_to_float2(got.word[i / 2]);
        values[i] = two.x, values[i + 1] = two.y;
        largest = fmaxf(largest, fmaxf(fabsf(two.x), fabsf(two.y)));
    }
    if constexpr (KV_BITS == 8) {
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        }
        inverse = Queries::inverse_of(largest);
        if (lane == 0) queries.units[head] = largest / Queries::LARGEST;
    }
    queries.put(head, lane * MINE, values, inverse);
}

// q, out [rows, kv_heads * group, HEAD_DIM]; kv [blocks, BLOCK_TOKENS, 2, kv_heads, HEAD_DIM];
// scales [blocks, BLOCK_TOKENS, kv_heads, 2] (INT8), a key's beside its value's; tables
// i32[sequences, table_width], behind a sequence's last block any valid one; lengths i32[sequences],
// 0: the row becomes zeros; rows i32[sequences]: which row is the sequence's (null: its number);
// window: keys a row sees, itself included (0: all). partial: Part[sequences, kv_heads * head_tiles,
// splits], every word ABSENT, as it is again afterwards.
extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
paged_decode(const element* q, const char* kv, const unsigned* scales, const int* tables,
             const int* lengths, const int* rows, element* out, Part* partial, int kv_heads,
             int group, int table_width, int tiles_per_split, int window) {
    extern __shared__ __align__(16) float sums[];  // [WARPS][SUMS]
    __shared__ Queries queries;
    allow_next();
    const int sequence = blockIdx.z, split = blockIdx.y, warp = threadIdx.x / 32;
    const int kv_head = blockIdx.x % kv_heads, head_tile = blockIdx.x / kv_heads;
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
    const int heads = min(HEADS, group - head_tile * HEADS);
    const int* table = tables + size_t(sequence) * table_width;
    const unsigned token_bytes = 2 * kv_heads * HEAD_DIM * VALUE_BYTES;
    const Cache cache = {kv + size_t(kv_head) * HEAD_DIM * VALUE_BYTES, scales + kv_head, table,
                         token_bytes, kv_heads};
    if (window == 0) {
        cache.expect(split * tiles_per_split + warp, __ldcg(lengths + sequence), kv_head);
    }
    queries.clear(WARPS * 32);
    __syncthreads();
    wait_for_previous();
    // Without a window it is known before the length which blocks these are: ask for both at once.
    const int guess = (split * tiles_per_split + warp + lane * WARPS) / TILES_PER_BLOCK;
    int blocks = window == 0 && guess < table_width ? __ldcg(table + guess) : 0;
    const int length = __ldcg(lengths + sequence);
    const int low = window > 0 ? max(0, length - window) : 0;
    const int begin = low / TILE, end = (length + TILE - 1) / TILE;
    const int first = begin + split * tiles_per_split, splits = gridDim.y;
    // Keys beyond what the grid was made for are the last split's: nobody waits for one that is not.
    const int last = split + 1 == splits ? end : min(end, first + tiles_per_split);
    if (first >= last && split > 0) return;
    if (window > 0 && first + warp + lane * WARPS < last) {
        blocks = table[(first + warp + lane * WARPS) / TILES_PER_BLOCK];
    }
    const int parts = max(1, min(splits, (end - begin + tiles_per_split - 1) / tiles_per_split));
    const int out_row = rows == nullptr ? sequence : rows[sequence];
    const int head = kv_head * group + head_tile * HEADS;
    const size_t at = (size_t(out_row) * kv_heads * group + head) * HEAD_DIM;
    put_queries(q + at, heads, queries);
    Online state;
    Held held;
    held.begin(cache, row, pair);
    if (first + warp < last) {
        const unsigned slot = cache.slot(__shfl_sync(~0u, blocks, 0), first + warp);
        held.ask_keys(cache, slot);
        held.ask_values(cache, slot);
    }
    __syncthreads();
    attend<false>(cache, queries, first + warp, last, low, length, blocks, {}, held, state);
    finish(state, min(WARPS, last - first), sums, partial, parts, heads, out + at);
}
