// The memory of a step: one arena for all of its intermediate results.
#pragma once

#include <algorithm>

#include "program.h"
#include "room.h"

namespace vlm {

// Memory that is kept for the next step. All that is wanted is named twice: first to learn how
// much it is, then to have it.
class Arena {
  public:
    void begin() { used_ = 0; }

    template <typename T>
    T* take(int64_t count) {
        used_ = (used_ + 63) / 64 * 64;
        T* place = base_ ? (T*)(base_ + used_) : nullptr;
        used_ += count * sizeof(T);
        return place;
    }

    // True if all that was taken since `begin` lay in memory; else there is enough from now on.
    bool settle() {
        if (base_ && used_ <= size_) return true;
        base_ = nullptr;
        size_ = used_ + used_ / 4;
        base_ = (char*)room_.of((size_ + 3) / 4);
        return false;
    }

  private:
    Room room_;
    char* base_ = nullptr;
    int64_t size_ = 0, used_ = 0;
};

// Tokens whose experts are computed together, at most: every one of them has top_k results.
constexpr int64_t EXPERT_TOKENS = 1024;

// Where the intermediate results of a step lie, [tokens, ...] each.
template <typename T>
struct Memory {
    float *residual, *cos, *sin, *results, *routing, *factors, *kept;
    T *normed, *wide, *mixed, *hidden, *expert_hidden;
    int64_t* ids;
    int64_t wide_stride, hidden_width, deepest;

    void take(Arena& arena, const Model& model, const Step& step) {
        const Sizes& s = model.sizes;
        const int64_t n = step.tokens;
        int64_t columns = 0, hidden_columns = 0, expert_columns = 0, mixed_width = 0;
        deepest = model.head.depth;
        auto deep = [this](const Weight& weight) { deepest = std::max(deepest, weight.depth); };
        for (int64_t i = 0; i < s.layers; ++i) {
            const Layer& layer = model.layers[i];
            columns = std::max(columns, layer.in_proj.columns);
            mixed_width = std::max(mixed_width, layer.out_proj.depth);
            hidden_columns = std::max(hidden_columns, layer.gate.columns);
            for (const Weight* weight : {&layer.in_proj, &layer.out_proj, &layer.gate, &layer.down})
                deep(*weight);
            if (!s.experts) continue;
            expert_columns = std::max(expert_columns, layer.expert_gate_up[0].columns);
            deep(layer.expert_down[0]);
        }
        wide_stride = (columns + LANES - 1) / LANES * LANES;
        hidden_width = hidden_columns;
        residual = arena.take<float>(n * s.hidden);
        normed = arena.take<T>(n * s.hidden);
        wide = arena.take<T>(n * wide_stride);
        mixed = arena.take<T>(n * mixed_width);
        hidden = arena.take<T>(n * hidden_columns);
        cos = arena.take<float>(n * s.rotary_half);
        sin = arena.take<float>(n * s.rotary_half);
        kept = arena.take<float>(step.rows * s.hidden);
        if (!s.experts) return;
        const int64_t some = std::min(n, EXPERT_TOKENS), places = some * s.top_k;
        routing = arena.take<float>(n * (s.experts + 1));
        factors = arena.take<float>(n * s.top_k);
        ids = arena.take<int64_t>(n * s.top_k);
        expert_hidden = arena.take<T>(places * expert_columns);
        results = arena.take<float>((places + some) * s.hidden);
    }
};

}  // namespace vlm
