// y = x W^T for 8-bit codes as they lie on disk, row after row, and few rows of x: the head.
//
// W is the A operand of mma.m16n8k16 and x the B operand. A contraction may run over its index in
// any order, so a lane takes consecutive codes of two rows and the same columns of one row of x;
// nothing passes through shared memory but the warps' sums.
//
// grid (ceil(N / ROWS)), block WARPS * 32. The warps of a block share ROWS = 16 * STRIPS rows and
// split K between them.
// -DBF16, -DBATCHES: 8 rows of x each, -DCHUNK=64|32: columns a step, a divisor of the group, -DWIDE:
// y in fp32, else in the element's type.
#include "w8_codes.cuh"

constexpr int WARPS = 8;
constexpr int STRIPS = 1;
constexpr int ROWS = 16 * STRIPS;
constexpr int MINE = CHUNK / 4;  // columns of a chunk in one lane
constexpr int STEPS = CHUNK / 16;
constexpr int AHEAD = 4;  // chunks whose codes are in flight together

using Codes = RowCodes<STRIPS, MINE>;

__device__ __forceinline__ void multiply(const Codes& codes, const Words<2 * MINE> (&x)[BATCHES],
                                         float (&sums)[STRIPS][BATCHES][4]) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            unsigned a[4];
            to_operands(codes.row[strip][0].word[step], a[0], a[2]);
            to_operands(codes.row[strip][1].word[step], a[1], a[3]);
#pragma unroll
            for (int batch = 0; batch < BATCHES; ++batch) {
                const unsigned b[2] = {x[batch].word[2 * step], x[batch].word[2 * step + 1]};
                mma_element(sums[strip][batch], a, b);
            }
        }
    }
}

// x [m, columns], m <= 8 * BATCHES; codes i8[rows, columns]; scales f16[rows, columns / group];
// bias [rows] or null; y [m, rows]. columns and group are multiples of CHUNK.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BATCHES == 1 ? 4 : 2)
w8_gemv(const element* x, const signed char* codes, const __half* scales, const element* bias,
        result* y, int m, int rows, int columns, int group) {
    __shared__ float joined[WARPS][ROWS][8 * BATCHES + 1];
    allow_next();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, pair = lane % 4;
    const int first_row = blockIdx.x * ROWS;
    const int chunks = columns / CHUNK, each = (chunks + WARPS - 1) / WARPS;
    const int first = warp * each, last = min(first + each, chunks);
    const int per_group = group / CHUNK, groups = columns / group;
    const signed char* start[STRIPS][2];
    size_t scale_row[STRIPS][2];
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; ++i) {
        // Rows past the end read the last one; they are never stored.
        const size_t at = min(first_row + 16 * (i / 2) + row + 8 * (i % 2), rows - 1);
        start[i / 2][i % 2] = codes + at * columns + pair * MINE;
        scale_row[i / 2][i % 2] = at * groups;
    }
    float sums[STRIPS][BATCHES][4] = {}, part[STRIPS][BATCHES][4] = {};
    bool waited = false;
    for (int chunk = first; chunk < last; chunk += AHEAD) {
        Codes ahead[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            if (chunk + a >= last) break;
#pragma unroll
            for (int i = 0; i < 2 * STRIPS; ++i) {
                constexpr int width = load_width<MINE>;
                load_once<width>(start[i / 2][i % 2] + (chunk + a) * CHUNK,
                                 ahead[a].row[i / 2][i % 2].word);
            }
        }
        if (!waited) wait_for_previous();  // the weights are nobody's result
        waited = true;
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int here = chunk + a;
            if (here >= last) break;
            Words<2 * MINE> rows_of_x[BATCHES] = {};
#pragma unroll
            for (int batch = 0; batch < BATCHES; ++batch) {
                if (8 * batch + row >= m) continue;
                rows_of_x[batch] = load_words<2 * MINE>(x + size_t(8 * batch + row) * columns +
                                                        here * CHUNK + pair * MINE);
            }
            multiply(ahead[a], rows_of_x, part);
            if ((here + 1) % per_group != 0 && here + 1 < last) continue;
#pragma unroll
            for (int i = 0; i < 2 * STRIPS; ++i) {
                const float scale = __half2float(scales[scale_row[i / 2][i % 2] + here / per_group]);
#pragma unroll
                for (int batch = 0; batch < BATCHES; ++batch) {
                    float* sum = sums[i / 2][batch] + 2 * (i % 2);
                    float* more = part[i / 2][batch] + 2 * (i % 2);
                    sum[0] += more[0] * scale, sum[1] += more[1] * scale;
                    more[0] = more[1] = 0.f;
                }
            }
        }
    }
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
        for (int batch = 0; batch < BATCHES; ++batch) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                joined[warp][16 * strip + row + 8 * (i / 2)][8 * batch + 2 * pair + i % 2] =
                    sums[strip][batch][i];
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < m * ROWS; i += WARPS * 32) {
        const int of_x = i / ROWS, of_w = i % ROWS;
        if (first_row + of_w >= rows) continue;
        float sum = bias == nullptr ? 0.f : to_float(bias[first_row + of_w]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += joined[w][of_w][of_x];
        y[size_t(of_x) * rows + first_row + of_w] = to_result(sum);
    }
}
