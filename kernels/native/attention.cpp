// See attention.h.
#include "attention.h"

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace native {
namespace {

// Scores of `count` keys for the query heads that share a KV head: scores[head][key].
template <int DIM>
void score(const float *queries, const float *const *keys, int count, int group, int dim,
           float (*scores)[TILE]) {
    const int width = DIM != 0 ? DIM : dim;
    for (int j = 0; j < count; ++j) {
        for (int g = 0; g < group; ++g) {
            Eight even = {}, odd = {};
            for (int d = 0; d + 16 <= width; d += 16) {
                even = fused(load(queries + g * width + d), load(keys[j] + d), even);
                odd = fused(load(queries + g * width + d + 8), load(keys[j] + d + 8), odd);
            }
            if (width % 16 != 0) {
                const int d = width - 8;
                even = fused(load(queries + g * width + d), load(keys[j] + d), even);
            }
            scores[g][j] = sum(even + odd);
        }
    }
}

// sums[d] = shrink * sums[d] + weights of the keys times their values.
template <int DIM>
void gather(const float *weights, const float *const *values, int count, float shrink, int dim,
            float *sums) {
    const int width = DIM != 0 ? DIM : dim;
    for (int d = 0; d < width; d += 32) {
        const int lanes = std::min(4, (width - d) / 8);
        Eight total[4];
        for (int i = 0; i < lanes; ++i) total[i] = load(sums + d + 8 * i) * splat(shrink);
        if (lanes == 4) {
            for (int j = 0; j < count; ++j) {
                const Eight weight = splat(weights[j]);
                for (int i = 0; i < 4; ++i) {
                    total[i] = fused(weight, load(values[j] + d + 8 * i), total[i]);
                }
            }
        } else {
            for (int j = 0; j < count; ++j) {
                for (int i = 0; i < lanes; ++i) {
                    total[i] = fused(splat(weights[j]), load(values[j] + d + 8 * i), total[i]);
                }
            }
        }
        for (int i = 0; i < lanes; ++i) store(sums + d + 8 * i, total[i]);
    }
}

// Weights of one tile in place of its scores, padded to whole vectors; returns their sum.
float to_weights(float *scores, int count, float top) {
    for (int j = count; j < (count + 7) / 8 * 8; ++j) scores[j] = -INFINITY;
    Eight total = {};
    for (int j = 0; j < count; j += 8) {
        const Eight weight = exponential(load(scores + j) - splat(top));
        store(scores + j, weight);
        total += weight;
    }
    for (int j = count; j < (count + 7) / 8 * 8; ++j) total[j % 8] -= scores[j];
    return sum(total);
}

}  // namespace

AttentionItems::AttentionItems(const Shape &shape, const Step &step)
    : shape_(shape), step_(step), rows_(step.rows), group_(shape.heads / shape.kv_heads) {
    part_size_ = int64_t{group_} * (shape.head_dim + 2);
    int64_t *first = first_.reserve(rows_ + 1);
    first[0] = 0;
    for (int64_t row = 0; row < rows_; ++row) {
        const int64_t keys = step.positions[row] + 1 - low(row);
        const int64_t runs = (keys + run_length(row) - 1) / run_length(row);
        first[row + 1] = first[row] + runs * shape.kv_heads;
    }
    parts_.reserve(first[rows_] * part_size_);
}

int64_t AttentionItems::low(int64_t row) const {
    const int64_t keys = step_.positions[row] + 1;
    return shape_.window == 0 ? 0 : std::max<int64_t>(0, keys - shape_.window);
}

int64_t AttentionItems::run_length(int64_t row) const {
    const int64_t keys = step_.positions[row] + 1 - low(row);
    return std::max<int64_t>(1, (keys + PARTS * TILE - 1) / (PARTS * TILE)) * TILE;
}

float *AttentionItems::part(int64_t row, int64_t kv_head, int64_t run) const {
    const int64_t first = first_.data()[row];
    const int64_t runs = (first_.data()[row + 1] - first) / shape_.kv_heads;
    return parts_.data() + (first + kv_head * runs + run) * part_size_;
}

void AttentionItems::attend(int64_t item, const float *queries, int64_t stride,
                            const float *kv) const {
    const int64_t *first = first_.data();
    const int64_t row = std::upper_bound(first, first + rows_ + 1, item) - first - 1;
    const int64_t runs = (first[row + 1] - first[row]) / shape_.kv_heads;
    const int64_t kv_head = (item - first[row]) / runs, run = (item - first[row]) % runs;
    const int dim = shape_.head_dim, group = group_;
    const int64_t sequence = step_.sequences == nullptr ? row : step_.sequences[row];
    const int32_t *table = step_.tables + sequence * step_.table_width;
    const int64_t begin = low(row) + run * run_length(row);
    const int64_t end = std::min(step_.positions[row] + 1, begin + run_length(row));
    const float *mine = queries + row * stride + kv_head * group * dim;
    const int64_t token = 2 * shape_.kv_width();
    float *sums = part(row, kv_head, run), *tops = sums + group * dim, *totals = tops + group;
    std::fill(sums, sums + group * dim, 0.0f);
    std::fill(tops, tops + group, -INFINITY);
    std::fill(totals, totals + group, 0.0f);
    alignas(32) float scores[MOST_QUERIES][TILE];
    const float *keys[TILE], *values[TILE];
    for (int64_t key = begin; key < end; key += TILE) {
        const int count = static_cast<int>(std::min<int64_t>(TILE, end - key));
        for (int j = 0; j < count; ++j) {
            const int64_t block = (key + j) / shape_.block_tokens;
            const int64_t slot =
                table[block] * int64_t{shape_.block_tokens} + (key + j) % shape_.block_tokens;
            keys[j] = kv + slot * token + kv_head * dim;
            values[j] = keys[j] + shape_.kv_width();
        }
        (dim == 64    ? score<64>
         : dim == 128 ? score<128>
                      : score<0>)(mine, keys, count, group, dim, scores);
        for (int g = 0; g < group; ++g) {
            float top = tops[g];
            for (int j = 0; j < count; ++j) top = scores[g][j] > top ? scores[g][j] : top;
            const float shrink = std::exp(tops[g] - top);
            totals[g] = totals[g] * shrink + to_weights(scores[g], count, top);
            tops[g] = top;
            (dim == 64    ? gather<64>
             : dim == 128 ? gather<128>
                          : gather<0>)(scores[g], values, count, shrink, dim, sums + g * dim);
        }
    }
}

void AttentionItems::join(int64_t row, float *out) const {
    const int dim = shape_.head_dim, group = group_;
    const int64_t runs = (first_.data()[row + 1] - first_.data()[row]) / shape_.kv_heads;
    for (int64_t head = 0; head < shape_.heads; ++head) {
        const int64_t kv_head = head / group, g = head % group;
        float top = -INFINITY;
        for (int64_t run = 0; run < runs; ++run) {
            top = std::max(top, part(row, kv_head, run)[group * dim + g]);
        }
        float total = 0.0f;
        float *to = out + head * dim;
        std::fill(to, to + dim, 0.0f);
        for (int64_t run = 0; run < runs; ++run) {
            const float *sums = part(row, kv_head, run);
            const float share = std::exp(sums[group * dim + g] - top);
            total += share * sums[group * dim + group + g];
            for (int d = 0; d < dim; d += 8) {
                store(to + d, fused(splat(share), load(sums + g * dim + d), load(to + d)));
            }
        }
        const Eight inverse = splat(1.0f / total);
        for (int d = 0; d < dim; d += 8) store(to + d, load(to + d) * inverse);
    }
}

}  // namespace native
