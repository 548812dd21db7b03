// The memory of a step: one arena for all intermediate results, and the plans of mixers and
// experts.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "products/experts.h"
#include "program.h"
#include "scratch.h"

namespace vlm {

// Memory that is reused from step to step. A step takes all it needs twice: first to measure, then
// to allocate.
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

    // Returns true if everything taken since `begin` fitted; else allocates enough for another
    // pass.
    bool commit() {
        if (base_ && used_ <= size_) return true;
        base_ = nullptr;
        size_ = used_ + used_ / 4;
        base_ = (char*)scratch_.get((size_ + 3) / 4);
        return false;
    }

    // Frees the memory if it is larger than `most` bytes.
    void shrink_to(int64_t most) {
        if (size_ <= most) return;
        scratch_ = ScratchBuffer();
        base_ = nullptr;
        size_ = 0;
    }

  private:
    ScratchBuffer scratch_;
    char* base_ = nullptr;
    int64_t size_ = 0, used_ = 0;
};

// Limit for vision towers: a picture may have many times the tokens of a step.
constexpr int64_t MAX_KEPT_TOWER_BYTES = 64 << 20;

// Most tokens whose experts are computed together, because each has top_k results.
constexpr int64_t EXPERT_TOKENS = 1024;

// Calls `each(record)` for all operations of a kind, whose struct is Record.
template <typename Record, typename Each>
void for_kind(const Program& program, Kind kind, const Each& each) {
    for (int64_t i = 0; i < program.count; ++i)
        if (program.ops[i].kind == kind) each(*(const Record*)program.ops[i].args);
}

// Plans of attention, one per shape of heads in a program.
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

    // Requires `make`.
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

// The rows of a step by adapter. Operations that make other rows of the tokens group them anew.
class RowGroups {
  public:
    // Groups `rows` rows; `adapter(r)` is the adapter of row r, -1 for none. Throws std::bad_alloc
    // for more rows than before in a step.
    template <typename Adapter>
    void make(int64_t adapters, int64_t rows, const Adapter& adapter) {
        adapter_.resize(rows);
        rows_.resize(rows);
        first_.assign(adapters + 2, 0);
        for (int64_t r = 0; r < rows; ++r) ++first_[(adapter_[r] = adapter(r)) + 2];
        for (int64_t a = 0; a <= adapters; ++a) first_[a + 1] += first_[a];
        // Rows without an adapter come first, and are never asked for.
        std::vector<int64_t>& next = next_;
        next.assign(first_.begin(), first_.end());
        for (int64_t r = 0; r < rows; ++r) rows_[next[adapter_[r] + 1]++] = r;
    }

    int64_t adapter(int64_t row) const { return adapter_[row]; }
    int64_t count(int64_t adapter) const { return first_[adapter + 2] - first_[adapter + 1]; }
    const int64_t* rows(int64_t adapter) const { return rows_.data() + first_[adapter + 1]; }

  private:
    std::vector<int64_t> adapter_, rows_, first_, next_;
};

// Buffers of a step's intermediate results.
struct Memory {
    Arena arena;
    std::vector<char*> buffers;  // [tokens, width]
    char* kept;                  // [rows, width], scratch for moving rows
    // Experts.
    int64_t* ids;         // [tokens, top_k]
    float* weights;       // [tokens, top_k]
    char* expert_hidden;  // [EXPERT_TOKENS at most, top_k, width]
    float* results;       // likewise, followed by the shared expert's
    Assignment assignment;
    RowGroups groups;
    float* low_rank[2];  // [rows, widest] u of a product, or of two that share an operand
    Plans plans;
    LoopScheduler scheduler;

    // `size` is that of an activation.
    void make(const Program& program, const Step& step, int64_t size) {
        do {
            arena.begin();
            take(program, step, size);
        } while (!arena.commit());
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
        const int64_t changed = std::max(step.tokens, some * chosen);
        for (float*& each : low_rank) each = arena.take<float>(changed * step.widest);
        expert_hidden = arena.take<char>(some * inner * size);
        results = arena.take<float>(some * outer);
    }
};

}  // namespace vlm
