// Keys and values of given slots out of a paged cache, one behind the other, codes made values. The
// cache's size is not known here, so that a captured graph outlives its growth: slots are trusted.
//
// grid (ceil(count * vectors / blockDim.x)), any block: a thread takes 16 bytes of the cache.
// -DKV_BITS=16|8, -DBF16: what codes become.
#include "element.cuh"

#if KV_BITS == 8
// 16 codes to as many values: each product is exact in fp32 and rounded once.
__device__ __forceinline__ Words<32> to_values(const uint4& codes, float scale) {
    const signed char* code = reinterpret_cast<const signed char*>(&codes);
    Words<32> got;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        got.word[i] = element_pair(code[2 * i] * scale, code[2 * i + 1] * scale);
    }
    return got;
}
#endif

// cache [slots, 2, kv_heads, head_vectors], vectors of 16 bytes; scales f16[slots, kv_heads, 2] of
// codes; slots i32[count]; out [count, 2, kv_heads, head_dim] in half precision.
extern "C" __global__ void gather_slots(const uint4* cache, const __half* scales, const int* slots,
                                        char* out, int count, int kv_heads, int head_vectors) {
    const int vectors = 2 * kv_heads * head_vectors;
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = at / vectors, vector = at % vectors;
    if (row >= count) return;
    const size_t slot = slots[row];
    const uint4 got = cache[slot * vectors + vector];
#if KV_BITS == 16
    *reinterpret_cast<uint4*>(out + size_t(at) * 16) = got;
#else
    const int head = vector / head_vectors;  // keys before values
    const __half scale = scales[(slot * kv_heads + head % kv_heads) * 2 + head / kv_heads];
    store_words(out + size_t(at) * 32, to_values(got, __half2float(scale)));
#endif
}
