// The inputs of one forward of prompts into the fixed places that a captured graph reads, in one
// launch. Rows that the batch does not fill become padding: slot -1, so that no KV is written, and
// members of a sequence behind all others that has no keys, so that attention gives zeros. Sequences
// that it does not fill have neither rows nor keys; keys that it does not fill are those of slot 0
// and belong to nobody.
//
// grid (rows + ceil(keys / blockDim.x) + sequences), any block: a row each, then keys, then a
// sequence each.
//
// -DSEQUENCES, as many as there is room for.

// first_row[i]: of sequence i; first_row[count] and all behind it: rows of the batch.
struct Prompts {
    int first_row[SEQUENCES + 1];
    int kv_len[SEQUENCES];
};

// In: prompts, ids, positions, slots i64[rows of the batch]; tables i32[count, width]; cos, sin
// f32[positions, head_dim]. Out: ids, slots i64[rows]; cos, sin f32[rows, head_dim]; key_slots
// i32[keys]; q_starts, k_starts i32[SEQUENCES + 2]; last_rows i64, lengths i32, tables
// i32[SEQUENCES, out_width], 0 where there is no sequence. Table entries beyond `width` keep what
// was there: no length reaches them.
extern "C" __global__ void stage_prompts(const __grid_constant__ Prompts prompts,
                                         const long long* ids,
                                         const long long* positions, const long long* slots,
                                         const int* tables, const float* cos, const float* sin,
                                         long long* out_ids, long long* out_slots, float* out_cos,
                                         float* out_sin, int* out_key_slots, int* out_q_starts,
                                         int* out_k_starts, long long* out_last_rows,
                                         int* out_lengths, int* out_tables, int count, int width,
                                         int rows, int keys, int out_width, int block_tokens,
                                         int head_dim) {
    if (blockIdx.x < rows) {
        const int row = blockIdx.x;
        const bool is_real = row < prompts.first_row[SEQUENCES];
        const long long position = is_real ? positions[row] : 0;
        if (threadIdx.x == 0) {
            out_ids[row] = is_real ? ids[row] : 0;
            out_slots[row] = is_real ? slots[row] : -1;
        }
        for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
            out_cos[size_t(row) * head_dim + i] = cos[size_t(position) * head_dim + i];
            out_sin[size_t(row) * head_dim + i] = sin[size_t(position) * head_dim + i];
        }
        return;
    }
    const int key_blocks = (keys + blockDim.x - 1) / blockDim.x;
    if (blockIdx.x < rows + key_blocks) {
        const int key = (blockIdx.x - rows) * blockDim.x + threadIdx.x;
        if (key >= keys) return;
        int position = key, slot = 0;
        for (int i = 0; i < count; ++i) {
            if (position < prompts.kv_len[i]) {
                const int block = tables[size_t(i) * width + position / block_tokens];
                slot = block * block_tokens + position % block_tokens;
                break;
            }
            position -= prompts.kv_len[i];
        }
        out_key_slots[key] = slot;
        return;
    }
    const int sequence = blockIdx.x - rows - key_blocks;
    const bool is_real = sequence < count;
    if (threadIdx.x == 0) {
        int before = 0;
        for (int i = 0; i < sequence; ++i) before += prompts.kv_len[i];
        out_q_starts[sequence] = prompts.first_row[sequence];
        out_k_starts[sequence] = before;
        out_last_rows[sequence] = is_real ? prompts.first_row[sequence + 1] - 1 : 0;
        out_lengths[sequence] = prompts.kv_len[sequence];
        if (sequence == SEQUENCES - 1) {
            const int all = before + prompts.kv_len[sequence];
            out_q_starts[SEQUENCES] = prompts.first_row[SEQUENCES];
            out_q_starts[SEQUENCES + 1] = rows;
            out_k_starts[SEQUENCES] = out_k_starts[SEQUENCES + 1] = all;
        }
    }
    if (!is_real) return;
    for (int i = threadIdx.x; i < min(width, out_width); i += blockDim.x) {
        out_tables[size_t(sequence) * out_width + i] = tables[size_t(sequence) * width + i];
    }
}
