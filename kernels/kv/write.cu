// What lies between the QKV projection and attention, in one pass over its rows: norm of the query
// and key heads where the model has one, rotary embedding, the queries' scale, and the new tokens'
// keys and values into the paged cache, as they are or as signed codes with an fp16 scale per token
// and head.
//
// grid (rows, ceil(heads / HEADS_PER_BLOCK)), block HEADS_PER_BLOCK * 8: eight lanes a head, each
// with HEAD_DIM / 16 values of either half, so that both values of a rotated pair are in one lane.
//
// -DHEAD_DIM=64|96|128, -DKV_BITS=16|8, -DBF16, -DHEAD_NORM=0|1.
#include "element.cuh"

constexpr int LANES = 8;
constexpr int HALF = HEAD_DIM / 2;
constexpr int MINE = HALF / LANES;  // values of either half
constexpr int HEADS_PER_BLOCK = 8;
constexpr float LARGEST_CODE = 127.f;

// Reductions over one head's lanes only: the heads of a warp take different ways.
__device__ __forceinline__ unsigned lanes_of_head() { return 0xffu << (threadIdx.x & 24); }

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) x += __shfl_xor_sync(lanes_of_head(), x, step);
    return x;
}

__device__ __forceinline__ float largest_of_lanes(float x) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        x = fmaxf(x, __shfl_xor_sync(lanes_of_head(), x, step));
    }
    return x;
}

struct Head {
    float first[MINE], second[MINE];  // dims lane * MINE + i, and those + HALF

    __device__ __forceinline__ void load(const element* from, int lane) {
        const Words<2 * MINE> low = load_words<2 * MINE>(from + lane * MINE);
        const Words<2 * MINE> high = load_words<2 * MINE>(from + HALF + lane * MINE);
#pragma unroll
        for (int i = 0; i < MINE / 2; ++i) {
            const float2 a = pair_to_float2(low.word[i]), b = pair_to_float2(high.word[i]);
            first[2 * i] = a.x, first[2 * i + 1] = a.y;
            second[2 * i] = b.x, second[2 * i + 1] = b.y;
        }
    }

    __device__ __forceinline__ void store(element* to, int lane) const {
        Words<2 * MINE> low, high;
#pragma unroll
        for (int i = 0; i < MINE / 2; ++i) {
            low.word[i] = element_pair(first[2 * i], first[2 * i + 1]);
            high.word[i] = element_pair(second[2 * i], second[2 * i + 1]);
        }
        store_words(to + lane * MINE, low);
        store_words(to + HALF + lane * MINE, high);
    }

    __device__ __forceinline__ void normalise(const float* weight, float eps, int lane) {
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < MINE; ++i) squares += first[i] * first[i] + second[i] * second[i];
        const float scale = rsqrtf(sum_of_lanes(squares) / HEAD_DIM + eps);
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            first[i] *= scale * weight[lane * MINE + i];
            second[i] *= scale * weight[HALF + lane * MINE + i];
        }
    }

    // cos, sin: of this position; angles of both halves are the same.
    __device__ __forceinline__ void rotate(const float* cos, const float* sin, float scale,
                                           int lane) {
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const float c = cos[lane * MINE + i], s = sin[HALF + lane * MINE + i];
            const float a = first[i], b = second[i];
            first[i] = (a * c - b * s) * scale;
            second[i] = (b * c + a * s) * scale;
        }
    }

    // code = round(value * (1 / scale)), scale = largest / 127 as the half that a reader will use.
    __device__ __forceinline__ void store_codes(signed char* codes, __half* scale, int lane) const {
        float largest = 0.f;
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            largest = fmaxf(largest, fmaxf(fabsf(first[i]), fabsf(second[i])));
        }
        const __half step = __float2half_rn(__fdiv_rn(largest_of_lanes(largest), LARGEST_CODE));
        const float wide = __half2float(step);
        const float inverse = wide > 0.f ? __frcp_rn(wide) : 0.f;
        if (lane == 0) *scale = step;
#pragma unroll
        for (int i = 0; i < MINE; i += 2) {
            store_pair(codes + lane * MINE + i, code(first[i], inverse), code(first[i + 1], inverse));
            store_pair(codes + HALF + lane * MINE + i, code(second[i], inverse),
                       code(second[i + 1], inverse));
        }
    }

    static __device__ __forceinline__ void store_pair(signed char* to, int low, int high) {
        *reinterpret_cast<unsigned short*>(to) = (low & 0xff) | (high & 0xff) << 8;
    }

    static __device__ __forceinline__ int code(float value, float inverse) {
        const float near = rintf(__fmul_rn(value, inverse));
        return int(fminf(fmaxf(near, -LARGEST_CODE), LARGEST_CODE));
    }
};

// heads [rows, queries + 2 * kv_heads, HEAD_DIM]; cos, sin f32[rows, HEAD_DIM], the first half of
// sin negated; slots i64[rows], negative: the row is padding and writes no KV; q_norm, k_norm
// f32[HEAD_DIM] (HEAD_NORM). q [rows, queries, HEAD_DIM]; cache [slots, 2, kv_heads, HEAD_DIM];
// scales [slots, kv_heads, 2] (INT8), a key's beside its value's.
extern "C" __global__ void __launch_bounds__(HEADS_PER_BLOCK * LANES)
rotate_and_write(const element* heads, const float* cos, const float* sin, const long long* slots,
                 const float* q_norm, const float* k_norm, element* q, void* cache, __half* scales,
                 int queries, int kv_heads, float query_scale, float eps) {
    allow_next();
    const int row = blockIdx.x, lane = threadIdx.x % LANES;
    const int index = blockIdx.y * HEADS_PER_BLOCK + threadIdx.x / LANES;
    const int count = queries + 2 * kv_heads;
    wait_for_previous();
    if (index >= count) return;
    const bool is_query = index < queries;
    Head head;
    head.load(heads + (size_t(row) * count + index) * HEAD_DIM, lane);
    if (index < queries + kv_heads) {
#if HEAD_NORM
        head.normalise(is_query ? q_norm : k_norm, eps, lane);
#endif
        head.rotate(cos + size_t(row) * HEAD_DIM, sin + size_t(row) * HEAD_DIM,
                    is_query ? query_scale : 1.f, lane);
    }
    if (is_query) {
        head.store(q + (size_t(row) * queries + index) * HEAD_DIM, lane);
        return;
    }
    const long long slot = slots[row];
    if (slot < 0) return;
    const size_t place = size_t(slot) * 2 * kv_heads + (index - queries);
#if KV_BITS == 16
    head.store(static_cast<element*>(cache) + place * HEAD_DIM, lane);
#else
    const int which = (index - queries) / kv_heads, of = (index - queries) % kv_heads;
    head.store_codes(static_cast<signed char*>(cache) + place * HEAD_DIM,
                     scales + (slot * kv_heads + of) * 2 + which, lane);
#endif
}
