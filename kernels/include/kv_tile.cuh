// Sixteen tokens of one KV head, loaded straight into the fragments of two products:
//   scores [heads, tokens] = q K^T [dims, tokens],   out^T [dims, heads] = V^T [dims, tokens] p^T.
// What the first gives, a lane's head and its four tokens, is the second's operand as it lies.
// A contraction may run over its index in any order, so each lane takes the dims that lie beside
// each other in memory, and nothing passes through shared memory. (A queue of cp.async copies in
// shared memory was slower: 2.4 TB/s of the H200's 4.5 however deep, against 3.9.)
//
// -DHEAD_DIM=64|96|128, -DKV_BITS=16|8 (8: signed codes with an fp16 scale per token and head).
#pragma once
#include "tensor_core.cuh"

constexpr int TILE = 16;                             // tokens
constexpr int HEADS = 8;                             // query heads: half of one product's m side,
                                                     // the n side of the other
constexpr int STEPS = HEAD_DIM / 16;                 // m tiles of an output
constexpr int KEY_STEPS = HEAD_DIM * KV_BITS / 256;  // k steps of a score
constexpr int VALUE_BYTES = KV_BITS / 8;
constexpr int KEY_BYTES = HEAD_DIM / 4 * VALUE_BYTES;    // of one token, in one lane
constexpr int KEY_LOAD = load_width<KEY_BYTES>;
constexpr int DIMS = HEAD_DIM / 8;                   // values of one token in one lane
constexpr int LANE_BYTES = DIMS * VALUE_BYTES;
constexpr int VALUE_LOAD = load_width<LANE_BYTES>;
constexpr int PER_WORD = 4 / VALUE_BYTES;                // values

static_assert(HEAD_DIM % 32 == 0, "a lane's share of a row must be whole words");

// The dim of a lane's e-th value.
__device__ __forceinline__ int value_dim(int row, int e) {
    constexpr int per = VALUE_LOAD / VALUE_BYTES;
    return (e / per * 8 + row) * per + e % per;
}

struct KeyTile {
    unsigned word[2][KEY_BYTES / 4];  // tokens row and row + 8

    // Where a lane's share of the first token of row `row` lies behind a tile's first key.
    static __device__ __forceinline__ unsigned begin(unsigned stride, int row, int pair) {
        return row * stride + pair * KEY_LOAD;
    }

    // from: the tile's first key and begin(); stride: bytes from token to token.
    __device__ __forceinline__ void load(const char* from, unsigned stride) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const char* token = from + 8 * half * stride;
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

    // B of k step `step`, of eight tokens: halves for m16n8k16, codes as they lie for m16n8k32.
    __device__ __forceinline__ void fragment(int half, int step, unsigned (&b)[2]) const {
        b[0] = word[half][2 * step], b[1] = word[half][2 * step + 1];
    }
};

struct ValueTile {
    unsigned word[4][LANE_BYTES / 4];  // tokens 2 * pair, + 1, + 8, + 9

    static __device__ __forceinline__ int token(int pair, int i) {
        return 2 * pair + (i & 1) + 8 * (i >> 1);
    }

    static __device__ __forceinline__ unsigned begin(unsigned stride, int row, int pair) {
        return 2 * pair * stride + row * VALUE_LOAD;
    }

    __device__ __forceinline__ void load(const char* from, unsigned stride) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const char* at = from + token(0, i) * stride;
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

    // A slot that does not count holds anything, NaN too, and NaN times the probability 0 is NaN.
    __device__ __forceinline__ void clear(int i) {
#pragma unroll
        for (int w = 0; w < LANE_BYTES / 4; ++w) word[i][w] = 0;
    }

    // The values in word w of tokens `first` and `first + 1`, both tokens' in one register each.
    __device__ __forceinline__ void beside(int first, int w, unsigned (&out)[PER_WORD]) const {
        if constexpr (KV_BITS == 16) {
            out[0] = __byte_perm(word[first][w], word[first + 1][w], 0x5410);
            out[1] = __byte_perm(word[first][w], word[first + 1][w], 0x7632);
        } else {
            const unsigned a = word[first][w] ^ 0x80808080, b = word[first + 1][w] ^ 0x80808080;
            const unsigned low = __byte_perm(a, b, 0x5140), high = __byte_perm(a, b, 0x7362);
            out[0] = unbias(__byte_perm(low, 0x64646464, 0x4140));
            out[1] = unbias(__byte_perm(low, 0x64646464, 0x4342));
            out[2] = unbias(__byte_perm(high, 0x64646464, 0x4140));
            out[3] = unbias(__byte_perm(high, 0x64646464, 0x4342));
        }
    }

    // A of the m tiles of word w: rows of tile i are this lane's values 2 * i and 2 * i + 1.
    __device__ __forceinline__ void fragments(int w, unsigned (&a)[PER_WORD / 2][4]) const {
        unsigned early[PER_WORD], late[PER_WORD];
        beside(0, w, early);
        beside(2, w, late);
#pragma unroll
        for (int i = 0; i < PER_WORD / 2; ++i) {
            a[i][0] = early[2 * i], a[i][1] = early[2 * i + 1];
            a[i][2] = late[2 * i], a[i][3] = late[2 * i + 1];
        }
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

// c += a b, signed bytes: m16n8k32.
__device__ __forceinline__ void mma_codes(int (&c)[4], const unsigned (&a)[4],
                                          const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ unsigned operand_pair(float low, float high) {
    return KV_BITS == 16 ? element_pair(low, high) : half_pair(low, high);
}

// Eight query heads in shared memory as the first product takes them: A of each k step, lane by lane.
// 16 bits: rows 8 to 15 are zero. INT8: in codes of 16 bits, value = code * unit and code = 256 * high
// + low, both signed bytes, the high ones in rows 0 to 7 and the low ones in rows 8 to 15. So the
// cache's codes are multiplied as they lie, and exactly.
struct Queries {
    uint4 parts[KEY_STEPS][32];
    float units[HEADS];

    static constexpr float LARGEST = 32639.f;  // 127 * 256 + 127

    // Where the pair of dims that begins at `dim` lies, in bytes from the beginning.
    static __device__ __forceinline__ int at(int head, int dim) {
        constexpr int per = KEY_LOAD / VALUE_BYTES;
        const int pair = dim / per % 4, e = dim / (4 * per) * per + dim % per;
        const int word = e / PER_WORD % 2 * 2, step = e / (2 * PER_WORD);
        return (step * 32 + 4 * head + pair) * 16 + word * 4 + e % PER_WORD * VALUE_BYTES;
    }

    // COUNT (even) consecutive dims of a head. inverse: INT8, 1 / unit. 16 bits: what lies between is
    // clear()'s.
    template <int COUNT>
    __device__ __forceinline__ void put(int head, int dim, const float (&values)[COUNT],
                                        float inverse) {
        char* bytes = reinterpret_cast<char*>(parts);
        if constexpr (KV_BITS == 16) {
#pragma unroll
            for (int i = 0; i < COUNT; i += 2) {
                char* to = bytes + at(head, dim + i);
                *reinterpret_cast<unsigned*>(to) = element_pair(values[i], values[i + 1]);
            }
        } else {
            constexpr int step = COUNT % 4 == 0 ? 4 : 2;  // a word's codes at once, or half of them
#pragma unroll
            for (int i = 0; i < COUNT; i += step) {
                unsigned low[step / 2], high[step / 2];
#pragma unroll
                for (int j = 0; j < step / 2; ++j) {
                    const unsigned a = code(values[i + 2 * j], inverse);
                    const unsigned b = code(values[i + 2 * j + 1], inverse);
                    low[j] = __byte_perm(a, b, 0x40), high[j] = __byte_perm(a + 128, b + 128, 0x51);
                }
                char* to = bytes + at(head, dim + i);
                if constexpr (step == 4) {
                    *reinterpret_cast<unsigned*>(to) = __byte_perm(high[0], high[1], 0x5410);
                    *reinterpret_cast<unsigned*>(to + 4) = __byte_perm(low[0], low[1], 0x5410);
                } else {
                    *reinterpret_cast<unsigned short*>(to) = high[0];
                    *reinterpret_cast<unsigned short*>(to + 4) = low[0];
                }
            }
        }
    }

    // All heads, by the whole block, before any is put.
    __device__ __forceinline__ void clear(int threads) {
        for (int i = threadIdx.x; i < KEY_STEPS * 32; i += threads) {
            (&parts[0][0])[i] = make_uint4(0, 0, 0, 0);
        }
        if (threadIdx.x < HEADS) units[threadIdx.x] = 0.f;
    }

    // Its lower 16 bits are the code: 1.5 * 2^23 leaves no room behind the point.
    static __device__ __forceinline__ unsigned code(float value, float inverse) {
        return __float_as_uint(__fmaf_rn(value, inverse, 12582912.f));
    }

    static __device__ __forceinline__ float inverse_of(float largest) {
        return largest > 0.f ? __fdividef(LARGEST, largest) : 0.f;
    }

    // Read anew for each tile: the 32 registers that could hold them are better used otherwise.
    __device__ __forceinline__ void fragment(int step, unsigned (&a)[4]) const {
        const size_t at = __cvta_generic_to_shared(&parts[step][threadIdx.x % 32]);
        asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(unsigned(at)));
    }
};

// The scores of one head and a tile's four tokens of this lane (ValueTile::token).
__device__ __forceinline__ void multiply_keys(const Queries& queries, const KeyTile& keys,
                                              float (&scores)[4]) {
#if KV_BITS == 16
    float sums[2][4] = {};
#else
    int sums[2][4] = {};
#endif
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) {
        unsigned a[4], b[2];
        queries.fragment(step, a);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            keys.fragment(half, step, b);
#if KV_BITS == 16
            mma_element(sums[half], a, b);
#else
            mma_codes(sums[half], a, b);
#endif
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const auto& of = sums[i / 2];
#if KV_BITS == 16
        scores[i] = of[i % 2];
#else
        scores[i] = float(256 * of[i % 2] + of[i % 2 + 2]);
#endif
    }
}
