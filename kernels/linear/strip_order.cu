// y = x W^T for 17 to 32 rows of x and many strips (sm_90): x lies in shared memory in the order in
// which a strip's lanes hold columns, and wgmma multiplies it with codes as they lie in the words.
//
// One warpgroup reads x and lays it out, so that no word of the weights changes lanes, as it does in
// strip_gemm_hopper.cu; it sums x up too, for what bare codes are too much (strip.cuh): beside a
// product of 32 rows every instruction of the others costs a cycle or two. Where all of x fits it is
// laid out once. Each of the other warpgroups computes 64 out-features at a time, reads its packed
// weights straight into registers, 256 columns ahead, and multiplies sums of a group by its scale.
// The grid is persistent.
//
// Loses where a layer has few strips: nothing is split along K.
//
// Defines: BITS 3 or 4. ROWS of x there is room for, a multiple of 32. CONSUMERS warpgroups that
// multiply. DEPTH chunks of 256 columns of x there is room for. GROUP 128. OFFSETS, GATED: as in
// strip_gemv.cu. WATCHED: see TELLERS in strip_stream.cu.
#include "async_copy.cuh"
#include "element.cuh"
#include "hopper.cuh"
#include "strip.cuh"

namespace {

constexpr int TILES = ROWS / 8, CHUNK_BLOCKS = 4, PASSES = ROWS / 32;
constexpr int BLOCK_BYTES = ROWS * 128;              // x of 64 columns
constexpr int BLOCK_VECTORS = BITS == 4 ? 32 : 24;  // of 16 bytes, in 64 columns of a strip
constexpr int CHUNK_BYTES = CHUNK_BLOCKS * BLOCK_BYTES;
constexpr int LESS_BYTES = 2 * ROWS * 4;  // what sums of a chunk's groups begin with
constexpr float LESS = -strip::MIDDLE<BITS> / 16777216.0f;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int TELLERS = WATCHED ? strip::LANES : 1;
static_assert(GROUP == 128 && ROWS % 32 == 0);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void store_16(unsigned to, unsigned a, unsigned b, unsigned c,
                                         unsigned d) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Which chunk of x lies where: all stay, or DEPTH of them take turns.
struct Turn {
    int slot = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance(int slots, bool stays) {
        if (++slot == slots) slot = 0, parity ^= stays ? 0 : 1;
    }
};

// Fragment f of a block takes columns 16 t + 4 f + 0 .. 3 of each t: in a row of x first two of all t,
// then the other two.
__device__ __forceinline__ void lay_out(unsigned to, unsigned full, unsigned empty,
                                        const __half* x, int rows, int columns, int chunks,
                                        int rounds) {
    const bool stays = chunks <= DEPTH;
    const int thread = threadIdx.x % 128, f = thread % 4, first = thread / 4;
    const int units = chunks * PASSES;
    uint2 v[2][CHUNK_BLOCKS][4];
    const auto load = [&](int unit, uint2(&into)[CHUNK_BLOCKS][4]) {
        const int row = unit % PASSES * 32 + first, chunk = unit / PASSES;
#pragma unroll
        for (int i = 0; i < CHUNK_BLOCKS; ++i)
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const int column = (chunk * CHUNK_BLOCKS + i) * strip::BLOCK + 16 * t + 4 * f;
                into[i][t] = make_uint2(0, 0);
                if (row < rows && column < columns)
                    into[i][t] = *reinterpret_cast<const uint2*>(
                        x + static_cast<size_t>(row) * columns + column);
            }
    };
    const unsigned by[2] = {(15u - strip::x_place<BITS>(2 * f)) * 0x04000400u,
                            (15u - strip::x_place<BITS>(2 * f + 1)) * 0x04000400u};
    const auto times = [](unsigned a, unsigned b) {
        return strip::as_word(__hmul2(strip::as_half2(a), strip::as_half2(b)));
    };
    const auto plus = [](unsigned a, unsigned b) {
        return __hadd2(strip::as_half2(a), strip::as_half2(b));
    };
    const unsigned less = to + DEPTH * CHUNK_BYTES;
    Turn turn;
    const auto store = [&](int unit, const uint2(&from)[CHUNK_BLOCKS][4]) {
        if (!stays && unit % PASSES == 0) barrier_wait(empty + 8 * turn.slot, turn.parity ^ 1);
        const int m = unit % PASSES * 32 + first;
        float all[2] = {};
#pragma unroll
        for (int i = 0; i < CHUNK_BLOCKS; ++i) {
            const unsigned row = to + turn.slot * CHUNK_BYTES + i * BLOCK_BYTES + m * 128;
            const uint2(&v)[4] = from[i];
            // Two columns that are 65,520 and more together are too much here.
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const float2 sum = __half22float2(plus(v[t].x, v[t].y));
                all[i / 2] += sum.x + sum.y;
            }
            store_16(row + ((2 * f) ^ (first & 7)) * 16, times(v[0].x, by[0]), times(v[1].x, by[0]),
                     times(v[2].x, by[0]), times(v[3].x, by[0]));
            store_16(row + ((2 * f + 1) ^ (first & 7)) * 16, times(v[0].y, by[1]),
                     times(v[1].y, by[1]), times(v[2].y, by[1]), times(v[3].y, by[1]));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            all[i] += __shfl_xor_sync(~0u, all[i], 1);
            all[i] += __shfl_xor_sync(~0u, all[i], 2);
            if (f == 0)
                asm volatile("st.shared.f32 [%0], %1;" ::
                                 "r"(less + turn.slot * LESS_BYTES + i * ROWS * 4 + m * 4),
                             "f"(all[i] * LESS) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_arrive(full + 8 * turn.slot);
        if (unit % PASSES == PASSES - 1) turn.advance(stays ? chunks : DEPTH, stays);
    };
    const int all = stays ? units : units * rounds;
    load(0, v[0]);
    int ahead = 0;
    const auto load_next = [&](uint2(&into)[CHUNK_BLOCKS][4]) {
        ahead = ahead + 1 == units ? 0 : ahead + 1;
        load(ahead, into);
    };
#pragma unroll 1
    for (int unit = 0; unit < all; unit += 2) {
        load_next(v[1]);
        store(unit, v[0]);
        load_next(v[0]);
        if (unit + 1 < all) store(unit + 1, v[1]);
    }
}

// A lane's packed weights of 256 columns, and the scales of its two rows.
struct Chunk {
    uint4 vectors[BITS];
    __half scales[2][2];
    __half offsets[2][2];
};

__device__ __forceinline__ void load_chunk(Chunk& c, const uint4* words, const __half* scales,
                                           const __half* offsets) {
#pragma unroll
    for (int v = 0; v < BITS; ++v) {
        unsigned got[4];
        load_once<16>(words + v * strip::LANES, got);
        c.vectors[v] = make_uint4(got[0], got[1], got[2], got[3]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            c.scales[i][h] = __ldg(scales + 16 * i + 8 * h);
            if (OFFSETS) c.offsets[i][h] = __ldg(offsets + 16 * i + 8 * h);
        }
}

template <int S>
__device__ __forceinline__ void unpack(const Chunk& c, unsigned (&a)[4][4]) {
    unsigned words[BITS];
    if constexpr (BITS == 4) {
        const uint4 v = c.vectors[S];
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[BITS - 1] = v.w;
    } else {
#pragma unroll
        for (int plane = 0; plane < 3; ++plane) {
            const uint4 v = c.vectors[plane];
            words[plane] = S == 0 ? v.x : S == 1 ? v.y : S == 2 ? v.z : v.w;
        }
    }
    unsigned pairs[strip::PAIRS];
    strip::place_pairs<false>(words, pairs);
    strip::level<BITS>(pairs);
#pragma unroll
    for (int p = 0; p < strip::PAIRS; ++p) a[p / 4][p % 4] = pairs[p];
}

using Sums = float[TILES][4];

template <int S>
__device__ __forceinline__ void multiply(Sums& sums, const Chunk& c, unsigned (&a)[2][4][4],
                                         unsigned x) {
    unpack<S>(c, a[S % 2]);
#pragma unroll
    for (int f = 0; f < 4; ++f)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[S % 2][f][i])::"memory");
    if (S % 2 == 0)
#pragma unroll
        for (int b = 0; b < TILES; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[b][i])::"memory");
    products_begin();
    constexpr unsigned long long high = 1ull << 62 | 64ull << 32;
#pragma unroll
    for (int f = 0; f < 4; ++f)
        product(sums, a[S % 2][f], high | (x + S * (BLOCK_BYTES / 16) + 2 * f));
    products_commit();
}

// What a group's sums begin with, of rows 0 .. 7 and 8 .. 15 of a strip.
__device__ __forceinline__ void begin_with(Sums& sums, unsigned less) {
#pragma unroll
    for (int b = 0; b < TILES; ++b) {
        const uint2 v = shared_8(less + 32 * b);
        sums[b][0] = __uint_as_float(v.x), sums[b][1] = __uint_as_float(v.y);
        sums[b][2] = sums[b][0] * (1 << strip::UPPER_PLACE<BITS>);
        sums[b][3] = sums[b][1] * (1 << strip::UPPER_PLACE<BITS>);
    }
}

template <int G>
__device__ __forceinline__ void multiply_group(Sums& sums, const Chunk& c, unsigned (&a)[2][4][4],
                                               unsigned x, unsigned less) {
    Sums products;
    begin_with(products, less + G * (ROWS * 4));
    multiply<2 * G>(products, c, a, x);
    multiply<2 * G + 1>(products, c, a, x);
    products_wait<0>();
#pragma unroll
    for (int b = 0; b < TILES; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            asm volatile("" : "+f"(products[b][i])::"memory");
            sums[b][i] += products[b][i] * __half2float(c.scales[G][i / 2]);
        }
    if (OFFSETS) {
        begin_with(products, less + G * (ROWS * 4));
#pragma unroll
        for (int b = 0; b < TILES; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[b][i] -= products[b][i] *
                              (__half2float(c.offsets[G][i / 2]) / strip::MIDDLE<BITS>);
    }
}

// A strip's sums to y. Two neighbouring out-features are put into one lane.
__device__ __forceinline__ void store_strip(const strip::Epilogue& to, const Sums& sums,
                                            int first_row, int rows, int strip,
                                            int out_features) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool is_odd = g % 2;
    const bool in_pairs = to.takes_pairs();
#pragma unroll
    for (int b = 0; b < TILES; ++b) {
        float values[2][2];  // of rows 2 t and 2 t + 1, out-features g and g + 8
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int n = strip * strip::HEIGHT + g + 8 * h;
                values[i][h] = sums[b][i + 2 * h] *
                               (h ? strip::UPPER_UNIT<BITS> : strip::LOWER_UNIT);
                if (n < out_features) values[i][h] = to.biased(n, values[i][h]);
            }
            if (GATED) values[i][0] = strip::silu(values[i][0]) * values[i][1];
        }
        const int m = 8 * b + 2 * t + is_odd;
#pragma unroll
        for (int h = 0; h < (GATED ? 1 : 2); ++h) {
            const float mine = is_odd ? values[1][h] : values[0][h];
            const float other = __shfl_xor_sync(~0u, is_odd ? values[0][h] : values[1][h], 4);
            const float low = is_odd ? other : mine, high = is_odd ? mine : other;
            const int n = strip * strip::HEIGHT + g - is_odd + 8 * h;
            const int column = GATED ? strip * 8 + g - is_odd : n;
            if (m >= rows || n >= out_features) continue;
            if (in_pairs) {
                to.store_pair(first_row + m, column, low, high);
            } else {
                to.store(first_row + m, column, low);
                if (n + 1 < out_features) to.store(first_row + m, column + 1, high);
            }
        }
    }
}

#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
strip_order(const __half* x, const uint4* __restrict__ words, const __half* __restrict__ scales,
            const __half* __restrict__ offsets, const __half* __restrict__ bias,
            const __half* residual, __half* y, int rows, int out_features, int in_features,
            int strips, int chunks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    allow_next();
    extern __shared__ char room[];
    __shared__ __align__(8) unsigned long long barriers[2 * DEPTH];
    const unsigned x_at = (shared_address(room) + 1023) & ~1023u;  // swizzle's period
    const unsigned full = shared_address(barriers), empty = full + 8 * DEPTH;
    const int first_row = blockIdx.y * ROWS;
    rows = min(rows - first_row, ROWS);
    if (threadIdx.x == 0) {
        for (int i = 0; i < DEPTH; ++i) {
            barrier_init(full + 8 * i, 128 * PASSES);
            barrier_init(empty + 8 * i, 4 * CONSUMERS * TELLERS);
        }
        barrier_init_done();
    }
    __syncthreads();
    // The same for all lanes, and the compiler is to know it.
    const int of_all = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int group = of_all / 4, warp = of_all % 4, lane = threadIdx.x % 32;
    const int tiles = (strips + 3) / 4, step = CONSUMERS * gridDim.x;
    const int rounds = (tiles - blockIdx.x + step - 1) / step;
    if (group == CONSUMERS) {
        wait_for_previous();
        lay_out(x_at, full, empty, x + static_cast<size_t>(first_row) * in_features, rows,
                in_features, chunks, rounds);
        return;
    }
    const bool stays = chunks <= DEPTH;
    const int g = lane / 4, t = lane % 4, slots = stays ? chunks : DEPTH;
    int tile = group * gridDim.x + blockIdx.x;
    const auto strip_of = [&](int tile) { return min(4 * tile + warp, strips - 1); };
    const uint4* words_at = words + (size_t)strip_of(tile) * chunks * (4 * BLOCK_VECTORS) + lane;
    size_t scale_at = (size_t)strip_of(tile) * chunks * 32 + g;
    Chunk now[2];
    load_chunk(now[0], words_at, scales + scale_at, offsets + scale_at);
    const strip::Epilogue epilogue{bias, residual, y, GATED ? out_features / 2 : out_features};
    const unsigned x_low = (x_at & 0x3ffff) >> 4 | 1 << 16;
    wait_for_previous();
    Turn turn;
    for (int round = 0; round < rounds; ++round, tile += step) {
        Sums sums = {};
        unsigned a[2][4][4];
        if (tile >= tiles) {  // others have one more: what they share is let go for them
            for (int chunk = 0; chunk < chunks && !stays; ++chunk) {
                barrier_wait(full + 8 * turn.slot, turn.parity);
                if (lane < TELLERS) barrier_arrive(empty + 8 * turn.slot);
                turn.advance(slots, stays);
            }
            continue;
        }
        const int next = tile + step < tiles ? tile + step : tile;
        const auto take = [&](bool is_last, const Chunk& these, Chunk& then) {
            if (is_last) {
                words_at = words + (size_t)strip_of(next) * chunks * (4 * BLOCK_VECTORS) + lane;
                scale_at = (size_t)strip_of(next) * chunks * 32 + g;
            } else {
                words_at += 4 * BLOCK_VECTORS, scale_at += 32;
            }
            load_chunk(then, words_at, scales + scale_at, offsets + scale_at);
            barrier_wait(full + 8 * turn.slot, turn.parity);
            const unsigned x_of = x_low + turn.slot * (CHUNK_BYTES / 16);
            const unsigned less = x_at + DEPTH * CHUNK_BYTES + turn.slot * LESS_BYTES + t * 8;
            multiply_group<0>(sums, these, a, x_of, less);
            multiply_group<1>(sums, these, a, x_of, less);
            __syncwarp();
            if (!stays && lane < TELLERS) barrier_arrive(empty + 8 * turn.slot);
            turn.advance(slots, stays);
        };
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk += 2) {
            take(false, now[0], now[1]);
            take(chunk + 2 == chunks, now[1], now[0]);
        }
        const int strip = 4 * tile + warp;
        if (strip < strips) store_strip(epilogue, sums, first_row, rows, strip, out_features);
    }
#endif
}
