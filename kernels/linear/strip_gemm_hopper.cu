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
#include "gemm_store.cuh"
#include "hopper.cuh"
#include "strip_transpose.cuh"

constexpr int THREADS = SUMMING_THREADS + 128;
constexpr int STAGE_BYTES = TILE_M * 128;
constexpr int BLOCK_VECTORS = BITS == 4 ? 32 : 24;  // of 16 bytes, in 64 columns of a strip
constexpr int HALF_SCALES = GROUP == 32 ? 4 : GROUP == 64 ? 2 : 1;  // groups in 128 columns
static_assert(GROUP == 0 || GROUP == 32 || GROUP == 64 || GROUP % 128 == 0);
// Few rows: a product's operand is unpacked right before it, while the one before is multiplied.
// With more rows all four of a step at once are faster.
constexpr bool ONE_BY_ONE = ROW_TILES == 4;

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
    wait_for_previous();
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

// A lane's packed weights of a chunk, 256 columns, and the scales of its two rows, two to a word.
// They are read half a chunk at a time, spread over the steps so that the tensor cores never wait.
struct Chunk {
    unsigned words[CHUNK_STEPS][BITS];
    unsigned scales[2][HALF_SCALES][1 + OFFSETS];
};

// Where the next chunk's weights lie.
struct Source {
    const uint4* words;     // of this lane
    const __half* scales;   // of the lane's first row in the strip's first group
    const __half* offsets;
    int column;             // the chunk's first
    int blocks;             // of the strip from there on; past its end x is zero
    bool ends_first;        // whether it began with so few that half a chunk is past the end

    __device__ __forceinline__ Source(const Problem& p, int strip, int first_step) {
        const int lane = threadIdx.x & 31;
        words = reinterpret_cast<const uint4*>(p.weights) +
                ((size_t)strip * p.blocks + first_step) * BLOCK_VECTORS + lane;
        const size_t row = (size_t)strip * p.groups * 16 + (lane >> 2);
        scales = p.scales + row;
        offsets = p.offsets + row;
        column = first_step * 64;
        blocks = p.blocks - first_step;
        ends_first = first_step + 2 >= p.blocks;
    }

    __device__ __forceinline__ void advance() {
        words += CHUNK_STEPS * BLOCK_VECTORS;
        column += CHUNK_STEPS * 64;
        blocks -= CHUNK_STEPS;
    }

    // Who never advances asks what was known at the start: kept, not worked out again.
    __device__ __forceinline__ bool is_half() const {
        return ONE_BY_ONE ? blocks <= 2 : ends_first;
    }
};

__device__ __forceinline__ unsigned load_rows(const __half* from) {
    const unsigned short low = __ldg(reinterpret_cast<const unsigned short*>(from));
    const unsigned short high = __ldg(reinterpret_cast<const unsigned short*>(from) + 8);
    return low | (unsigned)high << 16;
}

template <int HALF>
__device__ __forceinline__ void load_scales(const Source& from, Chunk& c) {
    const int column = from.column + (HALF == 0 || from.is_half() ? 0 : 128);
    const int group = GROUP == 0 ? 0 : column / max(GROUP, 1);
#pragma unroll
    for (int i = 0; i < HALF_SCALES; ++i) {
        c.scales[HALF][i][0] = load_rows(from.scales + (group + i) * 16);
#if OFFSETS
        c.scales[HALF][i][1] = load_rows(from.offsets + (group + i) * 16);
#endif
    }
}

// W4: two blocks of 64 columns take the place of the two that were just used.
template <int HALF>
__device__ __forceinline__ void load_half(const Source& from, Chunk& c) {
    load_scales<HALF>(from, c);
    const uint4* words = from.words + (HALF == 0 || from.is_half() ? 0 : 64);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        const uint4 v = __ldg(words + s * 32);
        unsigned(&to)[BITS] = c.words[2 * HALF + s];
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[BITS - 1] = v.w;
    }
}

// W3: a plane holds one word of each of the four blocks, so a chunk waits beside the one in use.
template <int PLANE>
__device__ __forceinline__ void load_plane(const Source& from, uint4 (&planes)[3]) {
    planes[PLANE] = __ldg(from.words + PLANE * 32);
}

__device__ __forceinline__ void take_planes(const uint4 (&planes)[3], Chunk& c) {
#pragma unroll
    for (int plane = 0; plane < 3; ++plane) {
        c.words[0][plane] = planes[plane].x, c.words[1][plane] = planes[plane].y;
        c.words[2][plane] = planes[plane].z, c.words[3][plane] = planes[plane].w;
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

// What step S of a chunk leaves room for once it is unpacked.
template <int S>
__device__ __forceinline__ void load_ahead(Chunk& c, uint4 (&planes)[3], const Source& next) {
    if constexpr (BITS == 4) {
        if constexpr (S == 1) load_half<0>(next, c);
        if constexpr (S == 3) load_half<1>(next, c);
    } else {
        if constexpr (S < 3) load_plane<S>(next, planes);
        if constexpr (S == 1) load_scales<0>(next, c);
        if constexpr (S == 3) load_scales<1>(next, c), take_planes(planes, c);
    }
}

template <int S>
constexpr int FIRST = HALF_SCALES * (S % 2) / 2;  // of the step's groups in half a chunk
template <int S>
constexpr int SECOND = HALF_SCALES == 4 ? FIRST<S> + 1 : FIRST<S>;

// Step S of a chunk into fp16 fragments.
template <int S>
__device__ __forceinline__ void unpack_step(Chunk& c, uint4 (&planes)[3], const Source& next,
                                            unsigned (&a)[4][4]) {
    gemm::natural_fragments<BITS, OFFSETS != 0>(c.words[S], scales_of(c.scales[S / 2][FIRST<S>]),
                                                scales_of(c.scales[S / 2][SECOND<S>]), a);
    load_ahead<S>(c, planes, next);
}

// The same as words of fragments, with their scales.
template <int S>
__device__ __forceinline__ void sort_step(Chunk& c, uint4 (&planes)[3], const Source& next,
                                          unsigned (&sorted)[4], gemm::Scales (&scales)[2]) {
    gemm::natural_words<BITS, true>(c.words[S], sorted);
    scales[0] = scales_of(c.scales[S / 2][FIRST<S>]);
    scales[1] = scales_of(c.scales[S / 2][SECOND<S>]);
    load_ahead<S>(c, planes, next);
}

__device__ __forceinline__ void compute_all(const Problem& p, unsigned shared, unsigned staging,
                                            unsigned full, unsigned empty) {
    const int thread = threadIdx.x - 128, warp = thread >> 5;
    Turn turn;
    Chunk chunk;
    uint4 planes[3];
    int index = blockIdx.x;
    if (index >= units_of(p)) return;
    Unit u = unit_at(p, index);
    Source ahead(p, strip_of(p, u, warp), u.first_step);
    if constexpr (BITS == 4) {
        load_half<0>(ahead, chunk), load_half<1>(ahead, chunk);
    } else {
        load_plane<0>(ahead, planes), load_plane<1>(ahead, planes), load_plane<2>(ahead, planes);
        load_scales<0>(ahead, chunk), load_scales<1>(ahead, chunk), take_planes(planes, chunk);
    }
    // Weights never come from the kernel before; residual, scratch and the room for y may.
    wait_for_previous();
    while (true) {
        const int following = index + gridDim.x;
        const bool is_end = following >= units_of(p);
        const Unit after = is_end ? u : unit_at(p, following);
        Sums sums = {};
        unsigned a[2][4][4];
        int before = 0;  // the stage that the products before these read
        const auto multiply = [&](const unsigned(&fragments)[4][4], bool is_first) {
            barrier_wait(full + turn.stage * 8, turn.parity);
            products_begin();
            const unsigned long long b = tile_descriptor(shared + turn.stage * STAGE_BYTES);
#pragma unroll
            for (int f = 0; f < 4; ++f) product(sums[0], fragments[f], b + 2 * f);
            products_commit();
            products_wait<1>();
            if ((threadIdx.x & 31) == 0 && !is_first) barrier_arrive(empty + before * 8);
            before = turn.stage;
            turn.advance();
        };
        unsigned sorted[4];
        gemm::Scales scales[2];
        const auto multiply_one_by_one = [&](bool is_first) {
            const unsigned long long b = tile_descriptor(shared + turn.stage * STAGE_BYTES);
#pragma unroll
            for (int f = 0; f < 4; ++f) {
                products_wait<3>();  // the last that read these registers has ended
                gemm::fragment_of<BITS, OFFSETS != 0>(sorted[f], scales[f / 2], a[0][f]);
                if (f == 0) barrier_wait(full + turn.stage * 8, turn.parity);
                if (f == 3 && (threadIdx.x & 31) == 0 && !is_first)
                    barrier_arrive(empty + before * 8);
                products_begin();
                product(sums[0], a[0][f], b + 2 * f);
                products_commit();
            }
            before = turn.stage;
            turn.advance();
        };
#pragma unroll 1
        for (int step = 0; step < u.steps; step += CHUNK_STEPS) {
            const bool goes_on = step + CHUNK_STEPS < u.steps;
            if constexpr (ONE_BY_ONE) {
                if (goes_on) {
                    ahead.advance();
                } else {
                    ahead = Source(p, strip_of(p, after, warp), after.first_step);
                }
                sort_step<0>(chunk, planes, ahead, sorted, scales);
                multiply_one_by_one(step == 0);
                sort_step<1>(chunk, planes, ahead, sorted, scales);
                multiply_one_by_one(false);
                sort_step<2>(chunk, planes, ahead, sorted, scales);
                multiply_one_by_one(false);
                sort_step<3>(chunk, planes, ahead, sorted, scales);
                multiply_one_by_one(false);
            } else {
                const Source next(p, strip_of(p, goes_on ? u : after, warp),
                                  goes_on ? u.first_step + step + CHUNK_STEPS : after.first_step);
                unpack_step<0>(chunk, planes, next, a[0]);
                multiply(a[0], step == 0);
                unpack_step<1>(chunk, planes, next, a[1]);
                multiply(a[1], false);
                unpack_step<2>(chunk, planes, next, a[0]);
                multiply(a[0], false);
                unpack_step<3>(chunk, planes, next, a[1]);
                multiply(a[1], false);
            }
        }
        products_wait<0>();
        if ((threadIdx.x & 31) == 0) barrier_arrive(empty + before * 8);
        if (u.shared < 0 || gather(p, u, sums, thread))
            store_through(staging + thread / 128 * STAGING_BYTES, p, u.strip + warp / 4 * 4, u.row,
                          sums[0]);
        if (is_end) return;
        u = after;
        index = following;
    }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) strip_gemm_hopper(
    const __grid_constant__ TensorMap x, const char* weights, const __half* scales,
    const __half* offsets, const __half* bias, const __half* residual, __half* y, float* partials,
    int* arrivals, int m, int n, int k, int blocks, int groups, int whole, int splits, int band) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char shared_memory[];
    __shared__ __align__(8) unsigned long long barriers[2 * STAGES];
    const Problem p = {nullptr, weights, scales, offsets, bias, residual, y, partials, arrivals,
                       m, n, k, blocks, groups, whole, splits, band};
    allow_next();
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
        compute_all(p, shared, shared + STAGES * STAGE_BYTES, full, empty);
    }
#endif
}
