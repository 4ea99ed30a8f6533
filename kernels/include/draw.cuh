// What the drawing kernels share: probabilities as integer weights, whose sums do not depend on
// their order, and searches through histograms of the probabilities' bits.
// The definitions are engine_actor.model.{inverse_cdf,truncation,random_draw}'s, to the last bit.
#pragma once

typedef unsigned long long u64;

constexpr int THREADS = 256;
constexpr int DIGITS = 11;               // bits a histogram resolves; floats from 0 to 1 order as
constexpr int BINS = 1 << DIGITS;        // their bits do
constexpr float WEIGHT_ONE = 1073741824.f;  // 2^30: a row's sum fits in 32 bits
#define MINUS_INFINITY __int_as_float(0xff800000)

struct Row {  // what is asked of one row; 88 bytes, kernels.sampling.op.ROW
    double top_p;  // 1 or above: off
    u64 seed;
    long long position;
    float min_p;        // 0: off
    int top_k;          // width or more, or below 1: off
    int greedy;         // take the row's argmax
    int row;            // of the batch: of its logits, and where its token is told
    float temperature;  // 0: the logits stay undivided
    float repetition;   // 1: off
    float presence, frequency;
    int count_row;           // row of the counts, -1: none
    int first_bias, biases;  // in the list of biases
    int bans;                // behind them, values unread
    int first_id, prompts;   // in the list of ids
    int outputs;             // behind them
    int unused;
};
static_assert(sizeof(Row) == 88, "kernels.sampling.op.ROW");

struct Bias {
    int id;
    float value;
};

struct ChunkPart {  // what edit.cu leaves of one chunk of a row
    float largest, sum;  // sum: of exp(value - largest)
    int place;           // of the largest, the lowest index among equals
};

__device__ __forceinline__ unsigned weight_of(float probability) {
    return unsigned(probability * WEIGHT_ONE);
}

// splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
__device__ __forceinline__ u64 mix(u64 value) {
    value += 0x9E3779B97F4A7C15ull;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}

__device__ __forceinline__ double uniform(u64 seed, long long position) {
    const u64 word = mix(mix(seed) ^ mix(u64(position) ^ 0x6A09E667F3BCC909ull));
    return double(word >> 11) * 0x1p-53;
}

// Sum of `mine` over the threads before this one; `all` is the whole block's.
__device__ __forceinline__ unsigned sum_before(unsigned mine, unsigned& all) {
    __shared__ unsigned warps[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned upto = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const unsigned other = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += other;
    }
    __syncthreads();
    if (lane == 31) warps[warp] = upto;
    __syncthreads();
    unsigned before = upto - mine;
    all = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) {
        if (w < warp) before += warps[w];
        all += warps[w];
    }
    return before;
}

struct Found {  // where a search from the largest value down ended
    unsigned bin;           // BINS: nowhere
    unsigned left;          // what is still needed inside the bin
    unsigned weight_above;  // of all bins above it
};

// The first bin, from the top, by which the sum over `by` reaches `needed` (at least 1). By the
// whole block; counts and weights in shared or global memory.
__device__ __forceinline__ Found find_bin(const unsigned* by, const unsigned* weights,
                                          unsigned needed) {
    __shared__ Found found;
    constexpr int each = BINS / THREADS;
    const int top = BINS - 1 - int(threadIdx.x) * each;
    unsigned mine = 0, heavy = 0, all, unused;
#pragma unroll
    for (int i = 0; i < each; ++i) mine += by[top - i], heavy += weights[top - i];
    unsigned before = sum_before(mine, all);
    unsigned above = sum_before(heavy, unused);
    if (threadIdx.x == 0) found = {BINS, 0, 0};
    __syncthreads();
    if (before < needed && before + mine >= needed) {
        for (int i = 0; i < each; ++i) {
            if (before + by[top - i] >= needed) {
                found = {unsigned(top - i), needed - before, above};
                break;
            }
            before += by[top - i], above += weights[top - i];
        }
    }
    __syncthreads();
    const Found answer = found;
    __syncthreads();
    return answer;
}

__device__ __forceinline__ bool limits_k(const Row& draw, int width) {
    return draw.top_k > 0 && draw.top_k < width;
}

// Weight that the most probable tokens must reach, of `total`.
__device__ __forceinline__ unsigned needed_of(unsigned total, double share) {
    const double needed = ceil(__dmul_rn(double(total), share));
    return needed < 1. ? 1u : unsigned(needed);
}
