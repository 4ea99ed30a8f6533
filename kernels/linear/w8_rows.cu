// y = x W^T for 8-bit codes as they lie on disk, row after row with one scale each, and some tens of
// rows of x: the head of a batch.
//
// As w8_gemv.cu, W is the A operand of mma.m16n8k16 and a lane takes consecutive codes, in whatever
// order that gives along K. With more rows of x the warps stand side by side along N and share x
// through shared memory, a step of K at a time in a ring of stages; codes go straight to registers,
// AHEAD steps before they are used.
//
// grid (ceil(m / X_ROWS), ceil(N / ROWS)), block WARPS * 32, dynamic shared memory shared_bytes().
// -DBF16, -DBATCHES: 8 rows of x each, -DWARPS, -DSTRIPS: 16 rows of W each, of a warp, -DWIDE: y in
// fp32, else in the element's type.
#include "async_copy.cuh"
#include "w8_codes.cuh"

constexpr int CHUNK = 64;             // columns of a step
constexpr int MINE = CHUNK / 4;       // of a row in one lane
constexpr int STEPS = CHUNK / 16;     // products of a chunk
constexpr int X_ROWS = 8 * BATCHES;
constexpr int ROWS = 16 * STRIPS * WARPS;
constexpr int X_BYTES = 2 * CHUNK + 16;  // of a row of x in a stage: lanes then meet no bank twice
constexpr int STAGES = 4;
constexpr int AHEAD = 4;
constexpr int STAGE_BYTES = X_ROWS * X_BYTES;
constexpr int PITCH = ROWS + 4;  // floats between two rows of x in the joined sums
constexpr int PIECES = X_ROWS * CHUNK / 8;  // of 16 bytes, in a stage

using Codes = RowCodes<STRIPS, MINE>;

// x [m, columns], from its row first_x on: one step into a stage. Rows past m are zeros.
__device__ __forceinline__ void stage_x(const element* x, int first_x, int m, int columns, int chunk,
                                        unsigned stage) {
    for (int piece = threadIdx.x; piece < PIECES; piece += WARPS * 32) {
        const int row = piece / (CHUNK / 8), part = piece % (CHUNK / 8);
        const bool is_there = first_x + row < m;
        const element* from = x + size_t(first_x + row) * columns + chunk * CHUNK + 8 * part;
        copy_16_or_zero(stage + row * X_BYTES + 16 * part, is_there ? from : x, is_there);
    }
}

__device__ __forceinline__ void multiply(const Codes& codes, unsigned stage, int row, int pair,
                                         float (&sums)[STRIPS][BATCHES][4]) {
    unsigned a[STRIPS][STEPS][4];
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            to_operands(codes.row[strip][0].word[step], a[strip][step][0], a[strip][step][2]);
            to_operands(codes.row[strip][1].word[step], a[strip][step][1], a[strip][step][3]);
        }
    }
#pragma unroll
    for (int batch = 0; batch < BATCHES; ++batch) {
        const unsigned from = stage + (8 * batch + row) * X_BYTES + 2 * MINE * pair;
        const uint4 low = shared_16(from), high = shared_16(from + 16);
        const unsigned b[STEPS][2] = {
            {low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                mma_element(sums[strip][batch], a[strip][step], b[step]);
            }
        }
    }
}

// codes i8[rows, columns]; scales f16[rows]; bias [rows] or null; y [m, rows]. columns: a multiple
// of CHUNK.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
w8_rows(const element* x, const signed char* codes, const __half* scales, const element* bias,
        result* y, int m, int rows, int columns) {
    extern __shared__ __align__(16) char shared[];
    allow_next();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, pair = lane % 4;
    const int first_x = blockIdx.x * X_ROWS, first_row = blockIdx.y * ROWS;
    const int mine = first_row + 16 * STRIPS * warp, chunks = columns / CHUNK;
    const unsigned ring = shared_address(shared);
    const signed char* start[STRIPS][2];
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; ++i) {
        // Rows past the end read the last one; they are never stored.
        const size_t at = min(mine + 16 * (i / 2) + row + 8 * (i % 2), rows - 1);
        start[i / 2][i % 2] = codes + at * columns + pair * MINE;
    }
    Codes ahead[AHEAD];
    const auto load = [&](Codes& to, int chunk) {
#pragma unroll
        for (int i = 0; i < 2 * STRIPS; ++i) {
            load_once<16>(start[i / 2][i % 2] + chunk * CHUNK, to.row[i / 2][i % 2].word);
        }
    };
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        if (a < chunks) load(ahead[a], a);
    }
    wait_for_previous();  // the weights are nobody's result
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (stage < chunks) stage_x(x, first_x, m, columns, stage, ring + stage * STAGE_BYTES);
        close_group();
    }
    float sums[STRIPS][BATCHES][4] = {};
    for (int chunk = 0; chunk < chunks; chunk += AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int here = chunk + a, next = here + STAGES - 1;
            if (here >= chunks) break;
            wait_for_groups<STAGES - 2>();
            __syncthreads();  // everyone's part of the stage is there, and the next one is free
            if (next < chunks) {
                stage_x(x, first_x, m, columns, next, ring + next % STAGES * STAGE_BYTES);
            }
            close_group();
            multiply(ahead[a], ring + here % STAGES * STAGE_BYTES, row, pair, sums);
            if (here + AHEAD < chunks) load(ahead[a], here + AHEAD);
        }
    }
    wait_for_groups<0>();
    __syncthreads();
    float* joined = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
        for (int batch = 0; batch < BATCHES; ++batch) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int of_w = 16 * (STRIPS * warp + strip) + row + 8 * (i / 2);
                joined[(8 * batch + 2 * pair + i % 2) * PITCH + of_w] = sums[strip][batch][i];
            }
        }
    }
    __syncthreads();
    for (int of_w = threadIdx.x % ROWS; of_w < ROWS; of_w += WARPS * 32) {
        const int at = first_row + of_w;
        if (at >= rows) continue;
        const float scale = __half2float(scales[at]);
        const float shift = bias == nullptr ? 0.f : to_float(bias[at]);
        const int count = min(X_ROWS, m - first_x);
        for (int of_x = threadIdx.x / ROWS; of_x < count; of_x += (WARPS * 32 + ROWS - 1) / ROWS) {
            y[size_t(first_x + of_x) * rows + at] =
                to_result(joined[of_x * PITCH + of_w] * scale + shift);
        }
    }
}
