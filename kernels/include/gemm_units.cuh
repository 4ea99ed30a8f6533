// What a product of many rows is, and how its units of work lie in it. A unit is a tile of
// TILE_STRIPS strips by TILE_M rows, or one of `splits` shares of K of one: the first `whole` tiles
// are units, the others are shared out so that the last round of blocks is short. A unit is computed
// the same way whichever block does it, so the number of blocks changes no bit of the result.
//
// The including source defines TILE_STRIPS, TILE_M and CHUNK_STEPS (steps of 64 columns that cannot
// be cut apart) as constants.
#pragma once
#include <cuda_fp16.h>

struct Problem {
    const __half* x;         // [m, k]
    const char* weights;     // strips
    const __half* scales;    // [n / 16, groups, 16]
    const __half* offsets;   // like scales; read if OFFSETS
    const __half* bias;      // [n] or null
    const __half* residual;  // like y, or null: added last
    __half* y;               // [m, n], or [m, n / 2] if SILU
    float* partials;         // fragments of units that share a tile
    int* arrivals;           // a zero for each shared tile, left zero again
    int m, n, k, blocks, groups, whole, splits, band;  // blocks of 64 columns in a stored strip
};

struct Unit {
    int shared;  // which of the tiles that several units share, or -1
    int split, strip, row, first_step, steps;
};

__device__ __forceinline__ int steps_of(const Problem& p) {
    const int steps = (p.k + 63) / 64;
    return (steps + CHUNK_STEPS - 1) / CHUNK_STEPS * CHUNK_STEPS;
}

__device__ __forceinline__ int strips_of(const Problem& p) { return (p.n + 15) / 16; }

__device__ __forceinline__ int units_of(const Problem& p) {
    const int across = (strips_of(p) + TILE_STRIPS - 1) / TILE_STRIPS;
    const int tiles = across * ((p.m + TILE_M - 1) / TILE_M);
    return p.whole + (tiles - p.whole) * p.splits;
}

// Rows change fastest inside a band of `band` row tiles, so that blocks that run together share
// weights, and the band's rows of x stay in L2 while all weights pass.
__device__ __forceinline__ Unit unit_at(const Problem& p, int index) {
    const int across = (strips_of(p) + TILE_STRIPS - 1) / TILE_STRIPS;
    const int row_tiles = (p.m + TILE_M - 1) / TILE_M;
    Unit u;
    const bool is_whole = index < p.whole;
    u.shared = is_whole ? -1 : (index - p.whole) / p.splits;
    u.split = is_whole ? 0 : (index - p.whole) % p.splits;
    const int tile = is_whole ? index : p.whole + u.shared;
    const int first = tile / (p.band * across) * p.band;
    const int width = min(p.band, row_tiles - first);
    const int inside = tile - first * across;
    u.strip = inside / width * TILE_STRIPS;
    u.row = (first + inside % width) * TILE_M;
    // Equal shares in whole chunks; the last one may be shorter, never empty (the host sees to it).
    const int chunks = steps_of(p) / CHUNK_STEPS;
    const int share = is_whole ? chunks : (chunks + p.splits - 1) / p.splits;
    u.first_step = u.split * share * CHUNK_STEPS;
    u.steps = min(share, chunks - u.split * share) * CHUNK_STEPS;
    return u;
}

// Past the end of W the last strip is computed again, and not stored.
__device__ __forceinline__ int strip_of(const Problem& p, const Unit& u, int local) {
    return min(u.strip + local, strips_of(p) - 1);
}
