// A warpgroup's sums to rows of y through shared memory (sm_90), in stores of 16 bytes.
//
// The including source defines ROW_TILES and SILU. The warpgroup holds four strips, one a warp, and
// passes up to 64 rows of x at a time through STAGING_BYTES of its own.
#pragma once
#include "gemm_units.cuh"
#include "async_copy.cuh"
#include "tensor_core.cuh"

constexpr int STAGING_BYTES = 64 * 128;
constexpr int STORED_EIGHTS = ROW_TILES < 8 ? ROW_TILES : 8;  // eights of rows at a time
constexpr int STORED_PIECES = SILU ? 4 : 8;  // 16-byte pieces of a row of y from four strips

// Four 8 x 8 tiles of 16-bit values, each transposed; lane l gives the place of row l % 8 of tile
// l / 8.
__device__ __forceinline__ void store_tiles_turned(unsigned at, const unsigned (&tiles)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(tiles[0]), "r"(tiles[1]), "r"(tiles[2]), "r"(tiles[3])
                 : "memory");
}

// Of the four warps of this warpgroup; barrier 1 is that of all summing threads.
__device__ __forceinline__ void warpgroup_barrier() {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + (int)(threadIdx.x >> 7)) : "memory");
}

// 16-byte pieces lie exclusive-ored by the row: neither side asks a bank twice at a time.
__device__ __forceinline__ unsigned staged(unsigned staging, int row, int piece) {
    return staging + row * 128 + ((piece ^ row) & 7) * 16;
}

// Eight neighbouring out-features of one row of x; y is `width` features wide.
__device__ __forceinline__ void store_piece(const Problem& p, int row, int feature, int width,
                                            uint4 piece) {
    if (row >= p.m || feature >= width) return;
    const size_t at = (size_t)row * width + feature;
    __half2 v[4];
    *reinterpret_cast<uint4*>(v) = piece;
    if (width % 8 == 0) {
        if (p.residual != nullptr) {
            __half2 add[4];
            *reinterpret_cast<uint4*>(add) = *reinterpret_cast<const uint4*>(p.residual + at);
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = __hadd2(v[i], add[i]);
        }
        *reinterpret_cast<uint4*>(p.y + at) = *reinterpret_cast<const uint4*>(v);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (feature + i >= width) return;
        const __half one = i % 2 ? __high2half(v[i / 2]) : __low2half(v[i / 2]);
        p.y[at + i] = p.residual != nullptr ? __hadd(one, p.residual[at + i]) : one;
    }
}

// strip, row: the warpgroup's first ones.
__device__ __forceinline__ void store_through(unsigned staging, const Problem& p, int strip,
                                              int row, float (&sums)[ROW_TILES][4]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    const int width = SILU ? p.n / 2 : p.n;
    float bias[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = (strip + warp) * 16 + (lane >> 2) + 8 * half;
        if (p.bias != nullptr && own < p.n) bias[half] = __half2float(p.bias[own]);
    }
#pragma unroll
    for (int first = 0; first < ROW_TILES; first += STORED_EIGHTS) {
        constexpr int AT_ONCE = SILU ? 4 : 2;  // eights of rows
#pragma unroll
        for (int r = 0; r < STORED_EIGHTS; r += AT_ONCE) {
            unsigned tiles[4];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const float(&c)[4] = sums[first + r + i];
                const float v[4] = {c[0] + bias[0], c[1] + bias[0], c[2] + bias[1], c[3] + bias[1]};
                if constexpr (SILU) {
                    tiles[i] = half_pair(silu(v[0]) * v[2], silu(v[1]) * v[3]);
                } else {
                    tiles[2 * i] = half_pair(v[0], v[1]);
                    tiles[2 * i + 1] = half_pair(v[2], v[3]);
                }
            }
            const int tile = lane >> 3;
            const int own_row = (r + (SILU ? tile : tile / 2)) * 8 + (lane & 7);
            const int piece = SILU ? warp : 2 * warp + (tile & 1);
            store_tiles_turned(staged(staging, own_row, piece), tiles);
        }
        warpgroup_barrier();
#pragma unroll
        for (int i = 0; i < 8 * STORED_EIGHTS * STORED_PIECES; i += 128) {
            const int place = i + (threadIdx.x & 127);
            const int own_row = place / STORED_PIECES, piece = place % STORED_PIECES;
            store_piece(p, row + first * 8 + own_row, strip * (SILU ? 8 : 16) + piece * 8, width,
                        shared_16(staged(staging, own_row, piece)));
        }
        warpgroup_barrier();
    }
}
