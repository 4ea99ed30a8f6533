// A run of decoder layers over a few rows in one call: one team of threads goes through all stages
// of all layers, with a barrier between two. Every row is computed by itself.
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "linear.h"
#include "vectors.h"

namespace native {

// The weights of one layer; mirrored by ctypes in layers.py. q, k, v (gate, up) are one linear or
// several whose outputs stand side by side, the rest null.
struct Layer {
    const float *attn_norm;
    const float *mlp_norm;
    const float *q_norm;  // [head_dim] or null
    const float *k_norm;
    const Linear *qkv[3];
    const Linear *o;
    const Linear *gate_up[2];
    const Linear *down;
};

namespace {

// What the threads of a call share between stages, and a row of each thread's own; kept by the
// calling thread for the next call. All of it is there before the team starts: an exception in one
// of its threads would end the process.
struct Scratch {
    RowMemory rows;
    Buffer<float> qkv;
    Buffer<float> gate_up;
    Buffer<float> own;
};

// out = x / sqrt(mean(x^2) + eps) * weight; out may be x.
void norm(const float *x, const float *weight, float eps, int64_t width, float *out) {
    Eight squares = {};
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) squares = fused(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < width; ++i) total += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
    for (i = 0; i + 8 <= width; i += 8) {
        store(out + i, load(x + i) * splat(scale) * load(weight + i));
    }
    for (; i < width; ++i) out[i] = x[i] * scale * weight[i];
}

// out = silu(gate) * up
void silu_mul(const float *gate, const float *up, int64_t width, float *out) {
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) {
        const Eight g = load(gate + i);
        store(out + i, g / (splat(1.0f) + exponential(-g)) * load(up + i));
    }
    for (; i < width; ++i) {
        const Eight g = splat(gate[i]);
        out[i] = (g / (splat(1.0f) + exponential(-g)))[0] * up[i];
    }
}

// One head turned by its position's angle and scaled, in place.
void rotate(float *head, const float *cos, const float *sin, float scale, int dim) {
    const int half = dim / 2;
    for (int i = 0; i < half; ++i) {
        const float first = head[i], second = head[i + half];
        head[i] = (first * cos[i] + second * sin[i]) * scale;
        head[i + half] = (second * cos[i + half] + first * sin[i + half]) * scale;
    }
}

class Pass {
  public:
    // own: a row as wide as any that is quantised.
    Pass(Team &team, int number, const Shape &shape, const Step &step, Scratch &scratch,
         const AttentionItems &items, float *own)
        : team_(team), number_(number), shape_(shape), step_(step), scratch_(scratch),
          items_(items), own_(own), qkv_width_(shape.queries_width() + 2 * shape.kv_width()) {}

    void run(const Layer &layer, float *kv) {
        quantise(layer.qkv[0]->blocks(), shape_.hidden, [&](int64_t row, float *out) {
            norm(step_.x + row * shape_.hidden, layer.attn_norm, shape_.eps, shape_.hidden, out);
        });
        side_by_side(layer.qkv, 3, scratch_.qkv.data(), qkv_width_);
        each_row([&](int64_t row) { turn_and_keep(layer, row, kv); });
        for (int64_t i = team_.take(1); i < items_.count(); i = team_.take(1)) {
            items_.attend(i, scratch_.qkv.data(), qkv_width_, kv);
        }
        team_.barrier();
        quantise(layer.o->blocks(), shape_.queries_width(), [&](int64_t row, float *out) {
            items_.join(row, out);
        });
        linear(*layer.o, {step_.x, shape_.hidden, true});
        quantise(layer.gate_up[0]->blocks(), shape_.hidden, [&](int64_t row, float *out) {
            norm(step_.x + row * shape_.hidden, layer.mlp_norm, shape_.eps, shape_.hidden, out);
        });
        side_by_side(layer.gate_up, 2, scratch_.gate_up.data(), 2 * shape_.intermediate);
        quantise(layer.down->blocks(), shape_.intermediate, [&](int64_t row, float *out) {
            const float *gate = scratch_.gate_up.data() + row * 2 * shape_.intermediate;
            silu_mul(gate, gate + shape_.intermediate, shape_.intermediate, out);
        });
        linear(*layer.down, {step_.x, shape_.hidden, true});
    }

  private:
    template <typename Each> void each_row(const Each &each) {
        for (int64_t row = number_; row < step_.rows; row += team_.size()) each(row);
        team_.barrier();
    }

    // make(row, out) writes the row that is turned into integers.
    template <typename Make> void quantise(int64_t blocks, int64_t width, const Make &make) {
        rows_ = scratch_.rows.rows(blocks);
        each_row([&](int64_t row) {
            make(row, own_);
            quantise_row(own_, width, nullptr, rows_, row);
        });
    }

    void linear(const Linear &layer, Target target) {
        multiply(team_, layer, rows_, step_.rows, target);
        team_.barrier();
    }

    void side_by_side(const Linear *const *parts, int most, float *to, int64_t stride) {
        for (int i = 0; i < most && parts[i] != nullptr; to += parts[i]->n, ++i) {
            linear(*parts[i], {to, stride, false});
        }
    }

    void turn_and_keep(const Layer &layer, int64_t row, float *kv) {
        const int dim = shape_.head_dim, turned = shape_.heads + shape_.kv_heads;
        float *heads = scratch_.qkv.data() + row * qkv_width_;
        const int64_t angle = step_.positions[row] * dim;
        for (int head = 0; head < turned; ++head) {
            const bool is_query = head < shape_.heads;
            const float *weight = is_query ? layer.q_norm : layer.k_norm;
            float *at = heads + head * dim;
            if (weight != nullptr) norm(at, weight, shape_.eps, dim, at);
            const float scale = is_query ? shape_.query_scale : 1.0f;
            rotate(at, step_.cos + angle, step_.sin + angle, scale, dim);
        }
        const int64_t token = 2 * shape_.kv_width();
        const float *from = heads + shape_.queries_width();
        std::copy(from, from + token, kv + step_.slots[row] * token);
    }

    Team &team_;
    const int number_;
    const Shape &shape_;
    const Step &step_;
    Scratch &scratch_;
    const AttentionItems &items_;
    float *const own_;
    const int64_t qkv_width_;
    Rows rows_{};
};

int64_t widest(const Shape &shape) {
    const int64_t inner = std::max<int64_t>(shape.intermediate, shape.queries_width());
    return (std::max<int64_t>(shape.hidden, inner) + BLOCK - 1) / BLOCK;
}

}  // namespace
}  // namespace native

extern "C" {

// layers[0..count-1] over step.x; kv[i] is layer i's cache, fp32 [blocks, block_tokens, 2, kv_heads,
// head_dim]. 0, or 1 where memory is out, before anything is written.
int native_layers(const native::Shape *shape, const native::Layer *layers, int64_t count,
                  float *const *kv, const native::Step *step, int threads) {
    using namespace native;
    thread_local Scratch scratch;
    Scratch &shared = scratch;
    try {
        shared.rows.reserve(step->rows, widest(*shape));
        shared.qkv.reserve(step->rows * (shape->queries_width() + 2 * shape->kv_width()));
        shared.gate_up.reserve(step->rows * 2 * shape->intermediate);
        const int64_t own_width = widest(*shape) * BLOCK;
        float *own = shared.own.reserve(std::max(threads, 1) * own_width);
        const AttentionItems items(*shape, *step);
        run_team(threads, [&](Team &team, int number) {
            Pass pass(team, number, *shape, *step, shared, items, own + number * own_width);
            for (int64_t i = 0; i < count; ++i) pass.run(layers[i], kv[i]);
        });
    } catch (const std::bad_alloc &) {
        return 1;
    }
    return 0;
}

}
