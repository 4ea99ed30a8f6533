// y = x W^T for few rows of x and many strips (sm_90): a grid that stays, x in registers, weights
// streamed past it.
//
// A warp owns COLUMNS columns of K for good. It loads x's fragments of them once, and sums them up
// once, and then takes its part of strip after strip: the loop is unpacking and products, little
// else. One lane asks for whole strips by bulk copies, WINDOW of them at a time, because all that
// are on their way come at about the same time; DEPTH find room. The WARPS parts of a strip are
// added in the order of the warps, by warps that do nothing else: from 16 rows on, one alone would be
// what all others wait for.
//
// Reads once: weights, scales, offsets; x once a block. Loses where few strips are for each block:
// nothing is added up before the first strip has come and x is summed (strip_gemv.cu).
//
// Defines: BITS 3 or 4. ROWS of x there is room for, 8 to 32. COLUMNS 128 or 256, WARPS: together
// they are the padded columns. SETS of WARPS warps in a block, each with strips of its own. ADDED
// eights of rows that a warp adds up. DEPTH, WINDOW. KEEPING registers of a thread that multiplies
// and OTHERS of the rest; 0: all have the same. GROUP 64 or 128 columns a scale. OFFSETS, GATED,
// NORMED: as in strip_gemv.cu. WATCHED: see TELLERS.
#include "async_copy.cuh"
#include "carried_norm.cuh"
#include "hopper.cuh"
#include "strip.cuh"
#include "tensor_core.cuh"

namespace {

using Packed = strip::Layout<BITS>;
constexpr int TILES = ROWS / 8;
// Warps after those that multiply; registers are given to four warps at a time.
constexpr int KEEPERS = SETS * WARPS, ADDERS_OF_SET = TILES / ADDED, ADDERS = SETS * ADDERS_OF_SET;
constexpr int ASKER = KEEPERS + ADDERS;
constexpr int THREADS = KEEPING ? (ASKER + 4) / 4 * 128 : 32 * (ASKER + 1);
constexpr int BLOCKS = COLUMNS / strip::BLOCK;
constexpr int GROUPS = COLUMNS / GROUP, GROUP_BLOCKS = GROUP / strip::BLOCK;
constexpr int VECTOR_BYTES = 16 * strip::LANES;
constexpr int WORD_BYTES = 2 * BITS * COLUMNS * WARPS;  // of a strip
constexpr int SCALE_BYTES = 2 * strip::HEIGHT * GROUPS * WARPS;
constexpr int SLOT_BYTES = WORD_BYTES + SCALE_BYTES * (1 + OFFSETS);
constexpr int PITCH = 20;  // sums of a row of x: 2 t rows further is another bank
constexpr int PART = ROWS * PITCH;
constexpr int TURNS = DEPTH / SETS;  // slots of a set; room for the parts of as many strips
constexpr int SET_PARTS = TURNS * WARPS * PART;
static_assert(TILES % ADDED == 0, "a warp adds up as much as another");
static_assert(KEEPING == 0 || KEEPERS % 4 == 0, "four warps have the same part");
static_assert(COLUMNS % GROUP == 0, "a warp's columns are whole groups");
static_assert(DEPTH == TURNS * SETS && TURNS >= 2, "a strip is added up while the next one is left");
static_assert(WINDOW <= DEPTH, "a slot for all that is on its way");
// One lane tells a barrier that its warp is done: __syncwarp() orders what the others did before it.
// Tools that watch every access see only who told, so for them all lanes do.
constexpr int TELLERS = WATCHED ? strip::LANES : 1;

// Barriers, TURNS of each set and kind, by their distance: a strip has come, all warps have read it,
// all have left their sums, those are added up.
constexpr int KIND = 8 * DEPTH, READ = KIND, LEFT = 2 * KIND, ADDED_UP = 3 * KIND;

// Which slot of a set's is next, and in which of its phases.
struct Turn {
    int at = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance() {
        if (++at == TURNS) at = 0, parity ^= 1;
    }
};

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

// ---- what the warps that do not multiply do ----

// What all warps of a block know.
struct Block {
    unsigned slots, come;  // where strips lie, and the first of the barriers
    int begin, end;        // its strips
    int first_row, rows;   // of x
};

template <bool MULTIPLIES>
__device__ __forceinline__ void take_registers() {
#if KEEPING
    if (MULTIPLIES) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(KEEPING));
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OTHERS));
#endif
}

// All warps of a block, before anybody waits for anything.
__device__ __forceinline__ void begin_together() {
    __syncthreads();
    if (NORMED) __syncthreads();  // the rows' norms are known
}

// Asks for strips. By all lanes together it takes longer by far.
__device__ __forceinline__ void ask_for_all(const Block& block, const char* words,
                                            const char* scales, const char* offsets) {
    const auto place_of = [](int i) { return i % SETS * TURNS + i / SETS % TURNS; };
    const auto ask = [&](int i) {
        const unsigned slot = block.slots + place_of(i) * SLOT_BYTES;
        const unsigned barrier = block.come + 8 * place_of(i);
        const size_t at = block.begin + i;
        barrier_arrive_expecting(barrier, SLOT_BYTES);
        copy_bulk(slot, words + at * WORD_BYTES, WORD_BYTES, barrier);
        copy_bulk(slot + WORD_BYTES, scales + at * SCALE_BYTES, SCALE_BYTES, barrier);
        if (OFFSETS)
            copy_bulk(slot + WORD_BYTES + SCALE_BYTES, offsets + at * SCALE_BYTES, SCALE_BYTES,
                      barrier);
    };
    const int count = block.end - block.begin;
    const bool is_one = threadIdx.x % strip::LANES == 0;
    if (is_one) {
        for (int i = 0; i < DEPTH; ++i) barrier_init(block.come + 8 * i, 1);
        barrier_init_done();
        for (int i = 0; i < min(WINDOW, count); ++i) ask(i);
        for (int i = DEPTH; i < 4 * DEPTH; ++i)
            barrier_init(block.come + 8 * i, (i < 3 * DEPTH ? WARPS : ADDERS_OF_SET) * TELLERS);
        barrier_init_done();
    }
    __syncwarp();
    begin_together();
    if (!is_one) return;
    for (int i = WINDOW; i < count; ++i) {
        const int after = i - WINDOW;
        barrier_wait(block.come + 8 * place_of(after), after / DEPTH & 1);
        if (i >= DEPTH) barrier_wait(block.come + READ + 8 * place_of(i), (i / DEPTH - 1) & 1);
        ask(i);
    }
}

// Which sums a warp that adds up is for, and where it finds them.
struct Adder {
    int set, eights;   // of rows, ADDED at a time
    unsigned barrier;  // the set's first one
    Turn turn;

    __device__ __forceinline__ Adder(const Block& block, int nth)
        : set(nth / ADDERS_OF_SET), eights(nth % ADDERS_OF_SET),
          barrier(block.come + 8 * set * TURNS) {}
    __device__ __forceinline__ void wait() const {
        barrier_wait(barrier + LEFT + 8 * turn.at, turn.parity);
    }
    // What was left is read: it may be written over.
    __device__ __forceinline__ void done() {
        __syncwarp();
        if (threadIdx.x % strip::LANES < TELLERS) barrier_arrive(barrier + ADDED_UP + 8 * turn.at);
        turn.advance();
    }
};

// Adds up the parts of ADDED eights of rows of a set's strips.
__device__ __forceinline__ void add_up(Adder adder, const Block& block, const float* parts,
                                       const strip::Epilogue& to, int out_features,
                                       const float* scales_of_rows) {
    const int lane = threadIdx.x % strip::LANES;
    const int n = lane % 4 * 4;  // the first of four neighbouring rows of a strip
    const int first = adder.eights * (8 * ADDED) + lane / 4;
    const float* const own = parts + adder.set * SET_PARTS + first * PITCH + n;
    const float unit = n < 8 ? strip::LOWER_UNIT : strip::UPPER_UNIT<BITS>;
    const bool in_fours = to.takes_fours();
    for (int strip = block.begin + adder.set; strip < block.end; strip += SETS) {
        adder.wait();
        float4 sums[ADDED] = {};
#pragma unroll
        for (int b = 0; b < ADDED; ++b) {
            if (8 * b + first >= block.rows) continue;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float4 part = *reinterpret_cast<const float4*>(
                    own + (adder.turn.at * WARPS + w) * PART + 8 * b * PITCH);
                sums[b].x += part.x, sums[b].y += part.y;
                sums[b].z += part.z, sums[b].w += part.w;
            }
        }
        adder.done();
#pragma unroll
        for (int b = 0; b < ADDED; ++b) {
            const int m = 8 * b + first;
            const float scale = unit * (NORMED ? scales_of_rows[min(m, block.rows - 1)] : 1.0f);
            const float4 all = {sums[b].x * scale, sums[b].y * scale, sums[b].z * scale,
                                sums[b].w * scale};
            to.finish_four<GATED>(in_fours, all, m < block.rows, block.first_row + m, strip, n,
                                  out_features);
        }
    }
}

// The same where there is one row of x: a lane has one row of the strip and half of the warps.
__device__ __forceinline__ void add_up_one(Adder adder, const Block& block, const float* parts,
                                           const strip::Epilogue& to, int out_features,
                                           float scale) {
    const int lane = threadIdx.x % strip::LANES, n = lane % strip::HEIGHT;
    const bool is_lower = lane < strip::HEIGHT;
    constexpr int HALF = WARPS / 2;
    const float* const own = parts + adder.set * SET_PARTS + (is_lower ? 0 : HALF * PART) + n;
    scale *= n < 8 ? strip::LOWER_UNIT : strip::UPPER_UNIT<BITS>;
    for (int strip = block.begin + adder.set; strip < block.end; strip += SETS) {
        adder.wait();
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS - HALF; ++w)
            if (w < HALF || !is_lower) sum += own[(adder.turn.at * WARPS + w) * PART];
        adder.done();
        sum = (sum + __shfl_xor_sync(~0u, sum, strip::HEIGHT)) * scale;
        const int row = strip * strip::HEIGHT + n;
        const bool is_there = row < out_features;
        if (is_there) sum = to.biased(row, sum);
        if (GATED) sum = strip::silu(sum) * __shfl_xor_sync(~0u, sum, 8);
        if (is_lower && is_there && !(GATED && n >= 8))
            to.store(block.first_row, GATED ? strip * 8 + n : row, sum);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
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
    const auto share = [&](unsigned block) { return static_cast<int>(strips * block / gridDim.x); };
    const int first_row = blockIdx.y * ROWS;
    Block block = {shared_address(room), shared_address(barriers), share(blockIdx.x),
                   share(blockIdx.x + 1), first_row, min(rows - first_row, ROWS)};
    asm volatile("" : "+r"(block.slots), "+r"(block.come));  // or both are made anew at every use

    if (of_all >= KEEPERS) {
        take_registers<false>();
        if (of_all == ASKER) return ask_for_all(block, words, scales, offsets);
        if (of_all > ASKER) return begin_together();
        const strip::Epilogue epilogue{bias, residual, y,
                                       GATED ? out_features / 2 : out_features};
        begin_together();
        wait_for_previous();
        const float* const parts = reinterpret_cast<const float*>(room + DEPTH * SLOT_BYTES);
        const Adder adder(block, of_all - KEEPERS);
        if (ROWS == 8 && block.rows == 1)
            return add_up_one(adder, block, parts, epilogue, out_features,
                              NORMED ? scales_of_rows[0] : 1.0f);
        return add_up(adder, block, parts, epilogue, out_features, scales_of_rows);
    }

    take_registers<true>();
    const int set = of_all / WARPS, warp = of_all % WARPS;
    __syncthreads();
    // Weights never come from the kernel before; x, residual and the room for y may.
    wait_for_previous();
    Kept kept;
    keep_x(kept, x + static_cast<size_t>(first_row) * in_features + warp * COLUMNS, in_features,
           in_features - warp * COLUMNS, block.rows, lane);
    if (NORMED) {
        const Normed normed = {in_squares, in_lift, next_lift, normed_width, eps};
        for (int m = of_all; m < block.rows; m += KEEPERS) {
            const float4 squares = normed.squares_of(first_row + m, 4 * lane);
            const float scale = normed.scale(first_row + m, squares, lane, blockIdx.x == 0);
            if (lane == 0) scales_of_rows[m] = scale;
        }
        __syncthreads();
    }

    // Where the lane finds its words and scales in the set's first slot, and leaves its sums.
    const unsigned slot = block.slots + set * (TURNS * SLOT_BYTES);
    unsigned words_at = slot + 16 * lane;
    if (BITS == 4) words_at += warp * BLOCKS * VECTOR_BYTES;
    else words_at += warp * COLUMNS / 256 * (3 * VECTOR_BYTES) + (COLUMNS == 128 ? warp % 2 * 8 : 0);
    unsigned scales_at = slot + WORD_BYTES + 2 * (strip::HEIGHT * GROUPS * warp + lane / 4);
    unsigned own = block.slots + DEPTH * SLOT_BYTES +
                   4 * (set * SET_PARTS + warp * PART + lane % 4 * 2 * PITCH + lane / 4);
    int there = block.rows - lane % 4 * 2;
    unsigned tells = lane < TELLERS;
    asm volatile("" : "+r"(words_at), "+r"(scales_at), "+r"(own), "+r"(there), "+r"(tells));
    const unsigned barrier = block.come + 8 * set * TURNS;
    Turn turn;
    for (int strip = block.begin + set; strip < block.end; strip += SETS) {
        const unsigned its = barrier + 8 * turn.at;
        barrier_wait(its, turn.parity);
        const Part part =
            read_part(words_at + turn.at * SLOT_BYTES, scales_at + turn.at * SLOT_BYTES);
        __syncwarp();
        if (tells) barrier_arrive(its + READ);
        Sums sums = {};
        multiply_part(sums, part, kept);
        barrier_wait(its + ADDED_UP, turn.parity ^ 1);
        leave(sums, own + turn.at * (4 * WARPS * PART), there);
        __syncwarp();
        if (tells) barrier_arrive(its + LEFT);
        turn.advance();
    }
}
