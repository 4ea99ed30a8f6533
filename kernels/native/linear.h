// y = x @ W.T + bias over packed weights, for few rows.
//
// Activations become 16-bit integers per block of 32 (one fp32 scale each), weights stay 4- or
// 8-bit integers; a block's products are summed exactly in 32 bits, blocks in fp32 in the order of
// K. A row of the result is the same bits whatever rows and threads are beside it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "threads.h"

namespace native {

constexpr int BLOCK = 32;  // columns that share a scale of x
constexpr int LANES = 8;   // out-features side by side in a record of weights

enum Kind : int32_t { SYMMETRIC = 0, ZEROS = 1, OFFSETS = 2 };

// A prepared layer; mirrored by ctypes in layout.py, which says how the weights lie.
struct Linear {
    const uint8_t *weights;
    const float *bias;       // [n] or null
    const int32_t *columns;  // [k] or null: stored column c multiplies x[columns[c]]
    int64_t n;
    int64_t k;
    int32_t bits;              // 4 or 8
    int32_t kind;              // Kind
    int32_t blocks_per_group;  // blocks of 32 columns that share a scale of the weights
    int32_t middle;            // what is subtracted from every stored code; ZEROS hold it already

    int64_t blocks() const { return (k + BLOCK - 1) / BLOCK; }
    int64_t strips() const { return (n + LANES - 1) / LANES; }
    int64_t groups() const { return (blocks() + blocks_per_group - 1) / blocks_per_group; }
    int64_t strip_bytes() const {
        const int64_t heads = groups() * (kind == SYMMETRIC ? 16 : 32);
        return heads + blocks() * BLOCK * LANES * bits / 8;
    }
};

// Memory that only grows, aligned for vectors.
template <typename T> class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer() { std::free(data_); }

    // At least `count` elements, contents undefined. Throws bad_alloc.
    T *reserve(int64_t count) {
        if (count > count_) {
            std::free(data_);
            count_ = 0;
            const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
            data_ = static_cast<T *>(std::aligned_alloc(64, bytes));
            if (data_ == nullptr) throw std::bad_alloc();
            count_ = count;
        }
        return data_;
    }
    T *data() const { return data_; }

  private:
    T *data_ = nullptr;
    int64_t count_ = 0;
};

// Rows of x as integers: x[r][c] = scales[r][c / 32] * codes[r][c] within half a scale. sums: of the
// codes of a block.
struct Rows {
    int16_t *all_codes;
    float *all_scales;
    float *all_sums;
    int64_t blocks;

    int16_t *codes(int64_t row) const { return all_codes + row * blocks * BLOCK; }
    float *scales(int64_t row) const { return all_scales + row * blocks; }
    float *sums(int64_t row) const { return all_sums + row * blocks; }
};

// Where they lie, for rows of any width up to the one reserved.
class RowMemory {
  public:
    void reserve(int64_t rows, int64_t most_blocks) {
        codes_.reserve(rows * most_blocks * BLOCK);
        scales_.reserve(rows * most_blocks);
        sums_.reserve(rows * most_blocks);
    }
    Rows rows(int64_t blocks) const {
        return {codes_.data(), scales_.data(), sums_.data(), blocks};
    }

  private:
    Buffer<int16_t> codes_;
    Buffer<float> scales_;
    Buffer<float> sums_;
};

// One row x[0..k-1] to integers. A block with a NaN or infinity gets the scale NaN, so that no
// broken number is hidden. columns as in Linear.
void quantise_row(const float *x, int64_t k, const int32_t *columns, const Rows &rows,
                  int64_t row);

// Where a linear's result goes: y[row * stride + feature]; added to what is there if `add`.
struct Target {
    float *y;
    int64_t stride;
    bool add;
};

// Every thread of the team computes its part; the caller puts barriers around.
void multiply(Team &team, const Linear &layer, const Rows &rows, int64_t count, Target target);

}  // namespace native
