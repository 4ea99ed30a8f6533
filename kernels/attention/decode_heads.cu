// From the projected heads of decoded rows to attention over the paged cache, in one launch: norm of
// the query and key heads where the model has one, rotary embedding, the queries' scale, the new
// token's key and value into the cache, and split-KV attention as paged_decode.cu.
//
// Every block rotates the queries that it needs itself. The block whose share holds a sequence's
// newest token also rotates its key, attends it from shared memory, and writes it to the cache, which
// for that token nobody else reads.
//
// Before the kernel ahead ends a block asks for the first keys and values of all its warps. So
// whatever this reads but `heads` must have been complete before the kernel ahead was launched: tables,
// lengths, angles, and the cache up to the newest token.
//
// A sequence's tiles are shared out evenly among `splits` blocks, at least `least` each, by its own
// length: a graph captured for long contexts serves short ones as well as long.
//
// grid (kv_heads * head_tiles, splits, sequences), block WARPS * 32. With -DCLUSTER=1 up to eight
// splits may be launched as a cluster. -DHEAD_NORM=0|1, and those of paged_decode.cu.
#include "head.cuh"
#include "paged_stream.cuh"

constexpr int NEW_HEADS = HEADS + 2;  // of a block: its queries, the key, the value
constexpr int AHEAD = 3;  // tiles of a warp that are on their way early, the first in registers
static_assert(NEW_HEADS * LANES <= WARPS * 32, "eight lanes for each new head");

struct Staged {  // in shared memory, between the threads that rotate and the warps that attend
    Queries queries;
    __align__(16) char token[2][HEAD_DIM * VALUE_BYTES];  // the new key and value
    unsigned scales;
};

struct Norms {
    const float *query, *key;
    float eps;
};

__device__ __forceinline__ void put_query(const Head& head, Queries& queries, int unit, int lane) {
    float inverse = 1.f;
    if constexpr (KV_BITS == 8) {
        const float largest = largest_of_lanes(head.largest());
        inverse = Queries::inverse_of(largest);
        if (lane == 0) queries.units[unit] = largest / Queries::LARGEST;
    }
    queries.put(unit, lane * MINE, head.first, inverse);
    queries.put(unit, HALF + lane * MINE, head.second, inverse);
}

// Head `unit` of the block, lane by lane: a query (below HEADS), the key or the value.
__device__ __forceinline__ void take_head(const element* from, int unit, const Angles& angles,
                                          const Norms& norms, float query_scale, Staged& staged) {
    const int lane = threadIdx.x % LANES, which = unit - HEADS;
    Head head;
    head.load(from, lane);
    if (which < 1) {
#if HEAD_NORM
        head.normalise(which < 0 ? norms.query : norms.key, norms.eps, lane);
#endif
        head.rotate(angles, which < 0 ? query_scale : 1.f);
    }
    if (which < 0) {
        put_query(head, staged.queries, unit, lane);
        return;
    }
#if KV_BITS == 16
    head.store(reinterpret_cast<element*>(staged.token[which]), lane);
#else
    head.store_codes(reinterpret_cast<signed char*>(staged.token[which]),
                     reinterpret_cast<__half*>(&staged.scales) + which, lane);
#endif
}

// The new token into its slot, by the whole block.
__device__ __forceinline__ void keep_token(const Staged& staged, const Cache& cache, char* keys,
                                           unsigned* scales, int token) {
    constexpr int CHUNKS = HEAD_DIM * VALUE_BYTES / 16;
    if (threadIdx.x >= 2 * CHUNKS) return;
    const size_t slot = cache.slot(cache.block_of(token / TILE), token / TILE) + token % TILE;
    const int which = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS * 16;
    char* to = keys + slot * cache.token_bytes + which * (cache.token_bytes / 2) + chunk;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(staged.token[which] + chunk);
    if (KV_BITS == 8 && threadIdx.x == 0) scales[slot * cache.kv_heads] = staged.scales;
}

// heads [rows, kv_heads * (group + 2), HEAD_DIM]: queries, keys, values; cos, sin f32[rows,
// HEAD_DIM], the first half of sin negated; q_norm, k_norm f32[HEAD_DIM] (HEAD_NORM); the newest token
// of sequence i, at lengths[i] - 1, is that of its row. The others as in paged_decode.cu.
extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
decode_heads(const element* heads, const float* cos, const float* sin, const float* q_norm,
             const float* k_norm, char* kv, unsigned* scales, const int* tables,
             const int* lengths, const int* rows, element* out, Part* partial, int kv_heads,
             int group, int table_width, int least, int window, float query_scale, float eps) {
    extern __shared__ __align__(16) float sums[];  // [WARPS][SUMS]
    __shared__ Staged staged;
    allow_next();
#if MEETS_IN_CLUSTER
    if (is_in_cluster()) arrive_in_cluster();
#endif
    const int sequence = blockIdx.z, warp = threadIdx.x / 32;
    const int kv_head = blockIdx.x % kv_heads, head_tile = blockIdx.x / kv_heads;
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
    const int length = __ldcg(lengths + sequence);
    const int low = window > 0 ? max(0, length - window) : 0;
    const int begin = low / TILE, end = (length + TILE - 1) / TILE;
    const int each = max(least, (end - begin + int(gridDim.y) - 1) / int(gridDim.y));
    const int first = begin + int(blockIdx.y) * each, last = min(end, first + each);
    if (first >= last && blockIdx.y > 0) return;

    const int* table = tables + size_t(sequence) * table_width;
    const unsigned token_bytes = 2 * kv_heads * HEAD_DIM * VALUE_BYTES;
    char* mine = kv + size_t(kv_head) * HEAD_DIM * VALUE_BYTES;
    const Cache cache = {mine, scales + kv_head, table, token_bytes, kv_heads};
    const int tile = first + warp;
    const int blocks = tile + lane * WARPS < last ? cache.block_of(tile + lane * WARPS) : 0;
    Held held;
    held.begin(cache, row, pair);
    if (tile < last) {
        const unsigned slot = cache.slot(__shfl_sync(~0u, blocks, 0), tile);
        held.ask_keys(cache, slot);
        held.ask_values(cache, slot);
    }
    if (blockIdx.x == 0 && lane > 0 && lane < AHEAD && tile + lane * WARPS < last) {  // all KV heads
        const size_t slot = cache.slot(blocks, tile + lane * WARPS);
        prefetch(kv + slot * token_bytes, int(TILE * token_bytes));
    }
    const int unit = threadIdx.x / LANES;
    const bool is_newest = length > 0 && last == end;
    const int queries = min(HEADS, group - head_tile * HEADS);
    const bool takes = unit < HEADS ? unit < queries : unit < NEW_HEADS && is_newest;
    const int at_row = rows == nullptr ? sequence : __ldcg(rows + sequence);
    const int first_head = kv_head * group + head_tile * HEADS;
    staged.queries.clear(WARPS * 32);  // heads that are not there stay zero
    __syncthreads();
    wait_for_previous();

    if (takes) {
        Angles angles;
        const size_t angle = size_t(at_row) * HEAD_DIM;
        angles.load(cos + angle, sin + angle, threadIdx.x % LANES);
        const int of = unit < HEADS ? first_head + unit
                                    : kv_heads * (group + unit - HEADS) + kv_head;
        take_head(heads + (size_t(at_row) * kv_heads * (group + 2) + of) * HEAD_DIM, unit, angles,
                  {q_norm, k_norm, eps}, query_scale, staged);
    }
    __syncthreads();
    if (is_newest && head_tile == 0) keep_token(staged, cache, mine, scales + kv_head, length - 1);
    Online state;
    const Fresh fresh = {staged.token[0], staged.token[1], &staged.scales,
                         is_newest ? end - 1 : -1, (length - 1) % TILE};
    attend<true>(cache, staged.queries, tile, last, low, length, blocks, fresh, held, state);
    const int parts = max(1, (end - begin + each - 1) / each);
    finish(state, min(WARPS, last - first), sums, partial, parts, queries,
           out + (size_t(at_row) * kv_heads * group + first_head) * HEAD_DIM);
}
