// Row-wise ops between the linears: RMS norm, the same behind a residual add, gated SiLU.
// Arithmetic is fp32, each result is rounded once. -DBF16; norms also -DWIDTH (values a row, a
// multiple of 8), -DTHREADS (a multiple of 32), -DWIDE (1: x, the residual stream, is fp32).
#include "carried_norm.cuh"
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

#if WIDE
using residual = float;

__device__ __forceinline__ void load_residual(const float* x, float (&values)[VECTOR]) {
    const float4 low = *reinterpret_cast<const float4*>(x);
    const float4 high = *reinterpret_cast<const float4*>(x + 4);
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

__device__ __forceinline__ void store_residual(float* x, float (&values)[VECTOR]) {
    float4* to = reinterpret_cast<float4*>(x);
    to[0] = make_float4(values[0], values[1], values[2], values[3]);
    to[1] = make_float4(values[4], values[5], values[6], values[7]);
}
#else
using residual = element;

__device__ __forceinline__ void load_residual(const element* x, float (&values)[VECTOR]) {
    widen(load_words<16>(x), values);
}

// The norm sees the rounded values, as later layers do.
__device__ __forceinline__ void store_residual(element* x, float (&values)[VECTOR]) {
    const Words<16> rounded = narrow(values);
    store_words(x, rounded);
    widen(rounded, values);
}
#endif

// out = x / sqrt(mean(x^2) + eps) * weight; with `delta`, x += delta first. grid (rows).
__device__ __forceinline__ void norm_row(residual* x, const element* delta, const float* weight,
                                         element* out, float eps) {
    allow_next();
    const size_t row = size_t(blockIdx.x) * WIDTH;
    float kept[CHUNKS][VECTOR];
    float squares = 0.f;
    wait_for_previous();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int at = (c * THREADS + threadIdx.x) * VECTOR;
        if (at >= WIDTH) continue;
        float(&values)[VECTOR] = kept[c];
        load_residual(x + row + at, values);
        if (delta != nullptr) {
            float more[VECTOR];
            widen(load_words<16>(delta + row + at), more);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) values[i] += more[i];
            store_residual(x + row + at, values);
        }
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) squares += values[i] * values[i];
    }
    const float scale = rsqrtf(sum_of_block(squares) / WIDTH + eps);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int at = (c * THREADS + threadIdx.x) * VECTOR;
        if (at >= WIDTH) continue;
        float(&values)[VECTOR] = kept[c];
        const float4 low = *reinterpret_cast<const float4*>(weight + at);
        const float4 high = *reinterpret_cast<const float4*>(weight + at + 4);
        const float by[VECTOR] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) values[i] *= scale * by[i];
        store_words(out + row + at, narrow(values));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const residual* x, const float* weight, element* out, float eps) {
    norm_row(const_cast<residual*>(x), nullptr, weight, out, eps);
}

extern "C" __global__ void __launch_bounds__(THREADS)
add_rms_norm(residual* x, const element* delta, const float* weight, element* out, float eps) {
    norm_row(x, delta, weight, out, eps);
}

#if !BF16
// The first norm of a stream that products carry on: see carried_norm.cuh. grid (rows).
extern "C" __global__ void __launch_bounds__(THREADS)
leave_norm(const residual* x, const float* weight, __half* out, float* squares, float* lifts,
           float eps) {
    allow_next();
    const size_t row = size_t(blockIdx.x) * WIDTH;
    float kept[CHUNKS][VECTOR];
    float sum = 0.f;
    wait_for_previous();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int at = (c * THREADS + threadIdx.x) * VECTOR;
        if (at >= WIDTH) continue;
        load_residual(x + row + at, kept[c]);
        float mine = 0.f;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) mine += kept[c][i] * kept[c][i];
        sum += mine;
        const float both = mine + __shfl_xor_sync(3u << (threadIdx.x & 30), mine, 1);
        if (at % SQUARES_OF == 0) squares[(row + at) / SQUARES_OF] = both;
    }
    const float lift = Normed::lift_of(rsqrtf(sum_of_block(sum) / WIDTH + eps));
    if (threadIdx.x == 0) lifts[blockIdx.x] = lift;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int at = (c * THREADS + threadIdx.x) * VECTOR;
        if (at >= WIDTH) continue;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) kept[c][i] *= weight[at + i] * lift;
        store_words(out + row + at, narrow(kept[c]));
    }
}
#endif
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
