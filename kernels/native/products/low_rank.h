// Low-rank changes of weights (LoRA): what adapters add to the products of their rows.
//
// `u = scale * (x . down)` is computed once per row, in float32. The chain of a column then goes
// on, from its complete result (bias included), over ascending elements of u with the column's
// values of `up`: before activations, products with other parts, residuals and rounding. So a row's
// bits depend on the row, the weight and the row's own adapter; rows without one keep theirs.
#pragma once

#include "products/product.h"

namespace vlm {

// The values of one module for panels `first` to `last` of a product: float32 `[last - first, rank,
// PANEL]`, zero in columns of other modules. Their elements of u begin at `offset`.
struct LowRankPart {
    int64_t first, last, offset, rank;
    const float* up;
};

// An adapter's change of one product. Without any, `down` has no columns.
struct LowRankChange {
    Weight down;
    const float* scales;  // [columns of down]
    int64_t count;
    const LowRankPart* parts;
};

// Scales `count` of a row's products with `down`, from `column` on: elements of u.
template <typename Count>
VLM_INLINE void scale_columns(const LowRankChange& change, int64_t column, Count count,
                              const float* results, float* u) {
    for (int64_t c = 0; c < count; ++c) u[column + c] = change.scales[column + c] * results[c];
}

// Continues the chains of a row's 32 columns from `column` on, in place.
VLM_INLINE void extend_columns(const LowRankChange& change, int64_t column, const float* u,
                               float* results) {
    const int64_t panel = column / PANEL;
    for (int64_t i = 0; i < change.count; ++i) {
        const LowRankPart& part = change.parts[i];
        if (panel < part.first || panel >= part.last) continue;
        const float* up = part.up + (panel - part.first) * part.rank * PANEL;
        Vec sums[PANEL / LANES];
        for (int c = 0; c < PANEL / LANES; ++c) sums[c] = load(results + c * LANES);
        for (int64_t j = 0; j < part.rank; ++j, up += PANEL)
            for (int c = 0; c < PANEL / LANES; ++c)
                sums[c] = fma(u[part.offset + j], load(up + c * LANES), sums[c]);
        for (int c = 0; c < PANEL / LANES; ++c) store(results + c * LANES, sums[c]);
    }
}

}  // namespace vlm
