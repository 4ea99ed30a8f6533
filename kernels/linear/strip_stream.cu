// y = x W^T for few rows of x and many strips (sm_90): a grid that stays, x in registers, weights
// streamed past it.
//
// A warp owns COLUMNS columns of K for good. It loads x's fragments of them once, and sums them up
// once, and then takes its part of strip after strip: the loop is unpacking and products, little
// else. One lane asks for whole strips by bulk copies, WINDOW of them at a time, because all that
// are on their way come at about the same time; DEPTH find room. The WARPS parts of a strip are
// added in the order of the warps, by one of them when it has left its part of the next.
//
// Reads once: weights, scales, offsets; x once a block. Loses where few strips are for each block:
// nothing is added up before the first strip has come and x is summed (strip_gemv.cu).
//
// Defines: BITS 3 or 4. ROWS of x there is room for: 8. COLUMNS 128 or 256, WARPS: together they are
// the padded columns. SETS of WARPS warps in a block, each with strips of its own. DEPTH, WINDOW.
// BUFFERS of sums. GROUP 64 or 128 columns a scale. OFFSETS, GATED, NORMED: as in strip_gemv.cu.
// WATCHED: see TELLERS.
#include "async_copy.cuh"
#include "carried_norm.cuh"
#include "hopper.cuh"
#include "strip.cuh"
#include "tensor_core.cuh"

namespace {

using Packed = strip::Layout<BITS>;
constexpr int TILES = ROWS / 8;
constexpr int SET_THREADS = 32 * WARPS, THREADS = SET_THREADS * SETS + 32;
constexpr int BLOCKS = COLUMNS / strip::BLOCK;
constexpr int GROUPS = COLUMNS / GROUP, GROUP_BLOCKS = GROUP / strip::BLOCK;
constexpr int VECTOR_BYTES = 16 * strip::LANES;
constexpr int WORD_BYTES = 2 * BITS * COLUMNS * WARPS;  // of a strip
constexpr int SCALE_BYTES = 2 * strip::HEIGHT * GROUPS * WARPS;
constexpr int SLOT_BYTES = WORD_BYTES + SCALE_BYTES * (1 + OFFSETS);
constexpr int PITCH = 20;  // sums of a row of x: 2 t rows further is another bank
constexpr int BUFFER = ROWS * PITCH;
static_assert(ROWS == 8, "a strip's sums are finished by eight rows of four lanes");
static_assert(COLUMNS % GROUP == 0, "a warp's columns are whole groups");
static_assert(WINDOW <= DEPTH && SETS <= DEPTH, "a slot for all that is on its way");
static_assert(BUFFERS >= 2, "a strip is finished while the next one is left");
// One lane tells a barrier that its warp is done: __syncwarp() orders what the others did before it.
// Tools that watch every access see only who told, so for them all lanes do.
constexpr int TELLERS = WATCHED ? strip::LANES : 1;

// A strip's part as a lane reads it from its slot.
struct Part {
    unsigned words[BLOCKS][Packed::WORDS];
    __half scales[GROUPS][2];
    __half offsets[GROUPS][2];
};

// Where a lane finds it, from the slot on.
struct Place {
    unsigned words, scales;

    __device__ __forceinline__ Place(int warp, int lane) {
        if (BITS == 4) words = warp * BLOCKS * VECTOR_BYTES + 16 * lane;
        else words = warp * COLUMNS / 256 * (3 * VECTOR_BYTES) + 16 * lane +
                     (COLUMNS == 128 ? warp % 2 * 8 : 0);
        scales = WORD_BYTES + 2 * (strip::HEIGHT * GROUPS * warp + lane / 4);
    }
};

__device__ __forceinline__ __half half_at(unsigned from) {
    return __ushort_as_half(static_cast<unsigned short>(shared_2(from)));
}

__device__ __forceinline__ Part read_part(unsigned slot, const Place& at) {
    Part got;
    if constexpr (BITS == 4) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const uint4 v = shared_16(slot + at.words + block * VECTOR_BYTES);
            unsigned(&to)[Packed::WORDS] = got.words[block];
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        }
    } else {
#pragma unroll
        for (int plane = 0; plane < 3; ++plane) {
            if constexpr (BLOCKS == 4) {
                const uint4 v = shared_16(slot + at.words + plane * VECTOR_BYTES);
                got.words[0][plane] = v.x, got.words[1][plane] = v.y;
                got.words[2][plane] = v.z, got.words[3][plane] = v.w;
            } else {
                const uint2 v = shared_8(slot + at.words + plane * VECTOR_BYTES);
                got.words[0][plane] = v.x, got.words[1][plane] = v.y;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned from = slot + at.scales + 2 * (strip::HEIGHT * i + 8 * h);
            got.scales[i][h] = half_at(from);
            if (OFFSETS) got.offsets[i][h] = half_at(from + SCALE_BYTES);
        }
    return got;
}

// What a warp keeps of x: its B fragments, and a group's sums as bare codes lack them.
struct Kept {
    unsigned words[BLOCKS][TILES][8];
    float sums[GROUPS][TILES][4];
};

__device__ __forceinline__ void keep_x(Kept& kept, const __half* x, size_t pitch, int columns,
                                       int rows, int lane) {
    const int g = lane / 4, column = lane % 4 * 16;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int b = 0; b < TILES; ++b)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 8 * b + g, at = block * strip::BLOCK + column + 8 * half;
                uint4 v = make_uint4(0, 0, 0, 0);
                if (row < rows && at < columns)
                    v = *reinterpret_cast<const uint4*>(x + row * pitch + at);
                unsigned* const to = kept.words[block][b] + 4 * half;
                to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
            }
    const unsigned less[4] = {strip::LESS_LOWER<BITS>, strip::LESS_UPPER<BITS>,
                              strip::LESS_LOWER<BITS>, strip::LESS_UPPER<BITS>};
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
#pragma unroll
        for (int b = 0; b < TILES; ++b) {
#pragma unroll
            for (int c = 0; c < 4; ++c) kept.sums[i][b][c] = 0.0f;
#pragma unroll
            for (int j = 0; j < 4 * GROUP_BLOCKS; ++j) {
                const unsigned* const words = kept.words[i * GROUP_BLOCKS + j / 4][b] + j % 4 * 2;
                const unsigned of_x[2] = {words[0], words[1]};
                mma_half(kept.sums[i][b], less, of_x);
            }
        }
}

using Sums = float[TILES][4];

__device__ __forceinline__ void multiply_part(Sums& sums, const Part& of, const Kept& kept) {
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        Sums products;
#pragma unroll
        for (int b = 0; b < TILES; ++b)
#pragma unroll
            for (int c = 0; c < 4; ++c) products[b][c] = kept.sums[i][b][c];
#pragma unroll
        for (int inside = 0; inside < GROUP_BLOCKS; ++inside) {
            const int block = i * GROUP_BLOCKS + inside;
            unsigned pairs[strip::PAIRS];
            strip::bare_pairs(of.words[block], pairs);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int b = 0; b < TILES; ++b) {
                    const unsigned of_x[2] = {kept.words[block][b][2 * j],
                                              kept.words[block][b][2 * j + 1]};
                    const unsigned of_w[4] = {pairs[4 * j], pairs[4 * j + 1], pairs[4 * j + 2],
                                              pairs[4 * j + 3]};
                    mma_half(products[b], of_w, of_x);
                }
        }
#pragma unroll
        for (int b = 0; b < TILES; ++b)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float scale = __half2float(of.scales[i][c / 2]);
                sums[b][c] += products[b][c] * scale;
                if (OFFSETS)
                    sums[b][c] -= kept.sums[i][b][c] * (__half2float(of.offsets[i][c / 2]) /
                                                        strip::MIDDLE<BITS>);
            }
    }
}

// A strip's sums of this warp; `to`: the first of lane % 4 * 2 and lane / 4.
__device__ __forceinline__ void leave(const Sums& sums, float* to, int rows, int lane) {
#pragma unroll
    for (int b = 0; b < TILES; ++b)
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (8 * b + lane % 4 * 2 + c % 2 < rows)
                to[(8 * b + c % 2) * PITCH + c / 2 * 8] = sums[b][c];
}

__device__ __forceinline__ void copy_bulk(unsigned to, const void* from, int bytes,
                                          unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
strip_stream(const __half* x, const char* __restrict__ words, const char* __restrict__ scales,
             const char* __restrict__ offsets, const __half* __restrict__ bias,
             const __half* residual, __half* y, int rows, int out_features, int in_features,
             int strips, const float* in_squares, const float* in_lift, float* next_lift,
             int normed_width, float eps) {
    allow_next();
    extern __shared__ __align__(128) char room[];  // slots, then sums
    __shared__ unsigned long long filled[DEPTH], emptied[DEPTH];
    __shared__ unsigned long long summed[SETS][BUFFERS], taken[SETS][BUFFERS];
    __shared__ float scales_of_rows[NORMED ? ROWS : 1];
    const int lane = threadIdx.x % strip::LANES, of_all = threadIdx.x / strip::LANES;
    const int first_row = blockIdx.y * ROWS;
    rows = min(rows - first_row, ROWS);
    const auto share = [&](unsigned block) { return static_cast<int>(strips * block / gridDim.x); };
    const int begin = share(blockIdx.x), end = share(blockIdx.x + 1);
    const unsigned slots = shared_address(room);
    const unsigned full = shared_address(filled), empty = shared_address(emptied);

    if (of_all == SETS * WARPS) {
        const auto ask = [&](int strip, int d) {
            const unsigned slot = slots + d * SLOT_BYTES, barrier = full + 8 * d;
            const size_t at = strip;
            barrier_arrive_expecting(barrier, SLOT_BYTES);
            copy_bulk(slot, words + at * WORD_BYTES, WORD_BYTES, barrier);
            copy_bulk(slot + WORD_BYTES, scales + at * SCALE_BYTES, SCALE_BYTES, barrier);
            if (OFFSETS)
                copy_bulk(slot + WORD_BYTES + SCALE_BYTES, offsets + at * SCALE_BYTES, SCALE_BYTES,
                          barrier);
        };
        const int early = min(begin + WINDOW, end);
        if (lane == 0) {
            for (int d = 0; d < DEPTH; ++d) {
                barrier_init(full + 8 * d, 1);
                barrier_init(empty + 8 * d, WARPS * TELLERS);
            }
            for (int i = 0; i < SETS * BUFFERS; ++i) {
                barrier_init(shared_address(summed) + 8 * i, WARPS * TELLERS);
                barrier_init(shared_address(taken) + 8 * i, TELLERS);
            }
            barrier_init_done();
            for (int strip = begin; strip < early; ++strip) ask(strip, strip - begin);
        }
        __syncwarp();
        __syncthreads();
        if (NORMED) __syncthreads();
        if (lane == 0)
            for (int i = early - begin; begin + i < end; ++i) {
                const int come = i - WINDOW;
                barrier_wait(full + 8 * (come % DEPTH), come / DEPTH & 1);
                if (i >= DEPTH) barrier_wait(empty + 8 * (i % DEPTH), (i / DEPTH - 1) & 1);
                ask(begin + i, i % DEPTH);
            }
        return;
    }

    const int set = of_all / WARPS, warp = of_all % WARPS;
    __syncthreads();
    // Weights never come from the kernel before; x, residual and the room for y may.
    wait_for_previous();
    Kept kept;
    keep_x(kept, x + static_cast<size_t>(first_row) * in_features + warp * COLUMNS, in_features,
           in_features - warp * COLUMNS, rows, lane);
    if (NORMED) {
        const Normed normed = {in_squares, in_lift, next_lift, normed_width, eps};
        for (int m = of_all; m < rows; m += WARPS * SETS) {
            const float4 squares = normed.squares_of(first_row + m, 4 * lane);
            const float scale = normed.scale(first_row + m, squares, lane, blockIdx.x == 0);
            if (lane == 0) scales_of_rows[m] = scale;
        }
        __syncthreads();
    }

    const strip::Epilogue epilogue{bias, residual, y, GATED ? out_features / 2 : out_features};
    const unsigned full_sums = shared_address(summed[set]), empty_sums = shared_address(taken[set]);
    float* const parts = reinterpret_cast<float*>(room + DEPTH * SLOT_BYTES) +
                         set * (BUFFERS * WARPS * BUFFER);
    // Adds a strip's parts up, four neighbouring rows of it in a lane.
    const auto finish = [&](int strip, int buffer, unsigned parity) {
        barrier_wait(full_sums + 8 * buffer, parity);
        const int m = lane / 4, n = lane % 4 * 4;
        float4 sum = {};
        if (m < rows) {
            const float* at = parts + buffer * (WARPS * BUFFER) + m * PITCH + n;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float4 part = *reinterpret_cast<const float4*>(at + w * BUFFER);
                sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
            }
        }
        __syncwarp();
        if (lane < TELLERS) barrier_arrive(empty_sums + 8 * buffer);
        const float scale = (NORMED ? scales_of_rows[min(m, rows - 1)] : 1.0f) *
                            (n < 8 ? strip::LOWER_UNIT : strip::UPPER_UNIT<BITS>);
        const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = strip * strip::HEIGHT + n + i;
            const bool is_there = m < rows && row < out_features;
            float value = is_there ? epilogue.biased(row, sums[i] * scale) : 0.0f;
            if (GATED) {
                const float up = __shfl_xor_sync(~0u, value, 2);
                value = strip::silu(value) * up;
            }
            if (is_there && !(GATED && n >= 8))
                epilogue.store(first_row + m, GATED ? strip * 8 + n + i : row, value);
        }
    };

    // The warps take turns with it, each when it has left its part of the strip after.
    float* const own = parts + warp * BUFFER + lane % 4 * 2 * PITCH + lane / 4;
    int d = set, buffer = 0, turn = 0, last = -1;
    unsigned parity = 0, sums_parity = 0;
    const Place place(warp, lane);
    const auto finish_last = [&] {
        const bool is_first = buffer == 0;
        if (turn == warp)
            finish(last, is_first ? BUFFERS - 1 : buffer - 1, sums_parity ^ is_first);
        if (++turn == WARPS) turn = 0;
    };
    for (int strip = begin + set; strip < end; strip += SETS) {
        barrier_wait(full + 8 * d, parity);
        const Part part = read_part(slots + d * SLOT_BYTES, place);
        __syncwarp();
        if (lane < TELLERS) barrier_arrive(empty + 8 * d);
        d += SETS;
        if (d >= DEPTH) d -= DEPTH, parity ^= 1;
        Sums sums = {};
        multiply_part(sums, part, kept);
        barrier_wait(empty_sums + 8 * buffer, sums_parity ^ 1);
        leave(sums, own + buffer * (WARPS * BUFFER), rows, lane);
        __syncwarp();
        if (lane < TELLERS) barrier_arrive(full_sums + 8 * buffer);
        if (last >= 0) finish_last();
        last = strip;
        if (++buffer == BUFFERS) buffer = 0, sums_parity ^= 1;
    }
    if (last >= 0) finish_last();
}
