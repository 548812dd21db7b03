// A step on its way through a program: what its operations share.
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
    int64_t tokens;  // rows that go through an operation: all, or those that a Keep has left

    template <typename E>
    Strided<E> rows(const View& view) const {
        return {(E*)memory.buffers[view.buffer] + view.column, view.stride};
    }
};

}  // namespace vlm
