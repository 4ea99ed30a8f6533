// y = x W^T for few rows of x: the weights pass once, and that is what takes the time.
//
// A strip of 16 out-features is the A operand of mma.m16n8k16, rows of x its n side, so eight rows
// cost what one costs. A block owns STRIPS strips and ROWS rows; its warps take turns along K,
// UNROLL steps at a time. Weights go from memory into the registers that unpack them, never through
// shared memory: what is in flight is warps times UNROLL steps, and short code in many warps proved
// faster here than a deep ring in few. The warps' sums are added in the order of the warps, so the
// same bits come out every time.
//
// Reads once: weights, scales, offsets (from L2 again where x has more than ROWS rows). Reads
// through L1 and L2: x, once a block, which is what limits it from 32 rows on. Loses where there
// are many rows (strip_gemm*.cu), and where N / 16 is far below the number of multiprocessors: a
// strip is never shared between blocks.
//
// Defines: BITS 3 or 4. ROWS of x there is room for, a multiple of 8. WARPS, STRIPS, UNROLL.
// PREFETCH 1: the next turn's weights are asked for before this turn's are used. GROUP 32, 64 or
// 128 columns a scale; 0 where a group is whole steps. OFFSETS 0 or 1. GATED 1: rows 0 .. 7 of each
// strip are gates of its rows 8 .. 15, y = silu(gate) * up is half as wide. RAGGED 1: K is not
// whole steps. SIGNED 1: codes are made signed one by one. RESIDENT blocks are to fit a
// multiprocessor. NORMED 1: x is to be normed, and is by what its sums are multiplied with. CARRIES 1
// or 2 (the residual stream is fp32): y is added to that and left as the next norm's input. For both
// see include/carried_norm.cuh.
#include "carried_norm.cuh"
#include "strip.cuh"
#include "tensor_core.cuh"

namespace {

using Packed = strip::Layout<BITS>;
constexpr int TILES = ROWS / 8;  // n sides of mma
constexpr int THREADS = 32 * WARPS;
constexpr int SPAN_ROWS = strip::HEIGHT * STRIPS;
constexpr int SUM_PITCH = SPAN_ROWS + 1;  // sums of a row of x, without bank conflicts
constexpr int STEP_GROUPS = GROUP ? Packed::STEP / GROUP : 1;
// A step of mma mixes columns of two groups of 32, but a lane's columns of a block lie in one:
// there a lane's scales go onto its weights. They do for many rows too, where weights are fewer
// than sums.
constexpr bool ON_WEIGHTS = GROUP == 32 || ROWS > 16;
// Elsewhere codes are multiplied as they lie in the words, as tiny fp16 numbers, and 8 (or 4) times
// the sum of x is taken off. Where a block has one strip, that sum costs what the strip costs.
constexpr bool BARE = !ON_WEIGHTS && !SIGNED;
constexpr bool X_SUMS = BARE || (OFFSETS && !ON_WEIGHTS);
constexpr int TOGETHER = BARE ? STRIPS : 1;  // strips that are unpacked at a time
constexpr int BLOCKS_OF_GROUP = GROUP == 0 ? Packed::STEP_BLOCKS : GROUP == 128 ? 2 : 1;
constexpr int LANE_GROUPS = Packed::STEP_BLOCKS / BLOCKS_OF_GROUP;

// Where a lane finds its part of the weights. Pointers are moved along, never computed anew.
struct Source {
    const uint4* words[STRIPS];
    const __half* scales[STRIPS];
    const __half* offsets[STRIPS];

    __device__ __forceinline__ void skip(int steps) {
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) {
            words[s] += steps * (Packed::VECTORS * strip::LANES);
            if (GROUP == 0) continue;
            scales[s] += steps * (STEP_GROUPS * strip::HEIGHT);
            if (OFFSETS) offsets[s] += steps * (STEP_GROUPS * strip::HEIGHT);
        }
    }
};

// What a lane holds of one step: its vectors, and scales and offsets of rows g and g + 8.
struct Step {
    uint4 vectors[STRIPS][Packed::VECTORS];
    __half scales[STRIPS][LANE_GROUPS][2];
    __half offsets[STRIPS][LANE_GROUPS][2];
};

__device__ __forceinline__ uint4 load_vector(const uint4* from) {
    unsigned v[4];
    load_once<16>(from, v);
    return make_uint4(v[0], v[1], v[2], v[3]);
}

// The step `ahead` of where the source points; `group` where a group is whole steps.
__device__ __forceinline__ void load_step(Step& to, const Source& from, int ahead, int group) {
    const int first = (GROUP ? ahead * STEP_GROUPS : group) * strip::HEIGHT;
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) {
        const uint4* vectors = from.words[s] + ahead * (Packed::VECTORS * strip::LANES);
#pragma unroll
        for (int v = 0; v < Packed::VECTORS; ++v)
            to.vectors[s][v] = load_vector(vectors + v * strip::LANES);
        const __half* scales = from.scales[s] + first;
        const __half* offsets = from.offsets[s] + first;
#pragma unroll
        for (int i = 0; i < LANE_GROUPS; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int at = i * (GROUP == 32 ? 2 : 1) * strip::HEIGHT + 8 * h;
                to.scales[s][i][h] = __ldg(scales + at);
                if (OFFSETS) to.offsets[s][i][h] = __ldg(offsets + at);
            }
    }
}

// 16 columns of a row of x, this lane's B fragments: step j of mma takes words 2 j and 2 j + 1.
struct Columns {
    unsigned words[8];
};

// `there`: how many of the columns x has; none of a row that it lacks. The rest is zero.
__device__ __forceinline__ Columns load_columns(const __half* from, int there) {
    Columns got;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (8 * half < there) v = *reinterpret_cast<const uint4*>(from + 8 * half);
        got.words[4 * half + 0] = v.x, got.words[4 * half + 1] = v.y;
        got.words[4 * half + 2] = v.z, got.words[4 * half + 3] = v.w;
    }
    return got;
}

using Sums = float[STRIPS][TILES][4];

// A of a product that sums x up, of a strip's rows 0 .. 7 and 8 .. 15: ones, or what bare codes are
// too much; and what sums are to be multiplied by in the end.
constexpr unsigned ONES = 0x3c003c00;
constexpr unsigned OF_LOWER = BARE ? strip::less_at<BITS>(0) : ONES;
constexpr unsigned OF_UPPER = BARE ? strip::less_at<BITS>(strip::UPPER_PLACE<BITS>) : ONES;
constexpr float UNIT = BARE ? strip::LOWER_UNIT : 1.0f;
constexpr float UPPER_UNIT = BARE ? strip::UPPER_UNIT<BITS> : 1.0f;

// sums += scale * products + offset * (sum of x over the group); x_sums are -8 (or -4) times that
// where codes are bare. The two rows of a lane differ.
__device__ __forceinline__ void add_group(Sums& sums, const Sums& products,
                                          const float (&x_sums)[TILES][4], const Step& of,
                                          int group) {
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int b = 0; b < TILES; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float scale = __half2float(of.scales[s][group][i / 2]);
                const float offset = OFFSETS ? __half2float(of.offsets[s][group][i / 2]) : 0.0f;
                float& sum = sums[s][b][i];
                if (!BARE) {
                    sum += products[s][b][i] * scale;
                    if (OFFSETS) sum += x_sums[b][i] * offset;
                } else if (OFFSETS) {
                    sum += products[s][b][i] * scale +
                           x_sums[b][i] * (scale - offset / strip::MIDDLE<BITS>);
                } else {
                    sum += (products[s][b][i] + x_sums[b][i]) * scale;
                }
            }
}

// A strip's block of columns to the A operands of four mma steps.
__device__ __forceinline__ void unpack_block(const Step& of, int s, int block,
                                             unsigned (&pairs)[strip::PAIRS]) {
    unsigned words[Packed::WORDS];
    strip::words_of<BITS>(of.vectors[s], block, words);
    strip::place_pairs<!BARE>(words, pairs);
    if (BARE) strip::level<BITS>(pairs);
    if constexpr (ON_WEIGHTS) {
        const auto both = [](__half value) { return __half2half2(value); };
        constexpr int per_group = BLOCKS_OF_GROUP;
        const __half* scale = of.scales[s][block / per_group];
        strip::RowScales rows = {{both(scale[0]), both(scale[1])}, {}};
        if (OFFSETS) {
            rows.offset[0] = both(of.offsets[s][block / per_group][0]);
            rows.offset[1] = both(of.offsets[s][block / per_group][1]);
        }
        strip::weigh<BITS, OFFSETS != 0>(pairs, rows);
    } else if constexpr (!BARE) {
        strip::unbias<BITS>(pairs);
    }
}

// sums += W x for one step. x: this lane's columns of the step in row g, of which `there` exist.
__device__ __forceinline__ void multiply_step(Sums& sums, const Step& of, const __half* x,
                                              int row_pitch, const int (&there)[TILES]) {
    Sums products;
    float x_sums[TILES][4];
#pragma unroll
    for (int block = 0; block < Packed::STEP_BLOCKS; ++block) {
        if (block % BLOCKS_OF_GROUP == 0) {
#pragma unroll
            for (int b = 0; b < TILES; ++b)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    x_sums[b][i] = 0.0f;
#pragma unroll
                    for (int s = 0; s < STRIPS; ++s) products[s][b][i] = 0.0f;
                }
        }
        Columns columns[TILES], levelled[TILES];
#pragma unroll
        for (int b = 0; b < TILES; ++b) {
            columns[b] = load_columns(x + 8 * b * row_pitch + block * strip::BLOCK,
                                      there[b] - block * strip::BLOCK);
            levelled[b] = columns[b];
            if (BARE) strip::level_x<BITS>(levelled[b].words);
        }
#pragma unroll
        for (int first = 0; first < STRIPS; first += TOGETHER) {
            unsigned pairs[TOGETHER][strip::PAIRS];
#pragma unroll
            for (int s = 0; s < TOGETHER; ++s) unpack_block(of, first + s, block, pairs[s]);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int b = 0; b < TILES; ++b) {
                    if (X_SUMS && first == 0) {
                        const unsigned of_x[2] = {columns[b].words[2 * j],
                                                  columns[b].words[2 * j + 1]};
                        const unsigned rows[4] = {OF_LOWER, OF_UPPER, OF_LOWER, OF_UPPER};
                        mma_half(x_sums[b], rows, of_x);
                    }
                    const unsigned of_x[2] = {levelled[b].words[2 * j],
                                              levelled[b].words[2 * j + 1]};
#pragma unroll
                    for (int s = 0; s < TOGETHER; ++s) {
                        const unsigned of_w[4] = {pairs[s][4 * j], pairs[s][4 * j + 1],
                                                  pairs[s][4 * j + 2], pairs[s][4 * j + 3]};
                        float(&to)[4] = ON_WEIGHTS ? sums[first + s][b] : products[first + s][b];
                        mma_half(to, of_w, of_x);
                    }
                }
        }
        if (!ON_WEIGHTS && (block + 1) % BLOCKS_OF_GROUP == 0)
            add_group(sums, products, x_sums, of, block / BLOCKS_OF_GROUP);
    }
}

__device__ __forceinline__ void leave(const Sums& sums, float* partial, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int b = 0; b < TILES; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int m = 8 * b + 2 * t + i % 2, n = strip::HEIGHT * s + g + 8 * (i / 2);
                partial[m * SUM_PITCH + n] = sums[s][b][i] * (i / 2 ? UPPER_UNIT : UNIT);
            }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
strip_gemv(const __half* x, const uint4* __restrict__ words, const __half* __restrict__ scales,
           const __half* __restrict__ offsets, const __half* __restrict__ bias,
           const __half* residual, __half* y, int rows, int out_features, int in_features,
           int steps, int groups, int steps_per_group, const float* in_squares,
           const float* in_lift, float* next_lift, int normed_width, float eps, void* stream,
           const float* next_weight, const float* out_lift, float* out_squares) {
    allow_next();
    extern __shared__ float partials[];  // [WARPS][ROWS][SUM_PITCH]
    constexpr int WARP_SUMS = ROWS * SUM_PITCH;
    const int lane = threadIdx.x % strip::LANES, warp = threadIdx.x / strip::LANES;
    const int g = lane / 4, column = lane % 4 * 16;
    // Blocks of the same strips and other rows of x are neighbours: one of them reads from L2.
    const int first_row = blockIdx.x * ROWS, first_strip = blockIdx.y * STRIPS;
    rows = min(rows - first_row, ROWS);
    const int last_strip = (out_features - 1) / strip::HEIGHT;
    Source source;
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) {
        // The last block may reach past the last strip: it reads that one again, stores nothing.
        const size_t at = min(first_strip + s, last_strip);
        source.words[s] = words + at * steps * (Packed::VECTORS * strip::LANES) + lane;
        const size_t row = at * groups * strip::HEIGHT + g +
                           (GROUP == 32 ? lane % 4 / 2 * strip::HEIGHT : 0);
        source.scales[s] = scales + row;
        source.offsets[s] = offsets + row;
    }
    constexpr int TURN = WARPS * UNROLL;
    int first = warp * UNROLL;
    source.skip(first);
    const auto load_turn = [&](Step(&to)[UNROLL], int first) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (first + u < steps)
                load_step(to[u], source, u, GROUP ? 0 : (first + u) / steps_per_group);
        source.skip(TURN);
    };

    Sums sums = {};
    // Of the first eight, a row that x lacks is its last one once more: what comes of it is not
    // stored.
    const __half* x_at = x + static_cast<size_t>(first_row + min(g, rows - 1)) * in_features +
                         column + first * Packed::STEP;
    const auto multiply_turn = [&](const Step(&of)[UNROLL], int first) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (first + u >= steps) break;
            int there[TILES];
#pragma unroll
            for (int b = 0; b < TILES; ++b) {
                const int left = in_features - (first + u) * Packed::STEP - column;
                there[b] = b > 0 && 8 * b + g >= rows ? 0 : RAGGED ? left : Packed::STEP;
            }
            multiply_step(sums, of[u], x_at + u * Packed::STEP, in_features, there);
        }
        x_at += TURN * Packed::STEP;
    };

    Step now[UNROLL];
    load_turn(now, first);
    // What else it needs in the end comes from memory too, where nothing has read it since the last
    // step: a row's bias and the next norm's weight.
    const int early_row = first_strip * strip::HEIGHT + 8 * threadIdx.x;
    if (threadIdx.x < 2 * STRIPS && early_row < out_features) {
        if (bias != nullptr) prefetch_sector(bias + early_row);
        if (CARRIES) prefetch_sector(next_weight + early_row);
    }
    // Weights never come from the kernel before; x, residual and the room for y may.
    wait_for_previous();
    const Normed normed = {in_squares, in_lift, next_lift, normed_width, eps};
    const Carried carried = {stream, next_weight, out_lift, out_squares};
    constexpr bool EARLY_SQUARES = NORMED && WARPS * RESIDENT <= 32;
    float4 squares = {};
    if (EARLY_SQUARES && warp < rows) squares = normed.squares_of(first_row + warp, 4 * lane);
    if (PREFETCH) {
        for (; first < steps; first += TURN) {
            Step next[UNROLL];
            load_turn(next, first + TURN);
            multiply_turn(now, first);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) now[u] = next[u];
        }
    } else {
        while (first < steps) {
            multiply_turn(now, first);
            first += TURN;
            load_turn(now, first);
        }
    }
    leave(sums, partials + warp * WARP_SUMS, lane);
    __shared__ float scales_of_rows[NORMED ? ROWS : 1];
    if (NORMED) {
        for (int m = warp; m < rows; m += WARPS) {
            if (!EARLY_SQUARES || m != warp) squares = normed.squares_of(first_row + m, 4 * lane);
            const float scale = normed.scale(first_row + m, squares, lane, blockIdx.y == 0);
            if (lane == 0) scales_of_rows[m] = scale;
        }
    }
    __syncthreads();

    const auto total = [&](int place) {
        float sum = partials[place];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) sum += partials[w * WARP_SUMS + place];
        return sum;
    };
    const strip::Epilogue epilogue{bias, residual, y, GATED ? out_features / 2 : out_features};
    constexpr int OUT = GATED ? SPAN_ROWS / 2 : SPAN_ROWS;
    for (int i = threadIdx.x; i < OUT * rows; i += THREADS) {
        const int m = i / OUT, out = i % OUT;
        const int n = GATED ? out / 8 * strip::HEIGHT + out % 8 : out;
        const int row = first_strip * strip::HEIGHT + n;
        if (row >= out_features) continue;
        const float scale = NORMED ? scales_of_rows[m] : 1.0f;
        float value = epilogue.biased(row, total(m * SUM_PITCH + n) * scale);
        if (GATED) {
            const float up = epilogue.biased(row + 8, total(m * SUM_PITCH + n + 8) * scale);
            value = strip::silu(value) * up;
        }
        if (CARRIES) {
            carried.store<CARRIES == 2>(y, first_row + m, row, out_features, value);
        } else {
            epilogue.store(first_row + m, blockIdx.y * OUT + out, value);
        }
    }
}
