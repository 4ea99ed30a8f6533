// Edits of the logits that depend on a sequence's own text, then its temperature: the device twin
// of engine_actor.model.penalties, same order and same roundings.
//
// grid (ceil(width / CHUNK), rows), block 256. Bias and bans are short lists of ids, counts a dense
// table: bit 31 of an entry says that the prompt holds the id, the rest how often the output does.

constexpr int THREADS = 256;
constexpr int CHUNK = 4096;
constexpr unsigned IN_PROMPT = 0x80000000u;
constexpr float LARGEST = 1e30f;

struct Edit {  // one row's; 32 bytes
    float temperature;         // 0: greedy, the logits stay as they are
    float repetition;          // 1: off
    float presence, frequency;
    int count_row;             // row of `counts`, -1: none
    int first_bias, biases;    // in bias_ids and bias_values
    int bans;                  // in bias_ids, behind the biases
};

// logits, out f32[rows, width] (may be the same); counts u32[.., width].
extern "C" __global__ void __launch_bounds__(THREADS)
edit_logits(const float* logits, float* out, const Edit* edits, const unsigned* counts,
            const int* bias_ids, const float* bias_values, int width) {
    __shared__ float chunk[CHUNK];
    const Edit edit = edits[blockIdx.y];
    const int first = blockIdx.x * CHUNK, size = min(CHUNK, width - first);
    const size_t row = size_t(blockIdx.y) * width + first;
    for (int i = threadIdx.x; i < size; i += THREADS) chunk[i] = logits[row + i];
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
                value = fminf(value, LARGEST);
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
        if (at >= 0 && at < size) chunk[at] = __int_as_float(0xff800000);  // minus infinity
    }
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += THREADS) {
        out[row + i] = edit.temperature > 0.f ? __fdiv_rn(chunk[i], edit.temperature) : chunk[i];
    }
}

// counts[rows[i], tokens[i]] += 1 for every row that keeps counts. grid 1, block >= rows.
extern "C" __global__ void count_tokens(unsigned* counts, const Edit* edits,
                                        const long long* tokens, int rows, int width) {
    const int row = threadIdx.x;
    if (row >= rows || edits[row].count_row < 0) return;
    counts[size_t(edits[row].count_row) * width + tokens[row]] += 1;
}
