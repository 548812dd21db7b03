// What a panel holds, float32 values or pairs of bfloat16, as it is added to the sums of some rows.
#pragma once

#include "products/weight.h"
#include "vectors.h"

namespace vlm {

// Of ROWS rows, registers of a panel's columns that are taken at once, from register FIRST on.
template <int ROWS>
constexpr int TAKEN = ROWS <= WHOLE_ROWS ? REGISTERS : REGISTERS / 2;

// Of one k, few registers keep the rows' factors, many the panel's values.
template <int ROWS>
constexpr bool FACTORS_STAY = WIDTH < 16 && ROWS < TAKEN<ROWS>;

// `value(j)` is the j-th register of the panel's values of one k, `x` the factors of the rows.
template <int ROWS, typename Value>
inline void add_products(const Value& value, const float* x, Floats (*total)[TAKEN<ROWS>]) {
    constexpr int COUNT = TAKEN<ROWS>;
    if constexpr (FACTORS_STAY<ROWS>) {
        Floats factor[ROWS];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) factor[r] = spread(x[r]);
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; ++j) {
            const Floats w = value(j);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) total[r][j] = fused(factor[r], w, total[r][j]);
        }
    } else {
        Floats w[COUNT];
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; ++j) w[j] = value(j);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const Floats factor = spread(x[r]);
#pragma GCC unroll 8
            for (int j = 0; j < COUNT; ++j) total[r][j] = fused(factor, w[j], total[r][j]);
        }
    }
}

struct Singles {
    static constexpr int64_t BYTES = 4 * PANEL, STEP = 1;
    template <int ROWS, int FIRST = 0>
    static inline void add(const char* step, const float* x, Floats (*total)[TAKEN<ROWS>]) {
        auto value = [=](int j) { return read<Floats>(step + (FIRST + j) * sizeof(Floats)); };
        add_products<ROWS>(value, x, total);
    }
};

struct Pairs {
    static constexpr int64_t BYTES = 4 * PANEL, STEP = 1;
    template <int ROWS, int FIRST = 0>
    static inline void add(const char* step, const float* x, Floats (*total)[TAKEN<ROWS>]) {
        constexpr int COUNT = TAKEN<ROWS>;
        Floats w[COUNT];
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; ++j) w[j] = read<Floats>(step + (FIRST + j) * sizeof(Floats));
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < COUNT; ++j) total[r][j] = fused_at<true>(x + r, w[j], total[r][j]);
    }
};

}  // namespace vlm
