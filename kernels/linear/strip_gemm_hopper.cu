// y[M, N] = x[M, K] @ W.T for many rows of x, W in strips of 3 or 4 bits: Hopper's tensor cores.
//
// The weights are the A operand of wgmma, in registers; rows of x are its n side, in shared memory.
// One warp of a block only loads tiles of x (tensor memory accelerator, STAGES steps of 64 columns
// ahead). Each of CONSUMERS warpgroups computes 64 out-features of TILE_M rows: it reads its packed
// weights straight into registers a chunk of 256 columns ahead, and turns the next step's into fp16
// while the tensor cores work on this one's. Units of work and the end of a tile are as in
// strip_gemm.cu; the grid is persistent there and here.
//
// Defines: BITS 3 or 4; GROUP columns of a scale (0: the whole row); OFFSETS 0 or 1; SILU 0 or 1;
// CONSUMERS; ROW_TILES eights of rows of x; STAGES; BLOCKS that fit one multiprocessor;
// LOADER_REGISTERS and CONSUMER_REGISTERS of a thread.
constexpr int CHUNK_STEPS = 4;
constexpr int TILE_STRIPS = 4 * CONSUMERS;
constexpr int TILE_M = 8 * ROW_TILES;
constexpr int STRIPS = 1;  // of a warp
constexpr int SUMMING_THREADS = 128 * CONSUMERS;
#include "async_copy.cuh"
#include "gemm_epilogue.cuh"
#include "hopper.cuh"
#include "strip_transpose.cuh"

constexpr int THREADS = SUMMING_THREADS + 128;
constexpr int STAGE_BYTES = TILE_M * 128;
constexpr int STEP_GROUPS = GROUP == 32 ? 2 : 1;
static_assert(GROUP == 0 || GROUP == 32 || GROUP % 64 == 0);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Which stage comes next, and in which of its phases.
struct Turn {
    int stage = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// ---- the warpgroup that loads ----

__device__ __forceinline__ void load_all(const Problem& p, const TensorMap* x, unsigned shared,
                                         unsigned full, unsigned empty) {
    Turn turn;
    for (int index = blockIdx.x; index < units_of(p); index += gridDim.x) {
        const Unit u = unit_at(p, index);
        for (int step = 0; step < u.steps; ++step) {
            barrier_wait(empty + turn.stage * 8, turn.parity ^ 1);  // at once in the first round
            barrier_arrive_expecting(full + turn.stage * 8, STAGE_BYTES);
            load_box(shared + turn.stage * STAGE_BYTES, x, (u.first_step + step) * 64, u.row,
                     full + turn.stage * 8);
            turn.advance();
        }
    }
}

// ---- the warpgroups that compute ----

// A lane's packed weights of 256 columns, with the scales of its two rows side by side in a word.
struct Chunk {
    unsigned words[CHUNK_STEPS][BITS];
    unsigned scales[CHUNK_STEPS][STEP_GROUPS][1 + OFFSETS];
};

__device__ __forceinline__ unsigned load_rows(const __half* from) {
    const unsigned short low = __ldg(reinterpret_cast<const unsigned short*>(from));
    const unsigned short high = __ldg(reinterpret_cast<const unsigned short*>(from) + 8);
    return low | (unsigned)high << 16;
}

__device__ __forceinline__ void load_chunk(const Problem& p, int strip, int first_step, Chunk& c) {
    const int lane = threadIdx.x & 31;
    if constexpr (BITS == 4) {
        const uint4* from =
            reinterpret_cast<const uint4*>(p.weights) + (size_t)strip * p.blocks * 32;
#pragma unroll
        for (int s = 0; s < CHUNK_STEPS; ++s) {
            // Where K ends inside the chunk, x is zero and any block will do.
            const uint4 v = __ldg(from + min(first_step + s, p.blocks - 1) * 32 + lane);
            c.words[s][0] = v.x, c.words[s][1] = v.y, c.words[s][2] = v.z, c.words[s][3] = v.w;
        }
    } else {
        const int chunks = p.blocks / CHUNK_STEPS;
        const uint4* from = reinterpret_cast<const uint4*>(p.weights) +
                            ((size_t)strip * chunks + first_step / CHUNK_STEPS) * 96 + lane;
#pragma unroll
        for (int plane = 0; plane < 3; ++plane) {
            const uint4 v = __ldg(from + plane * 32);
            c.words[0][plane] = v.x, c.words[1][plane] = v.y;
            c.words[2][plane] = v.z, c.words[3][plane] = v.w;
        }
    }
#pragma unroll
    for (int s = 0; s < CHUNK_STEPS; ++s)
#pragma unroll
        for (int g = 0; g < STEP_GROUPS; ++g) {
            const int column = (first_step + s) * 64 + g * 32;
            const int group = GROUP == 0 ? 0 : min(column / max(GROUP, 1), p.groups - 1);
            const size_t at = ((size_t)strip * p.groups + group) * 16 + (lane >> 2);
            c.scales[s][g][0] = load_rows(p.scales + at);
#if OFFSETS
            c.scales[s][g][1] = load_rows(p.offsets + at);
#endif
        }
}

__device__ __forceinline__ gemm::Scales scales_of(const unsigned (&rows)[1 + OFFSETS]) {
    gemm::Scales s;
    s.scale[0] = __low2half2(gemm::as_half2(rows[0]));
    s.scale[1] = __high2half2(gemm::as_half2(rows[0]));
#if OFFSETS
    s.offset[0] = __low2half2(gemm::as_half2(rows[1]));
    s.offset[1] = __high2half2(gemm::as_half2(rows[1]));
#endif
    return s;
}

__device__ __forceinline__ void compute_all(const Problem& p, unsigned shared, unsigned full,
                                            unsigned empty) {
    const int thread = threadIdx.x - 128, warp = thread >> 5;
    const bool speaks = (threadIdx.x & 31) == 0;
    Turn turn;
    Chunk now, next;
    int index = blockIdx.x;
    if (index >= units_of(p)) return;
    Unit u = unit_at(p, index);
    load_chunk(p, strip_of(p, u, warp), u.first_step, now);
    while (true) {
        const int following = index + gridDim.x;
        const bool is_end = following >= units_of(p);
        const Unit after = is_end ? u : unit_at(p, following);
        Sums sums = {};
        unsigned a[2][4][4];
        int before = 0;  // the stage that the products before these read
#pragma unroll 1
        for (int step = 0; step < u.steps; step += CHUNK_STEPS) {
            const bool goes_on = step + CHUNK_STEPS < u.steps;
            load_chunk(p, strip_of(p, goes_on ? u : after, warp),
                       goes_on ? u.first_step + step + CHUNK_STEPS : after.first_step, next);
#pragma unroll
            for (int s = 0; s < CHUNK_STEPS; ++s) {
                gemm::natural_fragments<BITS, OFFSETS != 0>(
                    now.words[s], scales_of(now.scales[s][0]),
                    scales_of(now.scales[s][STEP_GROUPS - 1]), a[s & 1]);
                barrier_wait(full + turn.stage * 8, turn.parity);
                products_begin();
                const unsigned long long b = tile_descriptor(shared + turn.stage * STAGE_BYTES);
#pragma unroll
                for (int f = 0; f < 4; ++f) product(sums[0], a[s & 1][f], b + 2 * f);
                products_commit();
                products_wait<1>();
                if (speaks && step + s > 0) barrier_arrive(empty + before * 8);
                before = turn.stage;
                turn.advance();
            }
            now = next;
        }
        products_wait<0>();
        if (speaks) barrier_arrive(empty + before * 8);
        if (p.splits == 1 || gather(p, u, sums, thread))
            store_tile(p, u.strip + warp, u.row, sums);
        if (is_end) return;
        u = after;
        index = following;
    }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) strip_gemm_hopper(
    const __grid_constant__ TensorMap x, const char* weights, const __half* scales,
    const __half* offsets, const __half* bias, const __half* residual, __half* y, float* partials,
    int* arrivals, int m, int n, int k, int blocks, int groups, int splits, int band) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char shared_memory[];
    __shared__ __align__(8) unsigned long long barriers[2 * STAGES];
    const Problem p = {nullptr, weights, scales, offsets, bias, residual, y, partials, arrivals,
                       m, n, k, blocks, groups, splits, band};
    const unsigned shared = (shared_address(shared_memory) + 1023) & ~1023u;  // swizzle's period
    const unsigned full = shared_address(barriers), empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + stage * 8, 1);
            barrier_init(empty + stage * 8, 4 * CONSUMERS);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
        if (threadIdx.x == 0) load_all(p, &x, shared, full, empty);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        compute_all(p, shared, full, empty);
    }
#endif
}
