// Float32 values of a panel, as they are added to the sums of some rows.
#pragma once

#include "vectors.h"
#include "weight.h"

namespace vlm {

// Of one k, few registers keep the rows' factors, many the panel's values.
constexpr bool FACTORS_STAY = MOST_ROWS < REGISTERS;

// `value(j)` is the j-th register of the panel's values of one k, `x` the factors of the rows.
template <int ROWS, typename Value>
inline void add_products(const Value& value, const float* x, Floats (*total)[REGISTERS]) {
    if constexpr (FACTORS_STAY) {
        Floats factor[ROWS];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) factor[r] = spread(x[r]);
#pragma GCC unroll 8
        for (int j = 0; j < REGISTERS; ++j) {
            const Floats w = value(j);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) total[r][j] = fused(factor[r], w, total[r][j]);
        }
    } else {
        Floats w[REGISTERS];
#pragma GCC unroll 8
        for (int j = 0; j < REGISTERS; ++j) w[j] = value(j);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const Floats factor = spread(x[r]);
#pragma GCC unroll 8
            for (int j = 0; j < REGISTERS; ++j) total[r][j] = fused(factor, w[j], total[r][j]);
        }
    }
}

struct Singles {
    static constexpr int64_t BYTES = 4 * PANEL, STEP = 1;
    template <int ROWS>
    static inline void add(const char* step, const float* x, Floats (*total)[REGISTERS]) {
        auto value = [=](int j) { return read<Floats>(step + j * sizeof(Floats)); };
        add_products<ROWS>(value, x, total);
    }
};

}  // namespace vlm
