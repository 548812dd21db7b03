// The memory of a step of few tokens: one arena for all of its intermediate results.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_prefill.h"
#include "gated_delta.h"
#include "program.h"

namespace vlm {

// Memory of a step, kept for the next one.
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
        if (base_ && used_ <= (int64_t)size_) return true;
        size_ = used_ + used_ / 4;
        memory_.assign(size_ + 64, 0);
        base_ = memory_.data() + (64 - (uintptr_t)memory_.data() % 64) % 64;
        return false;
    }

  private:
    std::vector<char> memory_;
    char* base_ = nullptr;
    size_t size_ = 0;
    int64_t used_ = 0;
};

// Where the intermediate results of a step lie. Rows that a projection reads are as wide as the
// deepest weight that reads them.
template <typename T>
struct Memory {
    float *residual, *wide, *cos, *sin, *mixed, *delta, *results, *routing;
    T *queries, *attended, *packed_head, *normed, *mixer_out, *hidden, *expert_hidden;
    float** snapshots;
    int64_t* ids;
    Partial* partials;
    Seen* seen;
    int64_t normed_stride, mixer_stride, hidden_stride, expert_stride, wide_stride;
    int64_t longest, delta_size, seen_size;

    void take(Arena& arena, const Model& model, const Step& step) {
        const Sizes& s = model.sizes;
        const int64_t n = step.tokens, threads = step.threads;
        int64_t most_parts = 0, packed_size = 0;
        longest = 0;
        for (int64_t i = 0; i < step.sequences; ++i) {
            const int64_t own = step.first_token[i + 1] - step.first_token[i];
            const int64_t keys = step.start[i] + own;
            longest = std::max(longest, own);
            if (i < step.decodes)
                most_parts = std::max(most_parts, parts_of(keys));
            else
                packed_size = std::max(packed_size, PackedHead<T>::size(keys, s.head_dim));
        }
        int64_t in_columns = 0, mixer_depth = 0, normed_depth = model.head.depth;
        int64_t hidden_depth = 0, expert_depth = 0;
        for (int64_t i = 0; i < s.layers; ++i) {
            const Layer& layer = model.layers[i];
            in_columns = std::max(in_columns, blocks_of(layer.in_proj) * BLOCK);
            mixer_depth = std::max(mixer_depth, layer.out_proj.depth);
            hidden_depth = std::max(hidden_depth, layer.down.depth);
            normed_depth = std::max(normed_depth, layer.in_proj.depth);
            if (s.experts) expert_depth = std::max(expert_depth, layer.expert_down[0].depth);
        }
        normed_stride = normed_depth;
        mixer_stride = mixer_depth;
        hidden_stride = hidden_depth;
        expert_stride = expert_depth;
        wide_stride = in_columns;
        delta_size = delta_scratch(s, longest);
        residual = arena.take<float>(n * s.hidden);
        wide = arena.take<float>(n * wide_stride);
        cos = arena.take<float>(n * s.rotary_half);
        sin = arena.take<float>(n * s.rotary_half);
        queries = arena.take<T>(n * s.heads * s.head_dim);
        attended = arena.take<T>(n * s.heads * s.head_dim);
        packed_head = arena.take<T>(packed_size);
        const int64_t softmaxes = most_parts * step.decodes * s.heads;
        partials = arena.take<Partial>(softmaxes);
        seen_size = s.kv_heads * groups_of(s.heads / s.kv_heads);
        seen = arena.take<Seen>(threads * seen_size);
        mixed = arena.take<float>(softmaxes * s.head_dim);
        delta = arena.take<float>(threads * delta_size);
        snapshots = arena.take<float*>(threads * longest);
        normed = arena.take<T>(n * normed_stride);
        mixer_out = arena.take<T>(n * mixer_stride);
        hidden = arena.take<T>(n * hidden_stride);
        const int64_t places = n * s.top_k;
        expert_hidden = arena.take<T>(places * expert_stride);
        results = arena.take<float>((places + (s.experts ? n : 0)) * s.hidden);
        routing = arena.take<float>(n * (s.experts + 1 + s.top_k));
        ids = arena.take<int64_t>(places);
    }

    // What lies behind a row's last column meets zero weights and must not be NaN.
    void clear_padding(const Sizes& s, const Step& step) {
        std::memset(normed, 0, step.tokens * normed_stride * sizeof(T));
        std::memset(mixer_out, 0, step.tokens * mixer_stride * sizeof(T));
        std::memset(hidden, 0, step.tokens * hidden_stride * sizeof(T));
        std::memset(expert_hidden, 0, step.tokens * s.top_k * expert_stride * sizeof(T));
    }
};

}  // namespace vlm
