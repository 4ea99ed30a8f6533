// y = x W^T for few rows of x and many strips (sm_90): a grid that stays, x in registers, weights
// streamed past it.
//
// A warp owns COLUMNS columns of K for good. It loads x's fragments of them once, and sums them up
// once, and then takes its part of strip after strip: the loop is unpacking and products, little
// else. One lane asks for whole strips by bulk copies, WINDOW of them at a time, because all that
// are on their way come at about the same time; DEPTH find room. The WARPS parts of a strip are
// added in the order of the warps, by a warp that does nothing else.
//
// Reads once: weights, scales, offsets; x once a block. Loses where few strips are for each block:
// nothing is added up before the first strip has come and x is summed (strip_gemv.cu).
//
// Defines: BITS 3 or 4. ROWS of x there is room for, 8 or 16. COLUMNS 128 or 256, WARPS: together
// they are the padded columns. SETS of WARPS warps in a block, each with strips of its own. DEPTH,
// WINDOW. GROUP 64 or 128 columns a scale. OFFSETS, GATED, NORMED: as in strip_gemv.cu. WATCHED: see
// TELLERS.
#include "async_copy.cuh"
#include "carried_norm.cuh"
#include "hopper.cuh"
#include "strip.cuh"
#include "tensor_core.cuh"

namespace {

using Packed = strip::Layout<BITS>;
constexpr int TILES = ROWS / 8;
constexpr int ADDERS = SETS, ASKER = SETS * WARPS + ADDERS;  // warps after those that multiply
constexpr int THREADS = 32 * (ASKER + 1);
constexpr int BLOCKS = COLUMNS / strip::BLOCK;
constexpr int GROUPS = COLUMNS / GROUP, GROUP_BLOCKS = GROUP / strip::BLOCK;
constexpr int VECTOR_BYTES = 16 * strip::LANES;
constexpr int WORD_BYTES = 2 * BITS * COLUMNS * WARPS;  // of a strip
constexpr int SCALE_BYTES = 2 * strip::HEIGHT * GROUPS * WARPS;
constexpr int SLOT_BYTES = WORD_BYTES + SCALE_BYTES * (1 + OFFSETS);
constexpr int PITCH = 20;  // sums of a row of x: 2 t rows further is another bank
constexpr int PART = ROWS * PITCH;
constexpr int TURNS = DEPTH / SETS;  // slots of a set; room for the parts of as many strips
static_assert(COLUMNS % GROUP == 0, "a warp's columns are whole groups");
static_assert(DEPTH == TURNS * SETS && TURNS >= 2, "a strip is added up while the next one is left");
static_assert(WINDOW <= DEPTH, "a slot for all that is on its way");
// One lane tells a barrier that its warp is done: __syncwarp() orders what the others did before it.
// Tools that watch every access see only who told, so for them all lanes do.
constexpr int TELLERS = WATCHED ? strip::LANES : 1;

// Barriers, TURNS of each set and kind, by their distance: a strip has come, all warps have read it,
// all have left their sums, those are added up.
constexpr int KIND = 8 * DEPTH, READ = KIND, LEFT = 2 * KIND, ADDED = 3 * KIND;

// A strip's part as a lane reads it from its slot.
struct Part {
    unsigned words[BLOCKS][Packed::WORDS];
    __half scales[GROUPS][2];
    __half offsets[GROUPS][2];
};

__device__ __forceinline__ __half half_at(unsigned from) {
    return __ushort_as_half(static_cast<unsigned short>(shared_2(from)));
}

// words, scales: where the lane finds its own.
__device__ __forceinline__ Part read_part(unsigned words, unsigned scales) {
    Part got;
    if constexpr (BITS == 4) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const uint4 v = shared_16(words + block * VECTOR_BYTES);
            unsigned(&to)[Packed::WORDS] = got.words[block];
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        }
    } else {
#pragma unroll
        for (int plane = 0; plane < 3; ++plane) {
            if constexpr (BLOCKS == 4) {
                const uint4 v = shared_16(words + plane * VECTOR_BYTES);
                got.words[0][plane] = v.x, got.words[1][plane] = v.y;
                got.words[2][plane] = v.z, got.words[3][plane] = v.w;
            } else {
                const uint2 v = shared_8(words + plane * VECTOR_BYTES);
                got.words[0][plane] = v.x, got.words[1][plane] = v.y;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned from = scales + 2 * (strip::HEIGHT * i + 8 * h);
            got.scales[i][h] = half_at(from);
            if (OFFSETS) got.offsets[i][h] = half_at(from + SCALE_BYTES);
        }
    return got;
}

// What a warp keeps of x: its B fragments, and a group's sums as bare codes of rows 0 .. 7 lack them.
struct Kept {
    unsigned words[BLOCKS][TILES][8];
    float sums[GROUPS][TILES][2];

    __device__ __forceinline__ float sum(int group, int b, int c) const {
        const float lower = sums[group][b][c % 2];
        if (c < 2) return lower;
        float upper = lower * (1 << strip::UPPER_PLACE<BITS>);
        // Made anew at each use: two tiles leave no registers to keep both.
        if (TILES > 1) asm volatile("" : "+f"(upper));
        return upper;
    }
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
    constexpr unsigned lower = strip::less_at<BITS>(0);
    constexpr unsigned upper = strip::less_at<BITS>(strip::UPPER_PLACE<BITS>);
    const unsigned less[4] = {lower, upper, lower, upper};
    float halves[2][GROUPS][TILES][4] = {};  // neighbouring products do not wait for each other
#pragma unroll
    for (int j = 0; j < 4 * GROUP_BLOCKS; ++j)
#pragma unroll
        for (int i = 0; i < GROUPS; ++i)
#pragma unroll
            for (int b = 0; b < TILES; ++b) {
                const unsigned* const words = kept.words[i * GROUP_BLOCKS + j / 4][b] + j % 4 * 2;
                const unsigned of_x[2] = {words[0], words[1]};
                mma_half(halves[j % 2][i][b], less, of_x);
            }
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
#pragma unroll
        for (int b = 0; b < TILES; ++b)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                kept.sums[i][b][c] = halves[0][i][b][c] + halves[1][i][b][c];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int b = 0; b < TILES; ++b) strip::level_x<BITS>(kept.words[block][b]);
}

using Sums = float[TILES][4];

__device__ __forceinline__ void multiply_part(Sums& sums, const Part& of, const Kept& kept) {
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        Sums products;
#pragma unroll
        for (int b = 0; b < TILES; ++b)
#pragma unroll
            for (int c = 0; c < 4; ++c) products[b][c] = kept.sum(i, b, c);
#pragma unroll
        for (int inside = 0; inside < GROUP_BLOCKS; ++inside) {
            const int block = i * GROUP_BLOCKS + inside;
            unsigned pairs[strip::PAIRS];
            strip::place_pairs<false>(of.words[block], pairs);
            strip::level<BITS>(pairs);
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
                    sums[b][c] -= kept.sum(i, b, c) * (__half2float(of.offsets[i][c / 2]) /
                                                        strip::MIDDLE<BITS>);
            }
    }
}

// A strip's sums of this warp; `to`: a lane's first one's. `there`: rows of x from the lane's first on.
__device__ __forceinline__ void leave(const Sums& sums, unsigned to, int there) {
#pragma unroll
    for (int b = 0; b < TILES; ++b)
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (8 * b + c % 2 < there)
                asm volatile("st.shared.f32 [%0], %1;" ::
                                 "r"(to + 4 * ((8 * b + c % 2) * PITCH + c / 2 * 8)),
                             "f"(sums[b][c]) : "memory");
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
    extern __shared__ __align__(128) char room[];  // slots, then parts of sums, set by set
    __shared__ unsigned long long barriers[4 * DEPTH];
    __shared__ float scales_of_rows[NORMED ? ROWS : 1];
    const int lane = threadIdx.x % strip::LANES, of_all = threadIdx.x / strip::LANES;
    const int first_row = blockIdx.y * ROWS;
    rows = min(rows - first_row, ROWS);
    const auto share = [&](unsigned block) { return static_cast<int>(strips * block / gridDim.x); };
    const int begin = share(blockIdx.x), end = share(blockIdx.x + 1);
    unsigned slots = shared_address(room), come = shared_address(barriers);
    asm volatile("" : "+r"(slots), "+r"(come));  // or both are made anew at every use

    if (of_all == ASKER) {
        const auto place_of = [](int i) { return i % SETS * TURNS + i / SETS % TURNS; };
        const auto ask = [&](int i) {
            const unsigned slot = slots + place_of(i) * SLOT_BYTES, barrier = come + 8 * place_of(i);
            const size_t at = begin + i;
            barrier_arrive_expecting(barrier, SLOT_BYTES);
            copy_bulk(slot, words + at * WORD_BYTES, WORD_BYTES, barrier);
            copy_bulk(slot + WORD_BYTES, scales + at * SCALE_BYTES, SCALE_BYTES, barrier);
            if (OFFSETS)
                copy_bulk(slot + WORD_BYTES + SCALE_BYTES, offsets + at * SCALE_BYTES, SCALE_BYTES,
                          barrier);
        };
        const int count = end - begin;
        if (lane == 0) {  // by all lanes together it takes longer by far
            for (int i = 0; i < 4 * DEPTH; ++i) {
                const bool by_one = i < DEPTH, by_adder = i >= 3 * DEPTH;
                barrier_init(come + 8 * i, by_one ? 1 : by_adder ? TELLERS : WARPS * TELLERS);
            }
            barrier_init_done();
            for (int i = 0; i < min(WINDOW, count); ++i) ask(i);
        }
        __syncwarp();
        __syncthreads();
        if (NORMED) __syncthreads();
        if (lane == 0)
            for (int i = WINDOW; i < count; ++i) {
                const int after = i - WINDOW;
                barrier_wait(come + 8 * place_of(after), after / DEPTH & 1);
                if (i >= DEPTH) barrier_wait(come + READ + 8 * place_of(i), (i / DEPTH - 1) & 1);
                ask(i);
            }
        return;
    }

    const bool adds = of_all >= SETS * WARPS;
    const int set = adds ? of_all - SETS * WARPS : of_all / WARPS, warp = of_all % WARPS;
    constexpr int SET_PARTS = TURNS * WARPS * PART;
    const int parts_at = DEPTH * SLOT_BYTES + 4 * set * SET_PARTS;
    const unsigned barrier = come + 8 * set * TURNS;
    int turn = 0;
    unsigned parity = 0;
    const auto next_turn = [&] {
        if (++turn == TURNS) turn = 0, parity ^= 1;
    };
    __syncthreads();
    // Weights never come from the kernel before; x, residual and the room for y may.
    wait_for_previous();

    if (adds) {
        if (NORMED) __syncthreads();
        const strip::Epilogue epilogue{bias, residual, y, GATED ? out_features / 2 : out_features};
        const int n = lane % 4 * 4;  // the first of four neighbouring rows of a strip
        const float* const own = reinterpret_cast<const float*>(room + parts_at) +
                                 lane / 4 * PITCH + n;
        for (int strip = begin + set; strip < end; strip += SETS) {
            barrier_wait(barrier + LEFT + 8 * turn, parity);
            float4 sums[TILES] = {};
#pragma unroll
            for (int b = 0; b < TILES; ++b) {
                if (8 * b + lane / 4 >= rows) continue;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    const float4 part = *reinterpret_cast<const float4*>(
                        own + (turn * WARPS + w) * PART + 8 * b * PITCH);
                    sums[b].x += part.x, sums[b].y += part.y;
                    sums[b].z += part.z, sums[b].w += part.w;
                }
            }
            __syncwarp();
            if (lane < TELLERS) barrier_arrive(barrier + ADDED + 8 * turn);
            next_turn();
#pragma unroll
            for (int b = 0; b < TILES; ++b) {
                const int m = 8 * b + lane / 4;
                const float scale = (NORMED ? scales_of_rows[min(m, rows - 1)] : 1.0f) *
                                    (n < 8 ? strip::LOWER_UNIT : strip::UPPER_UNIT<BITS>);
                const float of_rows[4] = {sums[b].x, sums[b].y, sums[b].z, sums[b].w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = strip * strip::HEIGHT + n + i;
                    const bool is_there = m < rows && row < out_features;
                    float value = is_there ? epilogue.biased(row, of_rows[i] * scale) : 0.0f;
                    if (GATED) {
                        const float up = __shfl_xor_sync(~0u, value, 2);
                        value = strip::silu(value) * up;
                    }
                    if (is_there && !(GATED && n >= 8))
                        epilogue.store(first_row + m, GATED ? strip * 8 + n + i : row, value);
                }
            }
        }
        return;
    }

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

    // Where the lane finds its words and scales in the set's first slot, and leaves its sums.
    const unsigned slot = slots + set * (TURNS * SLOT_BYTES);
    unsigned words_at = slot + 16 * lane;
    if (BITS == 4) words_at += warp * BLOCKS * VECTOR_BYTES;
    else words_at += warp * COLUMNS / 256 * (3 * VECTOR_BYTES) + (COLUMNS == 128 ? warp % 2 * 8 : 0);
    unsigned scales_at = slot + WORD_BYTES + 2 * (strip::HEIGHT * GROUPS * warp + lane / 4);
    unsigned own = slots + parts_at + 4 * (warp * PART + lane % 4 * 2 * PITCH + lane / 4);
    int there = rows - lane % 4 * 2;
    unsigned tells = lane < TELLERS;
    asm volatile("" : "+r"(words_at), "+r"(scales_at), "+r"(own), "+r"(there), "+r"(tells));
    for (int strip = begin + set; strip < end; strip += SETS) {
        const unsigned its = barrier + 8 * turn;
        barrier_wait(its, parity);
        const Part part = read_part(words_at + turn * SLOT_BYTES, scales_at + turn * SLOT_BYTES);
        __syncwarp();
        if (tells) barrier_arrive(its + READ);
        Sums sums = {};
        multiply_part(sums, part, kept);
        barrier_wait(its + ADDED, parity ^ 1);
        leave(sums, own + turn * (4 * WARPS * PART), there);
        __syncwarp();
        if (tells) barrier_arrive(its + LEFT);
        next_turn();
    }
}
