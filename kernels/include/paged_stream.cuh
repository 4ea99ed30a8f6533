// One sequence's keys and values as a warp streams them, tile by tile: the next tile's keys are asked
// for as soon as this one's are multiplied, and its values likewise, so that one of both is always on
// its way.
//
// -DBLOCK_TOKENS (a multiple of 16), and those of split_softmax.cuh.
#pragma once
#include "split_softmax.cuh"

static_assert(BLOCK_TOKENS % TILE == 0, "a tile must not cross a block");
constexpr int TILES_PER_BLOCK = BLOCK_TOKENS / TILE;

struct Cache {  // one sequence's view of one layer, for one KV head
    const char* keys;
    const unsigned* scales;
    const int* table;
    size_t token_bytes;
    int kv_heads;

    __device__ __forceinline__ size_t slot(int block, int tile) const {
        return size_t(block) * BLOCK_TOKENS + tile % TILES_PER_BLOCK * TILE;
    }
    __device__ __forceinline__ int block_of(int tile) const {
        return __ldcg(table + tile / TILES_PER_BLOCK);
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
    __device__ __forceinline__ void put(unsigned fresh, int at, int row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (KV_BITS == 8 && row + 8 * half == at) both[half] = fresh;
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

// A token that is not in the cache yet, or not for all to see: its key, value and scales (INT8) as the
// cache holds them, in shared memory. tile: its, -1: there is none; at: which of the tile's tokens.
struct Fresh {
    const char *key, *value;
    const unsigned* scales;
    int tile, at;
};

// What a warp has asked for of one tile.
struct Held {
    KeyTile keys;
    ValueTile values;
    Scales scales;

    __device__ __forceinline__ void ask_keys(const Cache& cache, size_t slot, int row, int pair) {
        keys.load(cache.keys + slot * cache.token_bytes, cache.token_bytes, row, pair);
        scales.load(cache, slot, row);
    }
    __device__ __forceinline__ void ask_values(const Cache& cache, size_t slot, int row, int pair) {
        values.load(cache.keys + slot * cache.token_bytes + cache.token_bytes / 2,
                    cache.token_bytes, row, pair);
    }
};

// Attend tiles first, first + WARPS, ... below `last`, of which tokens low..high - 1 count. blocks:
// of this lane's tile, first + lane * WARPS. held: tile `first`, asked for. query(step, b): the
// fragment of a k step.
template <bool HAS_FRESH, typename Query>
__device__ __forceinline__ void attend(const Cache& cache, const Query& query, int first, int last,
                                       int low, int high, int blocks, const Fresh& fresh,
                                       Held& held, Online& state) {
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
    int round = 0;
    size_t slot = 0;
    for (int tile = first; tile < last; tile += WARPS) {
        const int next = tile + WARPS, start = tile * TILE;
        float scores[4] = {}, unit[2], lift[2];
        if (HAS_FRESH && tile == fresh.tile) {
            held.keys.put(fresh.key, fresh.at, row, pair);
            if (KV_BITS == 8) held.scales.put(*fresh.scales, fresh.at, row);
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            unsigned a[4], b[2];
            held.keys.fragment(step, a);
            query(step, b);
            mma_cached(scores, a, b);
        }
        held.scales.factors(unit, lift);
        if (next < last) {
            if (++round % 32 == 0) {
                const int mine = next + lane * WARPS;
                blocks = mine < last ? cache.block_of(mine) : 0;
            }
            slot = cache.slot(__shfl_sync(~0u, blocks, round % 32), next);
            held.ask_keys(cache, slot, row, pair);
        }
        const bool whole = start >= low && start + TILE <= high;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = start + row + 8 * (i / 2);
            scores[i] = whole || (token >= low && token < high) ? scores[i] * unit[i / 2] : LOWEST;
        }
        if (HAS_FRESH && tile == fresh.tile) held.values.put(fresh.value, fresh.at, row, pair);
        if (!whole) {
            held.values.clear_outside(pair, low - start, high - start);
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
            held.values.fragment(i, a);
            mma_cached(state.out[i], a, b);
        }
        if (next < last) held.ask_values(cache, slot, row, pair);
    }
}
