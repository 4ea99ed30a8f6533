// Draw a token from each row of edited logits: softmax, then top_k, top_p and min_p become one cutoff,
// and the cumulative weight of what is kept is inverted at a point keyed by (seed, position).
// Three launches behind edit.cu's, one after the other, no sort and no host:
//   histogram   makes the probabilities, counts and weighs them by their upper 11 bits;
//   find_cutoff collects the few that may lie at the cutoff, and finds it exactly;
//   draw_tokens sums the weights kept and finds where the sum passes the point.
// All: grid (blocks a row, rows), block 256; blocks of a row meet by counters that go back to zero.
// `asked` are the rows of the batch, of which those from `first_row` on are drawn.
#include "draw.cuh"
#include "told.cuh"

struct RowState {  // zero before the first launch, and again after the last
    unsigned counts[BINS], weights[BINS];
    unsigned largest, candidates, done_cutoff, done_draw;
};

// The bin at which the row's first limit ends; BINS: nowhere.
__device__ __forceinline__ Found first_limit(const RowState& state, const Row& draw, int width) {
    if (limits_k(draw, width)) return find_bin(state.counts, state.weights, draw.top_k);
    const unsigned needed = needed_of(unsigned(WEIGHT_ONE), draw.top_p);
    return find_bin(state.weights, state.weights, needed);
}

// Whether a value must be looked at again: those in the bin, and with a second limit to come, whose
// bin is not known yet, all above it.
__device__ __forceinline__ bool is_candidate(float value, unsigned bin, bool both) {
    const unsigned own = __float_as_uint(value) >> (32 - DIGITS);
    return both ? own >= bin : own == bin;
}

struct Exact {
    float value;            // the value at which the search ended; negative: nowhere
    unsigned left;          // what was still needed of its equals
    unsigned weight_above;  // of all that are larger
};

// The value by which count or weight, from the largest down, reaches `needed`: three digits of the
// bits, each by a histogram of those that agree so far.
__device__ __forceinline__ Exact select(const float* values, int size, unsigned needed,
                                        bool by_weight) {
    __shared__ unsigned counts[BINS], weights[BINS];
    unsigned prefix = 0, left = needed, above = 0;
    for (int digit = 0; digit < 3; ++digit) {
        // Bits 31..21, 20..10 and 9..0; the last digit's bins also hold bit 10, the same for all.
        const int resolved = digit == 0 ? 32 : digit == 1 ? 21 : 10;
        const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0;
        for (int i = threadIdx.x; i < BINS; i += THREADS) counts[i] = weights[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < size; i += THREADS) {
            const unsigned bits = __float_as_uint(values[i]);
            if (digit > 0 && (bits ^ prefix) >> resolved != 0) continue;
            const unsigned bin = bits >> shift & (BINS - 1);
            atomicAdd(&counts[bin], 1u);
            atomicAdd(&weights[bin], weight_of(values[i]));
        }
        __syncthreads();
        const Found found = find_bin(by_weight ? weights : counts, weights, left);
        if (found.bin == BINS) return {-1.f, 0, 0};
        prefix |= found.bin << shift, left = found.left, above += found.weight_above;
    }
    return {__uint_as_float(prefix), left, above};
}

// The least probability the row draws from. limit: where the first limit ended.
__device__ __forceinline__ float exact_cutoff(const float* candidates, int size, const Found& limit,
                                              const Row& draw, float largest, int width) {
    float cutoff = 0.f;
    const bool by_k = limits_k(draw, width), by_p = draw.top_p < 1.;
    if (by_k && by_p) {
        const Exact at_k = select(candidates, size, draw.top_k, false);
        cutoff = fmaxf(at_k.value, 0.f);
        const unsigned total = at_k.weight_above + at_k.left * weight_of(cutoff);
        cutoff = fmaxf(cutoff, select(candidates, size, needed_of(total, draw.top_p), true).value);
    } else if ((by_k || by_p) && limit.bin < BINS) {
        cutoff = fmaxf(0.f, select(candidates, size, limit.left, by_p).value);
    }
    if (draw.min_p > 0.f) cutoff = fmaxf(cutoff, __fmul_rn(largest, draw.min_p));
    return cutoff;
}

__device__ __forceinline__ bool is_last_of_row(unsigned* counter) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1u) == gridDim.x - 1;
        if (last) *counter = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

__device__ __forceinline__ int2 own_range(int width) {
    const int each = (width + gridDim.x - 1) / gridDim.x, first = blockIdx.x * each;
    return make_int2(min(first, width), min(first + each, width));
}

struct Softmax {
    float largest, inverse;  // p = exp(logit - largest) * inverse
    int place;
};

// A row's parts into one, by each warp for itself and always in the same order.
__device__ __forceinline__ Softmax join_parts(const ChunkPart* parts, int chunks) {
    const int lane = threadIdx.x % 32;
    float largest = MINUS_INFINITY, sum = 0.f;
    int place = 0x7fffffff;
    for (int c = lane; c < chunks; c += 32) {
        if (parts[c].largest > largest) largest = parts[c].largest, place = parts[c].place;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(~0u, largest, step);
        const int at = __shfl_xor_sync(~0u, place, step);
        if (other > largest || (other == largest && at < place)) largest = other, place = at;
    }
    for (int c = lane; c < chunks; c += 32) {
        const float scale = expf(parts[c].largest - largest);
        sum += parts[c].largest == MINUS_INFINITY ? 0.f * parts[c].sum : parts[c].sum * scale;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return {largest, __frcp_rn(sum), place};
}

// logits f32[rows, width] and parts [rows, chunks] from edit.cu; probabilities f32[rows, width].
extern "C" __global__ void __launch_bounds__(THREADS)
histogram(const float* logits, const ChunkPart* parts, const Row* asked, float* probabilities,
          RowState* states, int first_row, int width, int chunks) {
    const Row draw = asked[first_row + blockIdx.y];
    if (draw.greedy) return;
    const bool cuts = limits_k(draw, width) || draw.top_p < 1. || draw.min_p > 0.f;
    __shared__ unsigned counts[BINS], weights[BINS];
    for (int i = threadIdx.x; i < BINS; i += THREADS) counts[i] = weights[i] = 0;
    const Softmax softmax = join_parts(parts + blockIdx.y * chunks, chunks);
    __syncthreads();
    const size_t start = size_t(blockIdx.y) * width;
    const int2 range = own_range(width);
    unsigned largest = 0;
    for (int i = range.x + threadIdx.x; i < range.y; i += THREADS) {
        const float value = expf(logits[start + i] - softmax.largest) * softmax.inverse;
        probabilities[start + i] = value;
        if (!cuts) continue;
        const unsigned bits = __float_as_uint(value), weight = weight_of(value);
        atomicAdd(&counts[bits >> (32 - DIGITS)], 1u);
        if (weight > 0) atomicAdd(&weights[bits >> (32 - DIGITS)], weight);
        largest = max(largest, bits);
    }
    if (!cuts) return;
    largest = __reduce_max_sync(~0u, largest);
    RowState& state = states[blockIdx.y];
    if (threadIdx.x % 32 == 0) atomicMax(&state.largest, largest);
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
        if (counts[i] > 0) atomicAdd(&state.counts[i], counts[i]);
        if (weights[i] > 0) atomicAdd(&state.weights[i], weights[i]);
    }
}

// candidates f32[rows, width], room to work in, may be the logits; cutoffs f32[rows].
extern "C" __global__ void __launch_bounds__(THREADS, 4)
find_cutoff(const float* probabilities, const Row* asked, RowState* states, float* candidates,
            float* cutoffs, int first_row, int width) {
    const Row draw = asked[first_row + blockIdx.y];
    RowState& state = states[blockIdx.y];
    const bool searches = limits_k(draw, width) || draw.top_p < 1.;
    if (draw.greedy || !(searches || draw.min_p > 0.f)) {
        if (blockIdx.x == 0 && threadIdx.x == 0) cutoffs[blockIdx.y] = 0.f;
        return;
    }
    const size_t start = size_t(blockIdx.y) * width;
    Found limit = {BINS, 0, 0};
    if (searches) {
        limit = first_limit(state, draw, width);
        const bool both = limits_k(draw, width) && draw.top_p < 1.;
        const int2 range = own_range(width);
        for (int i = range.x + threadIdx.x; i < range.y && limit.bin < BINS; i += THREADS) {
            const float value = probabilities[start + i];
            if (!is_candidate(value, limit.bin, both)) continue;
            candidates[start + atomicAdd(&state.candidates, 1u)] = value;
        }
    }
    if (!is_last_of_row(&state.done_cutoff)) return;
    const float largest = __uint_as_float(state.largest);
    const float cutoff =
        exact_cutoff(candidates + start, state.candidates, limit, draw, largest, width);
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) state.counts[i] = state.weights[i] = 0;
    if (threadIdx.x == 0) {
        cutoffs[blockIdx.y] = cutoff;
        state.largest = state.candidates = 0;
    }
}

// The first index of first..last - 1 at which the kept weight, summed from `first`, passes `target`;
// `last` where it does not. By the whole block.
__device__ __forceinline__ int where_passed(const float* row, int first, int last, float cutoff,
                                            unsigned target) {
    __shared__ int found;
    const int each = (last - first + THREADS - 1) / THREADS;
    const int from = min(first + int(threadIdx.x) * each, last), to = min(from + each, last);
    unsigned mine = 0, all;
    for (int i = from; i < to; ++i) mine += row[i] >= cutoff ? weight_of(row[i]) : 0u;
    // Before the barriers of the sum, whose wide loads of shared memory take this word along.
    if (threadIdx.x == 0) found = last;
    unsigned before = sum_before(mine, all);
    __syncthreads();
    if (before <= target && before + mine > target) {
        for (int i = from; i < to; ++i) {
            before += row[i] >= cutoff ? weight_of(row[i]) : 0u;
            if (before > target) {
                found = i;
                break;
            }
        }
    }
    __syncthreads();
    return found;
}

// sums u32[rows, blocks]; from tokens to slots as in Told, of the batch.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
draw_tokens(const float* probabilities, const Row* asked, RowState* states, const float* cutoffs,
            unsigned* sums, const ChunkPart* parts, long long* tokens, unsigned char* finite,
            long long* host_tokens, unsigned char* host_finite, long long* by_slot,
            const long long* slots, int first_row, int width, int chunks) {
    const Told told = {tokens, finite, host_tokens, host_finite, by_slot, slots};
    const Row draw = asked[first_row + blockIdx.y];
    const float* row = probabilities + size_t(blockIdx.y) * width;
    if (blockIdx.x == 0 && threadIdx.x < 32) {
        const Softmax softmax = join_parts(parts + blockIdx.y * chunks, chunks);
        const float infinity = -MINUS_INFINITY;  // a NaN or an infinity makes `inverse` NaN
        const bool is_finite = fabsf(softmax.largest) < infinity && softmax.inverse > 0.f;
        if (threadIdx.x == 0) told.is_finite(draw.row, is_finite);
        // Of a broken row any id will do: it is told.
        if (threadIdx.x == 0 && draw.greedy) told.token(draw.row, min(softmax.place, width - 1));
    }
    if (draw.greedy) return;
    const float cutoff = cutoffs[blockIdx.y];
    const int2 range = own_range(width);
    unsigned mine = 0, all;
    for (int i = range.x + threadIdx.x; i < range.y; i += THREADS) {
        mine += row[i] >= cutoff ? weight_of(row[i]) : 0u;
    }
    sum_before(mine, all);
    unsigned* own = sums + size_t(blockIdx.y) * gridDim.x;
    if (threadIdx.x == 0) own[blockIdx.x] = all;
    if (!is_last_of_row(&states[blockIdx.y].done_draw)) return;
    unsigned total = 0;
    for (int b = 0; b < gridDim.x; ++b) total += __ldcg(own + b);
    const unsigned target = unsigned(__dmul_rn(double(total), uniform(draw.seed, draw.position)));
    unsigned before = 0;
    int block = 0;
    while (block < gridDim.x - 1 && before + __ldcg(own + block) <= target) {
        before += __ldcg(own + block++);
    }
    const int each = (width + gridDim.x - 1) / gridDim.x;
    const int first = min(block * each, width), last = min(first + each, width);
    const int token = where_passed(row, first, last, cutoff, target - before);
    if (threadIdx.x == 0) told.token(draw.row, min(token, width - 1));
}
