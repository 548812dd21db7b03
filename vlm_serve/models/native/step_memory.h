// The memory of a step: one arena for all of its intermediate results, and what mixers and experts
// plan with.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "products/experts.h"
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

    // Gives the memory back if it is more than that.
    void keep(int64_t most) {
        if (size_ <= most) return;
        room_ = Room();
        base_ = nullptr;
        size_ = 0;
    }

  private:
    Room room_;
    char* base_ = nullptr;
    int64_t size_ = 0, used_ = 0;
};

// What is kept of the memory of pictures, of which one may have many times the tokens of a step.
constexpr int64_t KEPT_OF_PICTURES = 64 << 20;

// Tokens whose experts are computed together, at most: every one of them has top_k results.
constexpr int64_t EXPERT_TOKENS = 1024;

// Calls `each(record)` for all operations of a kind, whose struct is Record.
template <typename Record, typename Each>
void for_kind(const Program& program, Kind kind, const Each& each) {
    for (int64_t i = 0; i < program.count; ++i)
        if (program.ops[i].kind == kind) each(*(const Record*)program.ops[i].args);
}

// Plans of attention for every shape of heads that a program has.
class Plans {
  public:
    void begin() { made_ = 0; }

    // Throws std::bad_alloc.
    void make(const Attention& job) {
        if (find(job) < made_) return;
        if (made_ == plans_.size()) plans_.emplace_back();
        Shaped& own = plans_[made_];
        own.heads = job.heads, own.kv_heads = job.kv_heads, own.head_dim = job.head_dim;
        own.plan.make(job);
        ++made_;
    }

    // Made before.
    AttentionPlan& of(const Attention& job) { return plans_[find(job)].plan; }

  private:
    struct Shaped {
        int64_t heads, kv_heads, head_dim;
        AttentionPlan plan;
    };

    size_t find(const Attention& job) const {
        size_t i = 0;
        while (i < made_ && (plans_[i].heads != job.heads || plans_[i].kv_heads != job.kv_heads ||
                             plans_[i].head_dim != job.head_dim))
            ++i;
        return i;
    }

    std::vector<Shaped> plans_;
    size_t made_ = 0;
};

// Where the intermediate results of a step lie.
struct Memory {
    Arena arena;
    std::vector<char*> buffers;  // [tokens, width]
    char* kept;                  // [rows, width], on their way to other rows
    // Of the experts.
    int64_t* ids;         // [tokens, top_k]
    float* weights;       // [tokens, top_k]
    char* expert_hidden;  // [EXPERT_TOKENS at most, top_k, width]
    float* results;       // likewise, and those of the shared expert behind them
    Assignment assignment;
    Plans plans;
    Sharing sharing;

    // `size` is that of an activation.
    void make(const Program& program, const Step& step, int64_t size) {
        do {
            arena.begin();
            take(program, step, size);
        } while (!arena.settle());
    }

  private:
    void take(const Program& program, const Step& step, int64_t size) {
        buffers.resize(program.buffers);
        for (int64_t i = 0; i < program.buffers; ++i)
            buffers[i] = arena.take<char>(step.tokens * program.widths[i]);
        int64_t widest = 0, chosen = 0, inner = 0, outer = 0;
        for_kind<Keep>(program, KEEP, [&](const Keep& op) {
            widest =
                std::max({widest, op.residual_width * (int64_t)sizeof(float), op.width * size});
        });
        const int64_t some = std::min(step.tokens, EXPERT_TOKENS);
        for_kind<Experts>(program, EXPERTS, [&](const Experts& op) {
            chosen = std::max(chosen, op.top_k);
            inner = std::max(inner, op.top_k * op.gate_up[0].columns);
            outer = std::max(outer, (op.top_k + op.has_shared()) * op.hidden);
            assignment.reserve(some * op.top_k, op.experts);
        });
        kept = arena.take<char>(step.rows * widest);
        ids = arena.take<int64_t>(step.tokens * chosen);
        weights = arena.take<float>(step.tokens * chosen);
        expert_hidden = arena.take<char>(some * inner * size);
        results = arena.take<float>(some * outer);
    }
};

}  // namespace vlm
