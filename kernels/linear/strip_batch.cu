// y = x W^T for 9 to 64 rows of x: weights pass once, x is shared by all strips of a block.
//
// A block owns ROW_WARPS * STRIPS strips and one share of K (gridDim.y shares). In every round each
// warp takes one step of K of its STRIPS strips; K_WARPS groups of warps take neighbouring steps.
// x for a round lies in shared memory, copied once for the block; weights lie in rings, each lane's
// own (strip_step.cuh). Both are fetched STAGES - 1 rounds ahead by cp.async, with one barrier a
// round. A warp multiplies what it reads of x with all its strips, because reading x is what limits
// this regime: from M = 32 on it is 16 times the traffic of the weights themselves.
//
// The layout's order of columns puts a lane's B operands of four mma steps into 32 consecutive
// bytes, so plain 16-byte loads do what ldmatrix does; chunks of a row are swizzled by the row, which
// keeps them free of bank conflicts.
//
// Where K is shared between blocks, each leaves its sums in `partials` and the last to arrive at a
// tile adds them in the order of the shares, so the same bits come out every time. `arrivals` is
// zero again afterwards.
//
// Reads once: weights, scales, offsets. Reads through L2: x, once a block. Loses from 65 rows on,
// where weights should be unpacked for more rows at once (strip_gemm.cu).
//
// Defines: BITS 3 or 4. ROWS 16, 32, 48 or 64, rows of x there is room for. ROW_WARPS, STRIPS,
// K_WARPS, STAGES. GROUP 32, 64 or 128 columns a scale; 0 where a group is whole steps. OFFSETS 0
// or 1. GATED 1: rows 0 .. 7 of each strip are gates of its rows 8 .. 15, y = silu(gate) * up is
// half as wide. RESIDENT blocks are to fit a multiprocessor.
#include "strip_step.cuh"
#include "tensor_core.cuh"

namespace {

using strip::Packed;
using strip::SPAN_ROWS;
using strip::STEP_BYTES;
constexpr int TILES = ROWS / 8;  // n sides of mma
constexpr int WARPS = ROW_WARPS * K_WARPS;
constexpr int THREADS = WARPS * strip::LANES;
constexpr int TILE_ROWS = ROW_WARPS * SPAN_ROWS;  // out-features of a block
constexpr int SUM_PITCH = TILE_ROWS + 4;
constexpr int ROW_BYTES = strip::BLOCK * 2;       // of a row of x in a block of columns
constexpr int CHUNKS = ROW_BYTES / 16;
constexpr int X_STEP_BYTES = Packed::STEP_BLOCKS * ROWS * ROW_BYTES;
constexpr int X_BYTES = K_WARPS * X_STEP_BYTES;
constexpr int RING_AT = STAGES * X_BYTES;

struct Activations {
    const __half* x;
    int rows, in_features;
};

// Steps first .. last - 1 of K.
struct Share {
    int first, last;
};

// x for the steps of a round; rows and columns that x lacks are zero.
__device__ __forceinline__ void fetch_x(const Activations& from, int step, unsigned to) {
    constexpr int count = X_BYTES / 16;
#pragma unroll
    for (int first = 0; first < count; first += THREADS) {
        const int i = first + threadIdx.x;
        if (count % THREADS && i >= count) break;
        const int chunk = i % CHUNKS, row = i / CHUNKS % ROWS, block = i / (CHUNKS * ROWS);
        const int column = step * Packed::STEP + block * strip::BLOCK + chunk * 8;
        const bool is_there = row < from.rows && column < from.in_features;
        const size_t at = is_there ? static_cast<size_t>(row) * from.in_features + column : 0;
        copy_16_or_zero(to + (block * ROWS + row) * ROW_BYTES + ((chunk ^ row % 8) * 16),
                        from.x + at, is_there);
    }
}

using Sums = float[STRIPS][TILES][4];

// The pairs of a block that mma steps 2 half and 2 half + 1 take. W4 has a word for each step; W3's
// words hold codes of all four, so it is unpacked whole, the first time.
__device__ __forceinline__ void unpack_half(const uint4 (&vectors)[Packed::VECTORS], int block,
                                            int half, const strip::RowScales& rows,
                                            unsigned (&pairs)[strip::PAIRS]) {
    unsigned words[Packed::WORDS];
    strip::words_of<BITS>(vectors, block, words);
    if constexpr (BITS == 4) {
        strip::biased_word(words[2 * half], 2 * half, pairs);
        strip::biased_word(words[2 * half + 1], 2 * half + 1, pairs);
        if (half == 0) strip::weigh<BITS, OFFSETS != 0, 0, 8>(pairs, rows);
        else strip::weigh<BITS, OFFSETS != 0, 8, 16>(pairs, rows);
    } else if (half == 0) {
        strip::biased_pairs(words, pairs);
        strip::weigh<BITS, OFFSETS != 0, 0, 16>(pairs, rows);
    }
}

// One step: sums += W x.
__device__ __forceinline__ void multiply_step(Sums& sums, unsigned slot, unsigned x, int lane) {
    const int g = lane / 4, t = lane % 4;
    constexpr int blocks_of_group = GROUP == 0 ? Packed::STEP_BLOCKS : GROUP == 128 ? 2 : 1;
    uint4 vectors[STRIPS][Packed::VECTORS];
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) strip::read_vectors(slot, s, lane, vectors[s]);
    strip::RowScales rows[STRIPS];
#pragma unroll
    for (int block = 0; block < Packed::STEP_BLOCKS; ++block) {
        if (block % blocks_of_group == 0)
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
                rows[s] = strip::read_row_scales(slot, s, strip::group_of(block, t), g);
        unsigned pairs[STRIPS][strip::PAIRS];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
                unpack_half(vectors[s], block, half, rows[s], pairs[s]);
            const unsigned chunk = x + (block * ROWS + g) * ROW_BYTES + ((2 * t + half) ^ g) * 16;
#pragma unroll
            for (int b = 0; b < TILES; ++b) {
                const uint4 v = shared_16(chunk + 8 * b * ROW_BYTES);
                const unsigned of_x[2][2] = {{v.x, v.y}, {v.z, v.w}};
#pragma unroll
                for (int j = 0; j < 2; ++j)
#pragma unroll
                    for (int s = 0; s < STRIPS; ++s) {
                        const unsigned* a = pairs[s] + 4 * (2 * half + j);
                        const unsigned of_w[4] = {a[0], a[1], a[2], a[3]};
                        mma_half(sums[s][b], of_w, of_x[j]);
                    }
            }
        }
    }
}

__device__ __forceinline__ void leave(const Sums& sums, float* to, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int b = 0; b < TILES; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int m = 8 * b + 2 * t + i % 2, n = strip::HEIGHT * s + g + 8 * (i / 2);
                to[m * SUM_PITCH + n] = sums[s][b][i];
            }
}

// True in the block that is the last to arrive at its tile; what the others wrote is then seen.
__device__ __forceinline__ bool is_last(int* arrivals) {
    __shared__ int before;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        before = atomicAdd(arrivals, 1);
        if (before == static_cast<int>(gridDim.y) - 1) *arrivals = 0;
    }
    __syncthreads();
    __threadfence();
    return before == static_cast<int>(gridDim.y) - 1;
}

// Bias, residual, gate: total(m, n) is the finished sum of row n of the tile.
template <class Total>
__device__ __forceinline__ void store_tile(const strip::Epilogue& epilogue, int rows,
                                           int out_features, const Total& total) {
    constexpr int OUT = GATED ? TILE_ROWS / 2 : TILE_ROWS;
    for (int i = threadIdx.x; i < rows * OUT; i += THREADS) {
        const int m = i / OUT, out = i % OUT;
        const int n = GATED ? out / 8 * strip::HEIGHT + out % 8 : out;
        const int row = blockIdx.x * TILE_ROWS + n;
        if (row >= out_features) continue;
        float value = epilogue.biased(row, total(m, n));
        if (GATED) value = strip::silu(value) * epilogue.biased(row + 8, total(m, n + 8));
        epilogue.store(m, blockIdx.x * OUT + out, value);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
strip_batch(const __half* x, const uint4* __restrict__ words, const __half* __restrict__ scales,
            const __half* __restrict__ offsets, const __half* __restrict__ bias,
            const __half* residual, __half* y, float* partials, int* arrivals, int rows,
            int out_features, int in_features, int steps, int groups, int steps_per_group) {
    allow_next();
    extern __shared__ __align__(16) unsigned char shared[];
    const int lane = threadIdx.x % strip::LANES, warp = threadIdx.x / strip::LANES;
    const int row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS;
    const int strips = (out_features + strip::HEIGHT - 1) / strip::HEIGHT;
    const strip::Weights weights{words, scales, offsets, strips, steps, groups, steps_per_group};
    const int span = blockIdx.x * ROW_WARPS + row_warp;
    const Share share{static_cast<int>(steps * blockIdx.y / gridDim.y),
                      static_cast<int>(steps * (blockIdx.y + 1) / gridDim.y)};
    const int rounds = (share.last - share.first + K_WARPS - 1) / K_WARPS;
    const Activations activations{x, rows, in_features};

    const unsigned x_ring = shared_address(shared);
    const unsigned ring = x_ring + RING_AT + warp * STAGES * STEP_BYTES;
    strip::Stream stream;
    stream.seek(weights, span, share.first + k_warp, lane);
    const auto fetch_weights = [&](int round, int slot) {
        const int step = share.first + round * K_WARPS + k_warp;
        if (step < share.last) stream.fetch(weights, step, ring + slot * STEP_BYTES, lane);
        stream.skip(K_WARPS);
    };
    const auto fetch_activations = [&](int round, int slot) {
        if (round < rounds)
            fetch_x(activations, share.first + round * K_WARPS, x_ring + slot * X_BYTES);
    };
    // Weights never come from the kernel before; x, residual and the room for y may.
#pragma unroll
    for (int round = 0; round < STAGES - 1; ++round) fetch_weights(round, round);
    wait_for_previous();
    // The first group holds all of those weights: they were asked for first and arrive first.
#pragma unroll
    for (int round = 0; round < STAGES - 1; ++round) {
        fetch_activations(round, round);
        close_group();
    }

    Sums sums = {};
    int read_slot = 0, write_slot = STAGES - 1;
    for (int round = 0; round < rounds; ++round) {
        wait_for_groups<STAGES - 2>();
        __syncthreads();  // all copies of this round are here, and all warps have left the last one
        fetch_weights(round + STAGES - 1, write_slot);
        fetch_activations(round + STAGES - 1, write_slot);
        close_group();
        if (share.first + round * K_WARPS + k_warp < share.last)
            multiply_step(sums, ring + read_slot * STEP_BYTES,
                          x_ring + read_slot * X_BYTES + k_warp * X_STEP_BYTES, lane);
        read_slot = read_slot + 1 == STAGES ? 0 : read_slot + 1;
        write_slot = write_slot + 1 == STAGES ? 0 : write_slot + 1;
    }
    wait_for_groups<0>();
    __syncthreads();  // the rings are free: their place is the sums' now, one plane a group of warps
    float* const planes = reinterpret_cast<float*>(shared);
    leave(sums, planes + k_warp * ROWS * SUM_PITCH + row_warp * SPAN_ROWS, lane);
    __syncthreads();
    const auto block_total = [&](int m, int n) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < K_WARPS; ++k) sum += planes[(k * ROWS + m) * SUM_PITCH + n];
        return sum;
    };

    const strip::Epilogue epilogue{bias, residual, y, GATED ? out_features / 2 : out_features};
    if (gridDim.y == 1) {
        store_tile(epilogue, rows, out_features, block_total);
        return;
    }
    float* const of_tile = partials + static_cast<size_t>(blockIdx.x) * gridDim.y * ROWS * TILE_ROWS;
    float* const mine = of_tile + blockIdx.y * ROWS * TILE_ROWS;
    for (int i = threadIdx.x; i < rows * TILE_ROWS; i += THREADS)
        mine[i] = block_total(i / TILE_ROWS, i % TILE_ROWS);
    if (!is_last(arrivals + blockIdx.x)) return;
    store_tile(epilogue, rows, out_features, [&](int m, int n) {
        float sum = 0.0f;
        for (int k = 0; k < static_cast<int>(gridDim.y); ++k)
            sum += __ldcg(of_tile + (k * ROWS + m) * TILE_ROWS + n);
        return sum;
    });
}
