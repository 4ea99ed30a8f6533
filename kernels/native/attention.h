// Attention of single rows over the paged cache of one layer.
//
// The keys of a row are cut into at most PARTS runs, whose length depends on the row alone; each run
// of each KV head is an item of work, and the runs are joined in order. So threads share a single
// long row, and a row's bits depend neither on them nor on its neighbours.
#pragma once

#include <cstdint>

#include "linear.h"

namespace native {

constexpr int PARTS = 8;
constexpr int TILE = 64;  // keys scored together
constexpr int MOST_QUERIES = 32;  // query heads that share a KV head

// What all layers of a model share; mirrored by ctypes in layers.py.
struct Shape {
    int32_t hidden;
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t intermediate;
    int32_t block_tokens;
    int32_t window;  // keys a row sees, itself included; 0 for all
    float eps;
    float query_scale;

    int64_t queries_width() const { return int64_t{heads} * head_dim; }
    int64_t kv_width() const { return int64_t{kv_heads} * head_dim; }
};

// The rows of one forward. Row r is a token at positions[r] of the sequence sequences[r] (r itself
// where null), whose blocks are tables[sequence][0..]; its keys and values go to slots[r].
struct Step {
    float *x;  // [rows, hidden], changed in place
    const int64_t *positions;
    const int64_t *slots;
    const int32_t *sequences;
    const int32_t *tables;
    int64_t table_width;
    const float *cos;  // [positions, head_dim]; the first half of sin carries its minus
    const float *sin;
    int64_t rows;
};

// Which items there are: computed once, the same for every layer.
class AttentionItems {
  public:
    AttentionItems(const Shape &shape, const Step &step);  // throws bad_alloc

    int64_t count() const { return first_.data()[rows_]; }

    // Score one run of one KV head: sums of values, largest score and sum of weights, per head.
    void attend(int64_t item, const float *queries, int64_t stride, const float *kv) const;

    // One row's runs joined: [heads * head_dim].
    void join(int64_t row, float *out) const;

  private:
    int64_t run_length(int64_t row) const;
    int64_t low(int64_t row) const;
    float *part(int64_t row, int64_t kv_head, int64_t run) const;

    const Shape &shape_;
    const Step &step_;
    int64_t rows_;
    int group_;
    int64_t part_size_;
    Buffer<int64_t> first_;
    Buffer<float> parts_;
};

}  // namespace native
