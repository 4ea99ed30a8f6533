// One step of K of a warp's strips in shared memory: how it gets there and what a lane finds in it.
//
// Each lane copies exactly the vectors that it will unpack itself, so words need no barrier; the few
// bytes of scales are copied by the first lanes for all, so they need one of the warp.
//
// Defines: BITS, STRIPS of a warp, GROUP (0: a group is whole steps), OFFSETS.
#pragma once
#include "async_copy.cuh"
#include "strip.cuh"

namespace strip {

using Packed = Layout<BITS>;
constexpr int SPAN_ROWS = HEIGHT * STRIPS;                     // a span: the strips of a warp
constexpr int STEP_GROUPS = GROUP ? Packed::STEP / GROUP : 1;  // scales of a row and step

// In this order: the lanes' vectors, scales, offsets; strip by strip.
constexpr int WORD_BYTES = Packed::VECTORS * LANES * 16;
constexpr int SCALE_BYTES = STEP_GROUPS * HEIGHT * 2;
constexpr int SCALES_AT = STRIPS * WORD_BYTES;
constexpr int OFFSETS_AT = SCALES_AT + STRIPS * SCALE_BYTES;
constexpr int STEP_BYTES = OFFSETS_AT + OFFSETS * STRIPS * SCALE_BYTES;
constexpr int SCALE_VECTORS = SCALE_BYTES / 16;
constexpr int SCALE_COPIES = (STRIPS * SCALE_VECTORS + LANES - 1) / LANES;  // of the busiest lane

struct Weights {
    const uint4* words;
    const __half* scales;
    const __half* offsets;
    int strips, steps, groups, steps_per_group;
};

// A lane's way through the weights: addresses that are moved along, not computed for each step.
struct Stream {
    const uint4* words[STRIPS];
    const __half* scales[SCALE_COPIES];
    const __half* offsets[SCALE_COPIES];

    STRIP_INLINE void seek(const Weights& w, int span, int step, int lane) {
        // The last span may reach past the last strip: it reads that one again and stores nothing.
        const auto strip_of = [&](int s) { return min(span * STRIPS + s, w.strips - 1); };
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) {
            const size_t at = static_cast<size_t>(strip_of(s)) * w.steps + step;
            words[s] = w.words + at * Packed::VECTORS * LANES + lane;
        }
#pragma unroll
        for (int c = 0; c < SCALE_COPIES; ++c) {
            const int i = min(c * LANES + lane, STRIPS * SCALE_VECTORS - 1);
            const int group = GROUP ? step * STEP_GROUPS : 0;
            const size_t at = (static_cast<size_t>(strip_of(i / SCALE_VECTORS)) * w.groups + group) *
                                  HEIGHT + i % SCALE_VECTORS * 8;
            scales[c] = w.scales + at;
            offsets[c] = OFFSETS ? w.offsets + at : nullptr;
        }
    }

    STRIP_INLINE void skip(int steps) {
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) words[s] += steps * Packed::VECTORS * LANES;
        if (GROUP == 0) return;
#pragma unroll
        for (int c = 0; c < SCALE_COPIES; ++c) {
            scales[c] += steps * STEP_GROUPS * HEIGHT;
            if (OFFSETS) offsets[c] += steps * STEP_GROUPS * HEIGHT;
        }
    }

    // Step `step`, which the stream points at, to a slot.
    STRIP_INLINE void fetch(const Weights& w, int step, unsigned slot, int lane) const {
        const unsigned to = slot + lane * 16;
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int v = 0; v < Packed::VECTORS; ++v)
                copy_16(to + s * WORD_BYTES + v * LANES * 16, words[s] + v * LANES);
        const int group = GROUP ? 0 : step / w.steps_per_group * HEIGHT;
#pragma unroll
        for (int c = 0; c < SCALE_COPIES; ++c) {
            if (c * LANES + lane >= STRIPS * SCALE_VECTORS) break;
            copy_16(to + SCALES_AT + c * LANES * 16, scales[c] + group);
            if (OFFSETS) copy_16(to + OFFSETS_AT + c * LANES * 16, offsets[c] + group);
        }
    }
};

STRIP_INLINE void read_vectors(unsigned slot, int s, int lane, uint4 (&vectors)[Packed::VECTORS]) {
#pragma unroll
    for (int v = 0; v < Packed::VECTORS; ++v)
        vectors[v] = shared_16(slot + s * WORD_BYTES + (v * LANES + lane) * 16);
}

// Scales (or offsets, `at` = OFFSETS_AT) of the lane's two rows in one group of the step.
STRIP_INLINE void read_scales(unsigned slot, int at, int s, int group, int g, __half (&rows)[2]) {
    const unsigned from = slot + at + s * SCALE_BYTES + group * HEIGHT * 2 + g * 2;
    rows[0] = __ushort_as_half(static_cast<unsigned short>(shared_2(from)));
    rows[1] = __ushort_as_half(static_cast<unsigned short>(shared_2(from + 16)));
}

// The group of the step that a lane's 16 columns of a block lie in.
STRIP_INLINE int group_of(int block, int t) {
    return GROUP ? (block * BLOCK + 16 * t) / (GROUP ? GROUP : 1) : 0;
}

STRIP_INLINE RowScales read_row_scales(unsigned slot, int s, int group, int g) {
    __half scale[2], offset[2] = {};
    read_scales(slot, SCALES_AT, s, group, g, scale);
    if (OFFSETS) read_scales(slot, OFFSETS_AT, s, group, g, offset);
    return {{__half2half2(scale[0]), __half2half2(scale[1])},
            {__half2half2(offset[0]), __half2half2(offset[1])}};
}

}  // namespace strip
