// What lies between the QKV projection and attention, in one pass over its rows: norm of the query
// and key heads where the model has one, rotary embedding, the queries' scale, and the new tokens'
// keys and values into the paged cache, as they are or as signed codes with an fp16 scale per token
// and head.
//
// grid (rows, ceil(heads / HEADS_PER_BLOCK)), block HEADS_PER_BLOCK * 8: eight lanes a head, each
// with HEAD_DIM / 16 values of either half, so that both values of a rotated pair are in one lane.
//
// -DHEAD_DIM=64|96|128, -DKV_BITS=16|8, -DBF16, -DHEAD_NORM=0|1.
#include "head.cuh"

constexpr int HEADS_PER_BLOCK = 8;

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
        Angles angles;
        angles.load(cos + size_t(row) * HEAD_DIM, sin + size_t(row) * HEAD_DIM, lane);
        head.rotate(angles, is_query ? query_scale : 1.f);
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
