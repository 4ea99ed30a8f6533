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
#include "paged_stream.cuh"

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
    const int guess = (split * tiles_per_split + warp + lane * WARPS) / TILES_PER_BLOCK;
    int blocks = window == 0 && guess < table_width ? __ldcg(table + guess) : 0;
    const int length = __ldcg(lengths + sequence);
    const int low = window > 0 ? max(0, length - window) : 0;
    const int begin = low / TILE, end = (length + TILE - 1) / TILE;
    const int first = begin + split * tiles_per_split, last = min(end, first + tiles_per_split);
    if (first >= last && split > 0) return;
    if (window > 0 && first + warp + lane * WARPS < last) {
        blocks = table[(first + warp + lane * WARPS) / TILES_PER_BLOCK];
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
    Held held;
    if (first + warp < last) {
        const size_t slot = cache.slot(__shfl_sync(~0u, blocks, 0), first + warp);
        held.ask_keys(cache, slot, row, pair);
        held.ask_values(cache, slot, row, pair);
    }
    const auto fragment = [&](int step, unsigned (&b)[2]) {
        b[0] = query[step][0], b[1] = query[step][1];
    };
    attend<false>(cache, fragment, first + warp, last, low, length, blocks, {}, held, state);
    finish(state, sums, partial, counters, parts, heads, length == 0, out + at);
}
