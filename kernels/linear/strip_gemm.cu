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

// Walks the steps of all units of this block, ahead of the products. A thread's pieces of a step
// lie at fixed distances from its first one, in memory and here, so that a copy takes few
// instructions: they hold up the products of the same warp.
struct Loader {
    static constexpr int ROWS_AT_ONCE = THREADS / 8;  // of x, eight pieces of 16 bytes each
    static constexpr int PIECES = CHUNK_BYTES / 16;   // of a strip's chunk
    static constexpr int SCALE_PIECES = 2 * STEP_GROUPS;
    static_assert(ROWS_AT_ONCE % 8 == 0 && TILE_STRIPS * SCALE_PIECES <= THREADS);

    const __half* x;      // this thread's first piece of the next step
    const char* weights;  // the first strip's next chunk
    int scales;           // this thread's first value of the strip whose scales it copies
    int rows;             // of x from its first one on that are there
    int last;             // the last strip that is there, from the first one on
    int index, step, steps, first_step, stage, slot;

    __device__ __forceinline__ void start(const Problem& p) {
        index = blockIdx.x;
        stage = slot = 0;
        if (index < units_of(p)) enter(p);
    }

    __device__ __forceinline__ void enter(const Problem& p) {
        const Unit u = unit_at(p, index);
        step = 0, steps = u.steps, first_step = u.first_step;
        const int row = u.row + (threadIdx.x >> 3);
        rows = p.m - row;
        x = p.x + (size_t)row * p.k + first_step * 64 + (threadIdx.x & 7) * 8;
        last = strips_of(p) - 1 - u.strip;
        weights =
            p.weights + ((size_t)u.strip * p.blocks + first_step) * (CHUNK_BYTES / CHUNK_STEPS);
        const int strip = strip_of(p, u, threadIdx.x / SCALE_PIECES);
        scales = strip * p.groups * 16 + threadIdx.x % SCALE_PIECES * 8;
    }

    __device__ __forceinline__ void load_x(const Problem& p, unsigned to) const {
        const int column = (first_step + step) * 64 + (threadIdx.x & 7) * 8;
        const int there = column < p.k ? rows : 0;
        // 16-byte pieces of a row lie exclusive-ored by the row: no bank is asked twice at a time.
        to += threadIdx.x / 8 * 128 + ((threadIdx.x ^ threadIdx.x >> 3) & 7) * 16;
        const __half* from = x;
#pragma unroll
        for (int row = 0; row < TILE_M; row += ROWS_AT_ONCE) {
            copy_16_or_zero(to + row * 128, from, row < there);
            from += (size_t)ROWS_AT_ONCE * p.k;
        }
    }

    __device__ __forceinline__ void load_weights(const Problem& p, unsigned to) const {
        constexpr int ALL = TILE_STRIPS * PIECES;
        const int pitch = p.blocks * (CHUNK_BYTES / CHUNK_STEPS);
#pragma unroll
        for (int i = 0; i < ALL; i += THREADS) {
            const int piece = i + threadIdx.x;
            const char* from = weights + (long long)min(piece / PIECES, last) * pitch;
            if (ALL % THREADS == 0 || piece < ALL)
                copy_16(to + piece * 16, from + piece % PIECES * 16);
        }
    }

    __device__ __forceinline__ void load_scales(const Problem& p, unsigned to) const {
        if (threadIdx.x >= TILE_STRIPS * SCALE_PIECES) return;
        const int group = GROUP == 0 ? 0 : (first_step + step) * 64 / max(GROUP, 1);
        to += threadIdx.x / SCALE_PIECES * SCALE_BYTES + threadIdx.x % SCALE_PIECES * 16;
        copy_16(to, p.scales + scales + group * 16);
        if (OFFSETS) copy_16(to + 32 * STEP_GROUPS, p.offsets + scales + group * 16);
    }

    __device__ __forceinline__ void load_next(const Problem& p, unsigned shared) {
        if (index < units_of(p)) {
            load_x(p, shared + X_AT + stage * X_BYTES);
            x += 64;
            if (step % CHUNK_STEPS == 0) {
                load_weights(p, shared + WEIGHTS_AT + slot * TILE_STRIPS * CHUNK_BYTES);
                weights += CHUNK_BYTES;
                slot = slot + 1 == CHUNK_SLOTS ? 0 : slot + 1;
            }
            load_scales(p, shared + SCALES_AT + stage * TILE_STRIPS * SCALE_BYTES);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            if (++step == steps) {
                index += gridDim.x;
                if (index < units_of(p)) enter(p);
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
