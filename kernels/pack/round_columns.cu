// The column loops of GPTQ and of the coordinate descent after it, one block of columns in one
// launch: a warp takes a row of the weights, a lane every 32nd column, and what a column's error
// does to the others goes through registers. As separate operations it is ten launches a column.
//
// Everything fp32 and transposed, [columns, rows]; matrices have `pitch` columns. grid
// ceil(rows / warps), block 32 * warps.
constexpr int COLUMNS = 128;
constexpr int SLOTS = COLUMNS / 32;
constexpr unsigned ALL = 0xffffffffu;

__device__ __forceinline__ float nearest(float value, float low, float high) {
    return fminf(fmaxf(rintf(value), low), high);
}

// rest [count, rows]: what is still to be rounded. root: U with U.T U the inverse Hessian. Writes
// codes, and errors over U's diagonal, from which the columns behind the block are corrected.
extern "C" __global__ void gptq_columns(const float* rest, const float* scales,
                                        const float* offsets, const float* root, float* codes,
                                        float* errors, int rows, int count, int pitch, float low,
                                        float high) {
    const int lane = threadIdx.x % 32;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    float values[SLOTS];
#pragma unroll
    for (int m = 0; m < SLOTS; ++m) {
        const int column = 32 * m + lane;
        values[m] = column < count ? rest[size_t(column) * rows + row] : 0.0f;
    }
#pragma unroll
    for (int m = 0; m < SLOTS; ++m) {
        for (int t = 0; t < 32 && 32 * m + t < count; ++t) {
            const int i = 32 * m + t;
            const size_t at = size_t(i) * rows + row;
            const float value = __shfl_sync(ALL, values[m], t);
            const float scale = scales[at];
            const float offset = offsets == nullptr ? 0.0f : offsets[at];
            const float code = nearest(__fdiv_rn(value - offset, scale), low, high);
            const float rounded = __fadd_rn(__fmul_rn(code, scale), offset);
            const float error = __fdiv_rn(value - rounded, root[size_t(i) * pitch + i]);
            if (lane == 0) {
                codes[at] = code;
                errors[at] = error;
            }
#pragma unroll
            for (int n = m; n < SLOTS; ++n) {
                const int column = 32 * n + lane;
                if (column > i && column < count)
                    values[n] -= root[size_t(i) * pitch + column] * error;
            }
        }
    }
}

// slope [count, rows]: the pull on each column, H (w - w'). Sets each code in turn to its best while
// all others stay; writes by how much the weights moved, from which later columns' pulls follow.
extern "C" __global__ void descend_columns(const float* slope, const float* scales,
                                           const float* hessian, float* codes, float* moves,
                                           int rows, int count, int pitch, float low, float high) {
    const int lane = threadIdx.x % 32;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    float pulls[SLOTS];
#pragma unroll
    for (int m = 0; m < SLOTS; ++m) {
        const int column = 32 * m + lane;
        pulls[m] = column < count ? slope[size_t(column) * rows + row] : 0.0f;
    }
#pragma unroll
    for (int m = 0; m < SLOTS; ++m) {
        for (int t = 0; t < 32 && 32 * m + t < count; ++t) {
            const int i = 32 * m + t;
            const size_t at = size_t(i) * rows + row;
            const float pull = __shfl_sync(ALL, pulls[m], t);
            const float scale = scales[at];
            const float before = codes[at];
            const float wish = __fdiv_rn(pull, hessian[size_t(i) * pitch + i] * scale);
            const float code = nearest(before + wish, low, high);
            const float move = (code - before) * scale;
            __syncwarp();
            if (lane == 0) {
                codes[at] = code;
                moves[at] = move;
            }
            if (move == 0.0f) continue;
#pragma unroll
            for (int n = m; n < SLOTS; ++n) {
                const int column = 32 * n + lane;
                if (column > i && column < count)
                    pulls[n] -= hessian[size_t(i) * pitch + column] * move;
            }
        }
    }
}
