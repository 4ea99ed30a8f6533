// Index of the largest logit of each row: the lowest where several are equal, a NaN above all.
//
// grid (blocks a row, rows), block 256. A value and its index become one 64-bit number that orders
// as they do, so a row's blocks join by one atomicMax; the last to finish, by a counter, hands the
// answer out and sets both back to zero for the next launch.

#include "told.cuh"

constexpr int THREADS = 256;
typedef unsigned long long u64;

__device__ __forceinline__ u64 ranked(float value, int index) {
    const unsigned bits = value == 0.f ? 0u : __float_as_uint(value);  // -0 is no less than 0
    // Flip what makes the order of the bits differ from that of the numbers; NaN goes to the top.
    const unsigned order = value != value ? 0xffffffffu
                           : bits >> 31   ? ~bits
                                          : bits | 0x80000000u;
    return u64(order) << 32 | unsigned(~index);
}

// logits f32[rows, width], `pitch` apart; best u64[rows] and counters u32[rows]: zero before and after;
// from tokens to slots as in Told, finite: whether that logit is.
extern "C" __global__ void __launch_bounds__(THREADS)
argmax_rows(const float* logits, u64* best, unsigned* counters, long long* tokens,
            unsigned char* finite, long long* host_tokens, unsigned char* host_finite,
            long long* by_slot, const long long* slots, int width, int pitch) {
    const int row = blockIdx.y;
    const float* values = logits + size_t(row) * pitch;
    u64 mine = 0;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < width; i += gridDim.x * THREADS) {
        const u64 here = ranked(values[i], i);
        mine = here > mine ? here : mine;
    }
    __shared__ u64 warps[THREADS / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const u64 other = __shfl_xor_sync(~0u, mine, step);
        mine = other > mine ? other : mine;
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 1; w < THREADS / 32; ++w) mine = warps[w] > mine ? warps[w] : mine;
    atomicMax(best + row, mine);
    __threadfence();
    if (atomicAdd(counters + row, 1u) != gridDim.x - 1) return;
    const int token = int(~unsigned(atomicExch(best + row, 0ull)));
    counters[row] = 0;
    const Told told = {tokens, finite, host_tokens, host_finite, by_slot, slots};
    told.token(row, token);
    told.is_finite(row, fabsf(values[token]) < __int_as_float(0x7f800000));  // infinity
}
