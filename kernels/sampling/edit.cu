// Edits of the logits that depend on a sequence's own text, then its temperature: the device twin
// of engine_actor.model.penalties, same order and same roundings. Each block also leaves what the
// softmax and the argmax of the row need from it.
//
// grid (ceil(width / CHUNK), rows), block 256. Bias and bans are short lists of ids, counts a dense
// table: bit 31 of an entry says that the prompt holds the id, the rest how often the output does.
#include "draw.cuh"

constexpr int CHUNK = 4096;
constexpr unsigned IN_PROMPT = 0x80000000u;
constexpr float LARGEST = 1e30f;

struct Edit {  // one row's; 36 bytes
    float temperature;         // 0: greedy, the logits stay as they are
    float repetition;          // 1: off
    float presence, frequency;
    int count_row;             // row of `counts`, -1: none
    int first_bias, biases;    // in bias_ids and bias_values
    int bans;                  // in bias_ids, behind the biases
    int row;                   // of the logits
};

// The chunk's largest value with its lowest index, and the sum of exp(value - largest): by the whole
// block, in an order that depends on nothing but the chunk's size. A NaN ends up in `sum`.
__device__ __forceinline__ ChunkPart summarise(const float* chunk, int size, int first) {
    __shared__ float highs[THREADS / 32], sums[THREADS / 32];
    __shared__ int places[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float high = MINUS_INFINITY;
    int place = first + size - 1;
    for (int i = threadIdx.x; i < size; i += THREADS) {
        if (chunk[i] > high) high = chunk[i], place = first + i;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(~0u, high, step);
        const int at = __shfl_xor_sync(~0u, place, step);
        if (other > high || (other == high && at < place)) high = other, place = at;
    }
    if (lane == 0) highs[warp] = high, places[warp] = place;
    __syncthreads();
    for (int w = 0; w < THREADS / 32; ++w) {
        const bool wins = highs[w] > high || (highs[w] == high && places[w] < place);
        if (wins) high = highs[w], place = places[w];
    }
    float sum = 0.f;
    for (int i = threadIdx.x; i < size; i += THREADS) {
        sum += chunk[i] == MINUS_INFINITY ? 0.f : expf(chunk[i] - high);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = 0.f;
    for (int w = 0; w < THREADS / 32; ++w) sum += sums[w];
    return {high, sum, place};
}

// logits f32[.., width], `pitch` apart; out f32[rows, width]; counts u32[.., width]; parts [rows,
// chunks]. Row r of `out` comes from row edits[r].row of the logits.
extern "C" __global__ void __launch_bounds__(THREADS)
edit_logits(const float* logits, float* out, const Edit* edits, const unsigned* counts,
            const int* bias_ids, const float* bias_values, ChunkPart* parts, int width, int pitch) {
    __shared__ float chunk[CHUNK];
    const Edit edit = edits[blockIdx.y];
    const int first = blockIdx.x * CHUNK, size = min(CHUNK, width - first);
    const size_t row = size_t(blockIdx.y) * width + first;
    const float* source = logits + size_t(edit.row) * pitch + first;
    for (int i = threadIdx.x; i < size; i += THREADS) chunk[i] = source[i];
    __syncthreads();
    for (int i = threadIdx.x; i < edit.biases; i += THREADS) {
        const int at = bias_ids[edit.first_bias + i] - first;
        if (at >= 0 && at < size) chunk[at] += bias_values[edit.first_bias + i];
    }
    __syncthreads();
    if (edit.count_row >= 0) {
        const unsigned* seen = counts + size_t(edit.count_row) * width + first;
        const float strength = fmaxf(edit.repetition, 1.f / LARGEST);
        for (int i = threadIdx.x; i < size; i += THREADS) {
            const unsigned entry = seen[i];
            if (entry == 0) continue;
            float value = chunk[i];
            if (edit.repetition != 1.f) {
                value = value > 0.f ? __fdiv_rn(value, strength) : __fmul_rn(value, strength);
                value = value > LARGEST ? LARGEST : value;  // a NaN stays one
            }
            const unsigned times = entry & ~IN_PROMPT;
            if (times > 0) {
                const float cost = __fadd_rn(__fmul_rn(float(times), edit.frequency),
                                             edit.presence);
                value = __fsub_rn(value, cost);
            }
            chunk[i] = value;
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < edit.bans; i += THREADS) {
        const int at = bias_ids[edit.first_bias + edit.biases + i] - first;
        if (at >= 0 && at < size) chunk[at] = MINUS_INFINITY;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += THREADS) {
        if (edit.temperature > 0.f) chunk[i] = __fdiv_rn(chunk[i], edit.temperature);
        out[row + i] = chunk[i];
    }
    __syncthreads();
    const ChunkPart part = summarise(chunk, size, first);
    if (threadIdx.x == 0) parts[blockIdx.y * gridDim.x + blockIdx.x] = part;
}

// The token of each edited row that keeps counts is counted. grid 1, block >= rows.
extern "C" __global__ void count_tokens(unsigned* counts, const Edit* edits,
                                        const long long* tokens, int rows, int width) {
    const int row = threadIdx.x;
    if (row >= rows || edits[row].count_row < 0) return;
    counts[size_t(edits[row].count_row) * width + tokens[edits[row].row]] += 1;
}
