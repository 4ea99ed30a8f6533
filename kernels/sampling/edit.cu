// Edits of the logits that depend on a sequence's own text, then its temperature: the device twin
// of engine_actor.model.penalties, same order and same roundings. Each block also leaves what the
// softmax and the argmax of the row need from it.
//
// edit_logits: grid (ceil(width / CHUNK), rows), block 256. Bias and bans are short lists of ids,
// counts a dense table: bit 31 of an entry says that the prompt holds the id, the rest how often the
// output does.
#include "draw.cuh"

constexpr int CHUNK = 4096;
constexpr unsigned IN_PROMPT = 0x80000000u;
constexpr float LARGEST = 1e30f;

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

// counts u32[.., width], zero before: what the prompts and outputs of the counted rows hold. grid
// (rows), rows from `first_row` of those in `sent`, ids `ids_at` bytes behind its start.
extern "C" __global__ void __launch_bounds__(THREADS)
count_history(const unsigned char* sent, unsigned* counts, int first_row, int ids_at, int width) {
    const Row& asked = reinterpret_cast<const Row*>(sent)[first_row + blockIdx.x];
    if (asked.count_row < 0) return;
    const int* ids = reinterpret_cast<const int*>(sent + ids_at) + asked.first_id;
    unsigned* own = counts + size_t(asked.count_row) * width;
    for (int i = threadIdx.x; i < asked.prompts + asked.outputs; i += THREADS) {
        const int id = ids[i];
        if (id < 0 || id >= width) continue;
        if (i < asked.prompts) {
            atomicOr(own + id, IN_PROMPT);
        } else {
            atomicAdd(own + id, 1u);
        }
    }
}

// logits f32[.., width], `pitch` apart; out f32[rows, width]; counts from count_history; parts [rows,
// chunks]. Row r of `out` is row first_row + r of those in `sent`; biases `biases_at` bytes behind.
extern "C" __global__ void __launch_bounds__(THREADS)
edit_logits(const float* logits, float* out, const unsigned char* sent, const unsigned* counts,
            ChunkPart* parts, int first_row, int biases_at, int width, int pitch) {
    __shared__ float chunk[CHUNK];
    const Row edit = reinterpret_cast<const Row*>(sent)[first_row + blockIdx.y];
    const Bias* biases = reinterpret_cast<const Bias*>(sent + biases_at) + edit.first_bias;
    const int first = blockIdx.x * CHUNK, size = min(CHUNK, width - first);
    const size_t row = size_t(blockIdx.y) * width + first;
    const float* source = logits + size_t(edit.row) * pitch + first;
    for (int i = threadIdx.x; i < size; i += THREADS) chunk[i] = source[i];
    __syncthreads();
    for (int i = threadIdx.x; i < edit.biases; i += THREADS) {
        const int at = biases[i].id - first;
        if (at >= 0 && at < size) chunk[at] += biases[i].value;
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
        const int at = biases[edit.biases + i].id - first;
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
