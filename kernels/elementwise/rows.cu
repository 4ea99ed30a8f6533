// Row-wise ops between the linears: RMS norm, the same behind a residual add, gated SiLU.
// Arithmetic is fp32, each result is rounded once. -DBF16; norms also -DWIDTH (values a row, a
// multiple of 8), -DTHREADS (a multiple of 32).
#include "element.cuh"

constexpr int VECTOR = 8;  // values of one 16-byte access

__device__ __forceinline__ void widen(const Words<16>& words, float (&values)[VECTOR]) {
#pragma unroll
    for (int i = 0; i < VECTOR / 2; ++i) {
        const float2 two = pair_to_float2(words.word[i]);
        values[2 * i] = two.x, values[2 * i + 1] = two.y;
    }
}

__device__ __forceinline__ Words<16> narrow(const float (&values)[VECTOR]) {
    Words<16> words;
#pragma unroll
    for (int i = 0; i < VECTOR / 2; ++i) {
        words.word[i] = element_pair(values[2 * i], values[2 * i + 1]);
    }
    return words;
}

#ifdef WIDTH
constexpr int CHUNKS = (WIDTH / VECTOR + THREADS - 1) / THREADS;

__device__ __forceinline__ float sum_of_block(float x) {
    __shared__ float warps[THREADS / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) sum += warps[w];
    return sum;
}

// out = x / sqrt(mean(x^2) + eps) * weight; with `delta`, x += delta first. grid (rows).
__device__ __forceinline__ void norm_row(element* x, const element* delta, const float* weight,
                                         element* out, float eps) {
    allow_next();
    const size_t row = size_t(blockIdx.x) * WIDTH;
    Words<16> kept[CHUNKS];
    float squares = 0.f;
    wait_for_previous();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int at = (c * THREADS + threadIdx.x) * VECTOR;
        if (at >= WIDTH) continue;
        kept[c] = load_words<16>(x + row + at);
        float values[VECTOR];
        widen(kept[c], values);
        if (delta != nullptr) {
            float more[VECTOR];
            widen(load_words<16>(delta + row + at), more);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) values[i] += more[i];
            kept[c] = narrow(values);
            store_words(x + row + at, kept[c]);
            widen(kept[c], values);  // the norm sees the rounded residual, as later layers do
        }
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) squares += values[i] * values[i];
    }
    const float scale = rsqrtf(sum_of_block(squares) / WIDTH + eps);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int at = (c * THREADS + threadIdx.x) * VECTOR;
        if (at >= WIDTH) continue;
        float values[VECTOR];
        widen(kept[c], values);
        const float4 low = *reinterpret_cast<const float4*>(weight + at);
        const float4 high = *reinterpret_cast<const float4*>(weight + at + 4);
        const float by[VECTOR] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) values[i] *= scale * by[i];
        store_words(out + row + at, narrow(values));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const element* x, const float* weight, element* out, float eps) {
    norm_row(const_cast<element*>(x), nullptr, weight, out, eps);
}

extern "C" __global__ void __launch_bounds__(THREADS)
add_rms_norm(element* x, const element* delta, const float* weight, element* out, float eps) {
    norm_row(x, delta, weight, out, eps);
}
#else
// out = silu(gate) * up of rows [gate | up], each `width` values, a multiple of 8.
// grid (ceil(width / 8 / block), rows).
extern "C" __global__ void silu_mul(const element* gate_up, element* out, int width) {
    allow_next();
    const int at = (blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    wait_for_previous();
    if (at >= width) return;
    const element* gate = gate_up + size_t(blockIdx.y) * 2 * width + at;
    float g[VECTOR], u[VECTOR];
    widen(load_words<16>(gate), g);
    widen(load_words<16>(gate + width), u);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) g[i] = g[i] / (1.f + __expf(-g[i])) * u[i];
    store_words(out + size_t(blockIdx.y) * width + at, narrow(g));
}
#endif
