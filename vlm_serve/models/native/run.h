// The state that the operations of a running step share.
#pragma once

#include "step_memory.h"

namespace vlm {

// Rows of elements.
template <typename E>
struct Strided {
    E* first;
    int64_t stride;

    E* operator()(int64_t row) const { return first + row * stride; }
};

struct Run {
    const Program& program;
    const Step& step;
    Memory& memory;
    int64_t tokens;          // rows of the current operation: all, or those that a Keep has left
    bool abandoned = false;  // another rank has left the step

    template <typename E>
    Strided<E> rows(const View& view) const {
        return {(E*)memory.buffers[view.buffer] + view.column, view.stride};
    }

    // Groups the rows of the operations that follow: `token(r)` is a token of row r. One thread
    // does.
    template <typename Token>
    void group_rows(const Token& token) {
        if (step.adapters)
            memory.groups.make(step.adapters, tokens,
                               [&](int64_t r) { return step.adapter_of[token(r)]; });
    }

    // Returns this rank's slot, for its part of a sum.
    Strided<float> own_slot(int64_t width) const {
        const Ranks& ranks = *program.ranks;
        return {(float*)slot(ranks, ranks.rank, ranks.count), width};
    }

    // Waits for the other ranks. Returns false, on all threads, if one of them has left the step.
    bool meet() {
#pragma omp single
        abandoned = !barrier(*program.ranks);
        return !abandoned;
    }

    // Returns what a rank had in its slot when they met last.
    Strided<const float> slot_of(int64_t rank, int64_t width) const {
        const Ranks& ranks = *program.ranks;
        return {(const float*)slot(ranks, rank, ranks.count - 1), width};
    }
};

}  // namespace vlm
