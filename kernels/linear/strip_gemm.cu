// y[M, N] = x[M, K] @ W.T for many rows of x, W in strips of 3 or 4 bits: Ampere's tensor cores.
//
// The weights are the A operand of mma.m16n8k16 (a strip is its 16 rows), rows of x the n side. A
// block computes TILE_N out-features of TILE_M rows, 64 columns a step. Tiles of x, packed weights
// and scales wait in shared memory, STAGES steps ahead (cp.async); weights become fp16 in registers
// only. The grid is persistent: a block walks units of work blockIdx.x, + gridDim.x, ... and the
// copies of its next unit are on their way while it finishes this one. How many blocks run decides
// how many multiprocessors are left to others; it changes no bit of the result, because a unit is
// computed the same way whoever does it.
//
// Defines: BITS 3 or 4; GROUP columns of a scale (0: the whole row); OFFSETS 0 or 1; WARPS_N,
// WARPS_M warps side by side along either axis; STRIPS of a warp; ROW_TILES of eight rows of x of a
// warp; STAGES; SILU 1: rows 0..7 of a strip are the gates of its rows 8..15; BLOCKS that fit one
// multiprocessor.
constexpr int SUMMING_THREADS = 32 * WARPS_N * WARPS_M;  // all of a block's threads
constexpr int TILE_STRIPS = WARPS_N * STRIPS;
constexpr int TILE_M = WARPS_M * ROW_TILES * 8;
// W3 is stored in chunks of four steps, loaded whole; W4 in chunks of one.
constexpr int CHUNK_STEPS = BITS == 3 ? 4 : 1;
#include "async_copy.cuh"
#include "gemm_epilogue.cuh"
#include "strip_dequantise.cuh"

constexpr int THREADS = SUMMING_THREADS;
constexpr int CHUNK_BYTES = BITS == 3 ? 1536 : 512;
constexpr int CHUNK_SLOTS = BITS == 3 ? 2 : STAGES;
constexpr int STEP_GROUPS = GROUP == 32 ? 2 : 1;
constexpr int SCALE_BYTES = 32 * STEP_GROUPS * (1 + OFFSETS);  // of one strip and step
constexpr int X_BYTES = TILE_M * 128;
constexpr int X_AT = 0;
constexpr int WEIGHTS_AT = X_AT + STAGES * X_BYTES;
constexpr int SCALES_AT = WEIGHTS_AT + CHUNK_SLOTS * TILE_STRIPS * CHUNK_BYTES;
static_assert(GROUP == 0 || GROUP == 32 || GROUP % 64 == 0);
static_assert(BITS == 4 || STAGES <= 5, "two slots of W3 chunks reach four steps ahead");

// ---- copies into shared memory ----

__device__ __forceinline__ void load_x(const Problem& p, const Unit& u, int step, unsigned to) {
    const int column = (u.first_step + step) * 64 + (threadIdx.x & 7) * 8;
#pragma unroll
    for (int i = 0; i < TILE_M * 8; i += THREADS) {
        const int local = (i + threadIdx.x) >> 3;
        const bool valid = u.row + local < p.m && column < p.k;
        const __half* from = valid ? p.x + (size_t)(u.row + local) * p.k + column : p.x;
        // 16-byte pieces of a row lie exclusive-ored by the row: no bank is asked twice at a time.
        const int piece = (threadIdx.x ^ local) & 7;
        if (TILE_M * 8 % THREADS == 0 || i + threadIdx.x < TILE_M * 8)
            copy_16_or_zero(to + local * 128 + piece * 16, from, valid);
    }
}

__device__ __forceinline__ void load_weights(const Problem& p, const Unit& u, int chunk,
                                             unsigned to) {
    const int chunks = p.blocks / CHUNK_STEPS;
    constexpr int PIECES = TILE_STRIPS * CHUNK_BYTES / 16;
#pragma unroll
    for (int i = 0; i < PIECES; i += THREADS) {
        const int piece = i + threadIdx.x;
        const int local = piece / (CHUNK_BYTES / 16), inside = piece % (CHUNK_BYTES / 16);
        const int place = u.first_step / CHUNK_STEPS + chunk;
        const size_t at = (size_t)strip_of(p, u, local) * chunks + place;
        if (PIECES % THREADS == 0 || piece < PIECES)
            copy_16(to + piece * 16, p.weights + at * CHUNK_BYTES + inside * 16);
    }
}

__device__ __forceinline__ void load_scales(const Problem& p, const Unit& u, int step,
                                            unsigned to) {
    constexpr int PIECES = TILE_STRIPS * STEP_GROUPS * 2;
    const int column = (u.first_step + step) * 64;
#pragma unroll
    for (int i = 0; i < PIECES; i += THREADS) {
        const int piece = i + threadIdx.x;
        if (piece >= PIECES) break;
        const int local = piece / (STEP_GROUPS * 2), inside = piece % (STEP_GROUPS * 2);
        const int group = GROUP == 0 ? 0 : column / max(GROUP, 1) + inside / 2;
        const size_t at = ((size_t)strip_of(p, u, local) * p.groups + group) * 16;
        const unsigned place = to + local * SCALE_BYTES + inside * 16;
        copy_16(place, p.scales + at + (inside & 1) * 8);
        if (OFFSETS) copy_16(place + 32 * STEP_GROUPS, p.offsets + at + (inside & 1) * 8);
    }
}

// Walks the steps of all units of this block, ahead of the products.
struct Loader {
    Unit unit;
    int index, step, stage, slot;

    __device__ void start(const Problem& p) {
        index = blockIdx.x;
        step = stage = slot = 0;
        if (index < units_of(p)) unit = unit_at(p, index);
    }

    __device__ void load_next(const Problem& p, unsigned shared) {
        if (index < units_of(p)) {
            load_x(p, unit, step, shared + X_AT + stage * X_BYTES);
            if (step % CHUNK_STEPS == 0) {
                load_weights(p, unit, step / CHUNK_STEPS,
                             shared + WEIGHTS_AT + slot * TILE_STRIPS * CHUNK_BYTES);
                slot = slot + 1 == CHUNK_SLOTS ? 0 : slot + 1;
            }
            load_scales(p, unit, step, shared + SCALES_AT + stage * TILE_STRIPS * SCALE_BYTES);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            if (++step == unit.steps) {
                step = 0;
                index += gridDim.x;
                if (index < units_of(p)) unit = unit_at(p, index);
            }
        }
        close_group();  // an empty one keeps the count of those on their way
    }
};

// ---- one step: 64 columns ----

// Of a lane's two rows.
__device__ __forceinline__ void read_rows(unsigned at, __half2 (&rows)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned value = shared_2(at + 16 * half);
        rows[half] = gemm::as_half2(value | value << 16);
    }
}

// The A operands of four products. Product j takes columns 16 * (lane % 4) + 4 * j + 0..3 of the
// step, not those that the instruction's description names: x is read in the same order, so the sum
// is the same.
__device__ __forceinline__ void dequantise(unsigned weights, unsigned scales, int step,
                                           unsigned (&a)[4][4]) {
    const int lane = threadIdx.x & 31;
    gemm::Scales own_scales;
    const unsigned own = scales + (GROUP == 32 ? (lane & 3) / 2 * 32 : 0) + (lane >> 2) * 2;
    read_rows(own, own_scales.scale);
    if constexpr (OFFSETS) read_rows(own + 32 * STEP_GROUPS, own_scales.offset);
    unsigned words[BITS];
    if constexpr (BITS == 4) {
        const uint4 v = shared_16(weights + lane * 16);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
#pragma unroll
        for (int plane = 0; plane < 3; ++plane)
            words[plane] = shared_4(weights + plane * 512 + lane * 16 + step % 4 * 4);
    }
    gemm::fragments_of<OFFSETS != 0>(words, own_scales, a);
}

__device__ __forceinline__ void multiply(unsigned x, unsigned weights, unsigned scales, int step,
                                         Sums& sums) {
    const int lane = threadIdx.x & 31, row = lane >> 2;
    unsigned a[STRIPS][4][4];
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
        dequantise(weights + s * CHUNK_BYTES, scales + s * SCALE_BYTES, step, a[s]);
    const unsigned low = x + row * 128 + ((2 * (lane & 3)) ^ row) * 16;
    const unsigned high = x + row * 128 + ((2 * (lane & 3) + 1) ^ row) * 16;
    // Two tiles of rows at once, so that products that wait for each other are further apart; W3
    // has no registers for that.
    constexpr int AT_ONCE = BITS == 3 ? 1 : 2;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r += AT_ONCE) {
        uint4 v[AT_ONCE][2];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            v[i][0] = shared_16(low + (r + i) * 1024);
            v[i][1] = shared_16(high + (r + i) * 1024);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const uint4 q = v[i][j / 2];
                const unsigned b[2] = {j & 1 ? q.z : q.x, j & 1 ? q.w : q.y};
#pragma unroll
                for (int s = 0; s < STRIPS; ++s) mma_half(sums[s][r + i], a[s][j], b);
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) strip_gemm(
    const __half* x, const char* weights, const __half* scales, const __half* offsets,
    const __half* bias, const __half* residual, __half* y, float* partials, int* arrivals, int m,
    int n, int k, int blocks, int groups, int whole, int splits, int band) {
    extern __shared__ __align__(128) char shared_memory[];
    const Problem p = {x, weights, scales, offsets, bias, residual, y, partials, arrivals,
                       m, n, k, blocks, groups, whole, splits, band};
    const unsigned shared = shared_address(shared_memory);
    const int warp = threadIdx.x >> 5, warp_n = warp / WARPS_M, warp_m = warp % WARPS_M;
    const unsigned x_at = shared + X_AT + warp_m * ROW_TILES * 1024;
    const unsigned weights_at = shared + WEIGHTS_AT + warp_n * STRIPS * CHUNK_BYTES;
    const unsigned scales_at = shared + SCALES_AT + warp_n * STRIPS * SCALE_BYTES;
    Loader loader;
    loader.start(p);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) loader.load_next(p, shared);
    int stage = 0, slot = 0;
    for (int index = blockIdx.x; index < units_of(p); index += gridDim.x) {
        const int steps = unit_at(p, index).steps;
        Sums sums = {};
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            wait_for_groups<STAGES - 2>();
            __syncthreads();  // this step's copies are there, and nobody reads the oldest ones
            loader.load_next(p, shared);
            multiply(x_at + stage * X_BYTES, weights_at + slot * TILE_STRIPS * CHUNK_BYTES,
                     scales_at + stage * TILE_STRIPS * SCALE_BYTES, step, sums);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            if ((step + 1) % CHUNK_STEPS == 0) slot = slot + 1 == CHUNK_SLOTS ? 0 : slot + 1;
        }
        int same = index;  // hidden from the compiler: worked out twice, not kept in registers
        asm volatile("" : "+r"(same));
        const Unit u = unit_at(p, same);
        if (u.shared < 0 || gather(p, u, sums, threadIdx.x))
            store_tile(p, u.strip + warp_n * STRIPS, u.row + warp_m * ROW_TILES * 8, sums);
    }
}
