// The seed's tiled GEMM for prompts: y[m, n] = sum_k x[m, k] w[n, k] + bias[n], on the bytes on
// disk, CUDA cores, fp32 sums. A block of 256 threads makes a tile of 32 rows of x by 64 of W, 32
// columns of K at a time; a thread owns 2 x 4 sums. The weights of a tile are dequantised into
// shared memory and into nowhere else, so memory depends on the tile only. W is read M / 32 times.
// Loses to tensor cores everywhere, and to dequantise + cuBLAS from a few hundred rows on.
//
// BITS 4 or 3; AFFINE see packed_group. STAGES 0: plain loads, as in the seed, any N and K.
// STAGES 1 to 3: codes and x come by cp.async, so many tiles ahead of their use less one; K is a
// multiple of 32 then. Groups are multiples of 8 columns or the whole row.
#include "async_copy.cuh"
#include "packed_codes.cuh"
#include "packed_group.cuh"

constexpr int BM = 32, BN = 64, BK = 32, THREADS = 256;
constexpr int THREAD_ROWS = 2, THREAD_COLUMNS = 4;
constexpr int TILE_BYTES = BK * BITS / 8;  // codes of one row of W in a tile: 16 or 12
constexpr int BUFFERS = STAGES > 1 ? STAGES : 1;
static_assert(BM * BN == THREADS * THREAD_ROWS * THREAD_COLUMNS, "every sum has one owner");

struct Layer {
    const unsigned char* codes;
    const __half* scales;
    const shift_type* shifts;
    int n, k, group, bytes, groups;
};

struct Tiles {
    alignas(16) __half a[BUFFERS][BM][BK];
    __half b[BK][BN + 1];  // one column of padding keeps a warp's stores out of one bank
#if STAGES
    alignas(16) unsigned char raw[BUFFERS][BN][TILE_BYTES];
#endif
};

// A row of W in the tile: its codes from column k0 + first on, as weights down a column of b.
template <int COUNT>
__device__ __forceinline__ void put_weights(const Layer& layer, Tiles& tiles, const int* code,
                                            int row, int column, int k0, int first) {
    const size_t base = static_cast<size_t>(row) * layer.groups;
    const bool inside = row < layer.n && k0 + first < layer.k;
    // Groups are multiples of 8, so the codes of one call share a group.
    const Group its = inside ? read_group(layer.scales, layer.shifts,
                                          base + (k0 + first) / layer.group)
                             : Group{0.f, 0.f};
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const bool real = inside && k0 + first + i < layer.k;
        tiles.b[first + i][column] = __float2half(real ? its.weight(code[i]) : 0.f);
    }
}

__device__ __forceinline__ unsigned code_byte(const Layer& layer, const Tiles& tiles, int buffer,
                                              int row, int column, int k0, int at) {
#if STAGES
    return tiles.raw[buffer][column][at];
#else
    const int byte = k0 / 8 * BITS + at;
    if (row >= layer.n || byte >= layer.bytes) return 0u;
    return layer.codes[static_cast<size_t>(row) * layer.bytes + byte];
#endif
}

// W4: half a warp a row, a lane one byte. W3: a quarter of a quarter, four lanes a row and three
// bytes a lane, so that eight warps cover the 64 rows in one go.
__device__ __forceinline__ void unpack_tile(const Layer& layer, Tiles& tiles, int buffer, int n0,
                                            int k0) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if BITS == 4
#pragma unroll
    for (int turn = 0; turn < BN / 16; ++turn) {
        const int column = turn * 16 + warp * 2 + lane / 16, at = lane % 16;
        int code[2];
        unpack_w4(code_byte(layer, tiles, buffer, n0 + column, column, k0, at), code);
        put_weights<2>(layer, tiles, code, n0 + column, column, k0, 2 * at);
    }
#else
    const int column = warp * 8 + (lane >> 2), eight = lane & 3;
    unsigned byte[3];
    int code[8];
#pragma unroll
    for (int i = 0; i < 3; ++i)
        byte[i] = code_byte(layer, tiles, buffer, n0 + column, column, k0, 3 * eight + i);
    unpack_w3(byte[0], byte[1], byte[2], code);
    put_weights<8>(layer, tiles, code, n0 + column, column, k0, 8 * eight);
#endif
}

#if STAGES
// x and the codes of the tile from column k0 on, on their way into `buffer`; one group in any case.
__device__ __forceinline__ void fetch(const __half* x, const Layer& layer, Tiles& tiles, int buffer,
                                      int rows, int m0, int n0, int k0) {
    if (k0 < layer.k) {
        for (int i = threadIdx.x; i < BM * BK / 8; i += THREADS) {
            const int r = i / 4, c = i % 4 * 8;
            const bool real = m0 + r < rows;
            copy_16_or_zero(shared_address(&tiles.a[buffer][r][c]),
                            x + static_cast<size_t>(real ? m0 + r : 0) * layer.k + k0 + c, real);
        }
        constexpr int PIECE = BITS == 4 ? 16 : 4, PIECES = TILE_BYTES / PIECE;
        for (int i = threadIdx.x; i < BN * PIECES; i += THREADS) {
            const int r = i / PIECES, at = i % PIECES * PIECE;
            const bool real = n0 + r < layer.n;
            const unsigned char* from = layer.codes +
                static_cast<size_t>(real ? n0 + r : 0) * layer.bytes + k0 / 8 * BITS + at;
            const unsigned to = shared_address(&tiles.raw[buffer][r][at]);
#if BITS == 4
            copy_16_or_zero(to, from, real);
#else
            const int bytes = real ? 4 : 0;
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                         "r"(bytes));
#endif
        }
    }
    close_group();
}
#else
__device__ __forceinline__ void load_a(const __half* x, const Layer& layer, Tiles& tiles, int rows,
                                       int m0, int k0) {
    for (int i = threadIdx.x; i < BM * BK / 2; i += THREADS) {
        const int r = i / 16, c = i % 16 * 2;
        const __half* from = x + static_cast<size_t>(m0 + r) * layer.k + k0 + c;
        __half2 pair = __float2half2_rn(0.f);
        if (m0 + r < rows && k0 + c + 1 < layer.k && layer.k % 2 == 0)
            pair = *reinterpret_cast<const __half2*>(from);
        else if (m0 + r < rows && k0 + c < layer.k)
            pair = __halves2half2(from[0], k0 + c + 1 < layer.k ? from[1] : __float2half(0.f));
        *reinterpret_cast<__half2*>(&tiles.a[0][r][c]) = pair;
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
seed_gemm(const __half* __restrict__ x, const unsigned char* __restrict__ codes,
          const __half* __restrict__ scales, const shift_type* __restrict__ shifts,
          const __half* __restrict__ bias, __half* __restrict__ y, int rows, int n, int k,
          int group) {
    __shared__ Tiles tiles;
    const Layer layer{codes, scales, shifts, n, k, group, row_bytes<BITS>(k),
                      (k + group - 1) / group};
    const int m0 = blockIdx.y * BM, n0 = blockIdx.x * BN;
    const int row = THREAD_ROWS * (threadIdx.x >> 4), column = THREAD_COLUMNS * (threadIdx.x & 15);
    float sum[THREAD_ROWS][THREAD_COLUMNS] = {};
#if STAGES
    for (int ahead = 0; ahead < STAGES - 1; ++ahead)
        fetch(x, layer, tiles, ahead, rows, m0, n0, ahead * BK);
#endif
    for (int k0 = 0, buffer = 0; k0 < k; k0 += BK, buffer = (buffer + 1) % BUFFERS) {
#if STAGES
        const int next = (buffer + STAGES - 1) % BUFFERS;
        fetch(x, layer, tiles, next, rows, m0, n0, k0 + (STAGES - 1) * BK);
        wait_for_groups<STAGES - 1>();
        __syncthreads();
#else
        load_a(x, layer, tiles, rows, m0, k0);
#endif
        unpack_tile(layer, tiles, buffer, n0, k0);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < BK; ++j) {
            const float first = __half2float(tiles.a[buffer][row][j]);
            const float second = __half2float(tiles.a[buffer][row + 1][j]);
#pragma unroll
            for (int c = 0; c < THREAD_COLUMNS; ++c) {
                const float weight = __half2float(tiles.b[j][column + c]);
                sum[0][c] = fmaf(first, weight, sum[0][c]);
                sum[1][c] = fmaf(second, weight, sum[1][c]);
            }
        }
        __syncthreads();
    }
    for (int r = 0; r < THREAD_ROWS; ++r)
        for (int c = 0; c < THREAD_COLUMNS; ++c) {
            const int m = m0 + row + r, to = n0 + column + c;
            if (m < rows && to < n)
                y[static_cast<size_t>(m) * n + to] =
                    __float2half(sum[r][c] + (bias ? __half2float(bias[to]) : 0.f));
        }
}
