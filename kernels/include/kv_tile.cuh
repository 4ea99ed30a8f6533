// Sixteen tokens of one KV head, loaded straight into the fragments of two products:
//   scores^T [tokens, heads] = K [tokens, dims] q^T,   out^T [dims, heads] = V^T [dims, tokens] p^T.
// A contraction may run over its index in any order, so each lane takes the dims that lie beside
// each other in memory, and nothing passes through shared memory. (A queue of cp.async copies in
// shared memory was slower: 2.4 TB/s of the H200's 4.5 however deep, against 3.9.)
//
// -DHEAD_DIM=64|96|128, -DKV_BITS=16|8 (8: signed codes with an fp16 scale per token and head).
#pragma once
#include "tensor_core.cuh"

constexpr int TILE = 16;                             // tokens
constexpr int HEADS = 8;                             // query heads: the n side of the product
constexpr int STEPS = HEAD_DIM / 16;                 // k steps of a score, m tiles of an output
constexpr int VALUE_BYTES = KV_BITS / 8;
constexpr int KEY_BYTES = HEAD_DIM / 4 * VALUE_BYTES;    // of one token, in one lane
constexpr int KEY_LOAD = load_width<KEY_BYTES>;
constexpr int DIMS = HEAD_DIM / 8;                   // values of one token in one lane
constexpr int LANE_BYTES = DIMS * VALUE_BYTES;
constexpr int VALUE_LOAD = load_width<LANE_BYTES>;

static_assert(HEAD_DIM % 32 == 0, "a lane's share of a row must be whole words");

// The dim of a lane's e-th key value, and of its e-th value value.
__device__ __forceinline__ int key_dim(int pair, int e) {
    constexpr int per = KEY_LOAD / VALUE_BYTES;
    return (e / per * 4 + pair) * per + e % per;
}

__device__ __forceinline__ int value_dim(int row, int e) {
    constexpr int per = VALUE_LOAD / VALUE_BYTES;
    return (e / per * 8 + row) * per + e % per;
}

struct KeyTile {
    unsigned word[2][KEY_BYTES / 4];  // tokens row and row + 8

    // first: the tile's first token's key row; stride: bytes from token to token.
    __device__ __forceinline__ void load(const char* first, size_t stride, int row, int pair) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const char* token = first + (row + 8 * half) * stride + pair * KEY_LOAD;
#pragma unroll
            for (int i = 0; i < KEY_BYTES / KEY_LOAD; ++i) {
                load_once<KEY_LOAD>(token + i * 4 * KEY_LOAD, &word[half][i * KEY_LOAD / 4]);
            }
        }
    }

    // Token `at` of the tile is the key at `from`.
    __device__ __forceinline__ void put(const char* from, int at, int row, int pair) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (row + 8 * half != at) continue;
#pragma unroll
            for (int i = 0; i < KEY_BYTES / KEY_LOAD; ++i) {
                const Words<KEY_LOAD> got =
                    load_words<KEY_LOAD>(from + pair * KEY_LOAD + i * 4 * KEY_LOAD);
#pragma unroll
                for (int w = 0; w < KEY_LOAD / 4; ++w) word[half][i * KEY_LOAD / 4 + w] = got.word[w];
            }
        }
    }

    // A of k step `step`.
    __device__ __forceinline__ void fragment(int step, unsigned (&a)[4]) const {
        if constexpr (KV_BITS == 16) {
            a[0] = word[0][2 * step], a[1] = word[1][2 * step];
            a[2] = word[0][2 * step + 1], a[3] = word[1][2 * step + 1];
        } else {
            codes_to_halves(word[0][step], a[0], a[2]);
            codes_to_halves(word[1][step], a[1], a[3]);
        }
    }
};

struct ValueTile {
    unsigned word[4][LANE_BYTES / 4];  // tokens 2 * pair, + 1, + 8, + 9

    static __device__ __forceinline__ int token(int pair, int i) {
        return 2 * pair + (i & 1) + 8 * (i >> 1);
    }

    __device__ __forceinline__ void load(const char* first, size_t stride, int row, int pair) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const char* at = first + token(pair, i) * stride + row * VALUE_LOAD;
#pragma unroll
            for (int v = 0; v < LANE_BYTES / VALUE_LOAD; ++v) {
                load_once<VALUE_LOAD>(at + v * 8 * VALUE_LOAD, &word[i][v * VALUE_LOAD / 4]);
            }
        }
    }

    // Token `at` of the tile is the value at `from`.
    __device__ __forceinline__ void put(const char* from, int at, int row, int pair) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (token(pair, i) != at) continue;
#pragma unroll
            for (int v = 0; v < LANE_BYTES / VALUE_LOAD; ++v) {
                const Words<VALUE_LOAD> got =
                    load_words<VALUE_LOAD>(from + (v * 8 + row) * VALUE_LOAD);
#pragma unroll
                for (int w = 0; w < VALUE_LOAD / 4; ++w) word[i][v * VALUE_LOAD / 4 + w] = got.word[w];
            }
        }
    }

    // Slots outside low..high - 1 (within the tile) hold anything, NaN too, and NaN times the
    // probability 0 is NaN.
    __device__ __forceinline__ void clear_outside(int pair, int low, int high) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = token(pair, i);
            if (at < low || at >= high) {
#pragma unroll
                for (int w = 0; w < LANE_BYTES / 4; ++w) word[i][w] = 0;
            }
        }
    }

    // Values e of tokens `first` and `first + 1` in one register.
    __device__ __forceinline__ unsigned beside(int first, int e) const {
        if constexpr (KV_BITS == 16) {
            return __byte_perm(word[first][e / 2], word[first + 1][e / 2], e % 2 ? 0x7632 : 0x5410);
        } else {
            const unsigned mixed = __byte_perm(word[first][e / 4], word[first + 1][e / 4],
                                               0x0040 + 0x0011 * (e % 4)) ^ 0x8080;
            return unbias(__byte_perm(mixed, 0x64646464, 0x4140));
        }
    }

    // A of m tile `tile`: rows are this lane's values tile and tile + DIMS / 2.
    __device__ __forceinline__ void fragment(int tile, unsigned (&a)[4]) const {
        a[0] = beside(0, tile), a[1] = beside(0, tile + DIMS / 2);
        a[2] = beside(2, tile), a[3] = beside(2, tile + DIMS / 2);
    }
};

__device__ __forceinline__ void mma_cached(float (&c)[4], const unsigned (&a)[4],
                                           const unsigned (&b)[2]) {
    if constexpr (KV_BITS == 16) {
        mma_element(c, a, b);
    } else {
        mma_half(c, a, b);  // codes are exact halves, whatever the activations' type
    }
}

__device__ __forceinline__ unsigned operand_pair(float low, float high) {
    return KV_BITS == 16 ? element_pair(low, high) : half_pair(low, high);
}

// B of k step `step`: one query head's values at the dims that KeyTile loads.
__device__ __forceinline__ void query_fragment(const element* head, int pair, int step,
                                               unsigned (&b)[2]) {
    const Words<8> got = load_words<8>(head + key_dim(pair, 4 * step));
    if constexpr (KV_BITS == 16 || !BF16) {
        b[0] = got.word[0], b[1] = got.word[1];
    } else {
        const float2 low = pair_to_float2(got.word[0]), high = pair_to_float2(got.word[1]);
        b[0] = half_pair(low.x, low.y), b[1] = half_pair(high.x, high.y);
    }
}
