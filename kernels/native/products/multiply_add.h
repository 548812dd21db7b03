// The inner step of a micro-kernel: multiplies one k (or pair of k) of a panel by some rows and
// adds the products to their accumulators.
#pragma once

#include "products/weight.h"
#include "vectors.h"

namespace vlm {

// Registers of columns that a micro-kernel of ROWS rows covers.
template <int ROWS>
constexpr int KERNEL_REGISTERS = ROWS <= FULL_WIDTH_ROWS ? PANEL_REGISTERS : PANEL_REGISTERS / 2;

// With few registers keep the rows' broadcast factors and load the panel's values one at a time;
// with many keep the panel's values.
template <int ROWS>
constexpr bool HOLD_BROADCASTS = WIDTH < 16 && ROWS < KERNEL_REGISTERS<ROWS>;

// `value(j)` returns register j of the panel's values of one k; `x` holds the rows' factors.
template <int ROWS, typename Value>
inline void multiply_add(const Value& value, const float* x,
                         Floats (*acc)[KERNEL_REGISTERS<ROWS>]) {
    constexpr int COUNT = KERNEL_REGISTERS<ROWS>;
    if constexpr (HOLD_BROADCASTS<ROWS>) {
        Floats factor[ROWS];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) factor[r] = broadcast(x[r]);
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; ++j) {
            const Floats w = value(j);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) acc[r][j] = fma(factor[r], w, acc[r][j]);
        }
    } else {
        Floats w[COUNT];
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; ++j) w[j] = value(j);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const Floats factor = broadcast(x[r]);
#pragma GCC unroll 8
            for (int j = 0; j < COUNT; ++j) acc[r][j] = fma(factor, w[j], acc[r][j]);
        }
    }
}

struct Float32Values {
    static constexpr int64_t BYTES = 4 * PANEL, STEP = 1;
    template <int ROWS, int FIRST = 0>
    static inline void add(const char* step, const float* x,
                           Floats (*acc)[KERNEL_REGISTERS<ROWS>]) {
        auto value = [=](int j) { return read<Floats>(step + (FIRST + j) * sizeof(Floats)); };
        multiply_add<ROWS>(value, x, acc);
    }
};

struct Bfloat16Pairs {
    static constexpr int64_t BYTES = 4 * PANEL, STEP = 1;
    template <int ROWS, int FIRST = 0>
    static inline void add(const char* step, const float* x,
                           Floats (*acc)[KERNEL_REGISTERS<ROWS>]) {
        constexpr int COUNT = KERNEL_REGISTERS<ROWS>;
        Floats w[COUNT];
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; ++j) w[j] = read<Floats>(step + (FIRST + j) * sizeof(Floats));
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < COUNT; ++j) acc[r][j] = fma_broadcast<true>(x + r, w[j], acc[r][j]);
    }
};

}  // namespace vlm
