// The inputs of one decode step into the fixed places that a captured graph reads, in one launch:
// ids, slots, lengths, block tables, and the rotary angles of each row's position. Rows that the
// batch does not fill become padding: length 0, so that attention gives zeros, and slot -1, so that
// no KV is written.
//
// grid (rows of the graph), any block.

// ids, positions, slots i64[rows]; tables i32[rows, width]; cos, sin f32[positions, head_dim].
// out: ids, slots i64[grid], lengths i32[grid], tables i32[grid, out_width], cos, sin
// f32[grid, head_dim]. Table entries beyond `width` keep what was there: no length reaches them.
extern "C" __global__ void stage_decode(const long long* ids, const long long* positions,
                                        const long long* slots, const int* tables,
                                        const float* cos, const float* sin, long long* out_ids,
                                        long long* out_slots, int* out_lengths, int* out_tables,
                                        float* out_cos, float* out_sin, int rows, int width,
                                        int out_width, int head_dim) {
    const int row = blockIdx.x;
    const bool is_real = row < rows;
    const long long position = is_real ? positions[row] : 0;
    if (threadIdx.x == 0) {
        out_ids[row] = is_real ? ids[row] : 0;
        out_slots[row] = is_real ? slots[row] : -1;
        out_lengths[row] = is_real ? int(position) + 1 : 0;
    }
    for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
        out_cos[size_t(row) * head_dim + i] = cos[size_t(position) * head_dim + i];
        out_sin[size_t(row) * head_dim + i] = sin[size_t(position) * head_dim + i];
    }
    if (!is_real) return;
    for (int i = threadIdx.x; i < min(width, out_width); i += blockDim.x) {
        out_tables[size_t(row) * out_width + i] = tables[size_t(row) * width + i];
    }
}
