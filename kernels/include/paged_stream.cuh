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
    unsigned token_bytes;
    int kv_heads;

    __device__ __forceinline__ unsigned slot(int block, int tile) const {
        return block * BLOCK_TOKENS + tile % TILES_PER_BLOCK * TILE;
    }
    __device__ __forceinline__ int block_of(int tile) const {
        return __ldcg(table + tile / TILES_PER_BLOCK);
    }
    __device__ __forceinline__ const char* at(unsigned slot) const {
        return keys + size_t(slot) * token_bytes;
    }
    // Bring a warp's first tile nearer, all KV heads of it, while an earlier kernel still runs. Length
    // and table may be those of an earlier step then; what is right is read again (past L1) later.
    __device__ __forceinline__ void expect(int tile, int length, int kv_head) const {
        if (tile * TILE >= length || kv_head > 0 || threadIdx.x % 32 > 0) return;
        prefetch(at(slot(block_of(tile), tile)), int(TILE * token_bytes));
    }
};

struct Scales {  // of a lane's four tokens (ValueTile::token): a key's and its value's in one word
    unsigned both[4];

    __device__ __forceinline__ void load(const unsigned* from, int kv_heads) {
        if constexpr (KV_BITS == 8) {
#pragma unroll
            for (int i = 0; i < 4; ++i) load_once<4>(from + ValueTile::token(0, i) * kv_heads, &both[i]);
        }
    }
    __device__ __forceinline__ void put(unsigned fresh, int at, int pair) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (KV_BITS == 8 && ValueTile::token(pair, i) == at) both[i] = fresh;
        }
    }
    // What turns a raw score into a power of two's exponent, and what a probability carries along.
    // unit: of the query's codes.
    __device__ __forceinline__ void factors(float unit, float (&raise)[4], float (&lift)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            raise[i] = unit, lift[i] = SCALE_LIFT;
            if constexpr (KV_BITS == 8) {
                const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&both[i]));
                raise[i] *= scale.x, lift[i] *= scale.y;
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

// What a warp has asked for of one tile, and where this lane's shares of a cache begin.
struct Held {
    KeyTile keys;
    ValueTile values;
    Scales scales;
    const char *first_key, *first_value;
    const unsigned* first_scale;

    __device__ __forceinline__ void begin(const Cache& cache, int row, int pair) {
        const unsigned bytes = cache.token_bytes;
        first_key = cache.keys + KeyTile::begin(bytes, row, pair);
        first_value = cache.keys + bytes / 2 + ValueTile::begin(bytes, row, pair);
        first_scale = cache.scales + 2 * pair * cache.kv_heads;
    }
    __device__ __forceinline__ void ask_keys(const Cache& cache, unsigned slot) {
        keys.load(first_key + size_t(slot) * cache.token_bytes, cache.token_bytes);
        scales.load(first_scale + size_t(slot) * unsigned(cache.kv_heads), cache.kv_heads);
    }
    __device__ __forceinline__ void ask_values(const Cache& cache, unsigned slot) {
        values.load(first_value + size_t(slot) * cache.token_bytes, cache.token_bytes);
    }
};

// Attend tiles first, first + WARPS, ... below `last`, of which tokens low..high - 1 count. blocks:
// of this lane's tile, first + lane * WARPS. held: tile `first`, asked for.
template <bool HAS_FRESH>
__device__ __forceinline__ void attend(const Cache& cache, const Queries& queries, int first,
                                       int last, int low, int high, int blocks, const Fresh& fresh,
                                       Held& held, Online& state) {
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
    const float query_unit = KV_BITS == 8 ? queries.units[row] * LOG2E : LOG2E;
    int round = 0;
    unsigned slot = 0;
    for (int tile = first; tile < last; tile += WARPS) {
        const int next = tile + WARPS, start = tile * TILE;
        if (HAS_FRESH && tile == fresh.tile) {
            held.keys.put(fresh.key, fresh.at, row, pair);
            if (KV_BITS == 8) held.scales.put(*fresh.scales, fresh.at, pair);
        }
        float scores[4], raise[4], lift[4];
        multiply_keys(queries, held.keys, scores);
        held.scales.factors(query_unit, raise, lift);
        if (next < last) {
            if (++round % 32 == 0) {
                const int mine = next + lane * WARPS;
                blocks = mine < last ? cache.block_of(mine) : 0;
            }
            slot = cache.slot(__shfl_sync(~0u, blocks, round % 32), next);
            held.ask_keys(cache, slot);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[i] *= raise[i];
        if (HAS_FRESH && tile == fresh.tile) held.values.put(fresh.value, fresh.at, row, pair);
        if (start < low || start + TILE > high) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = start + ValueTile::token(pair, i);
                if (token >= low && token < high) continue;
                scores[i] = LOWEST, lift[i] = 0.f;
                held.values.clear(i);
            }
        }
        unsigned b[2];
        soften(scores, lift, state, pair, b);
#pragma unroll
        for (int w = 0; w < LANE_BYTES / 4; ++w) {
            unsigned a[PER_WORD / 2][4];
            held.values.fragments(w, a);
#pragma unroll
            for (int i = 0; i < PER_WORD / 2; ++i) {
                mma_cached(state.out[w * PER_WORD / 2 + i], a[i], b);
            }
        }
        if (next < last) held.ask_values(cache, slot);
    }
}
