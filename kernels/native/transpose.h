// Transposition of squares of WIDTH x WIDTH 32-bit words.
#pragma once

#include "registers.h"

namespace vlm {

// One butterfly step: rows that are STEP apart swap the lanes whose number has that bit.
template <int STEP, int ROWS = WIDTH>
inline void swap_lanes(Words* rows) {
    struct Low {
        static constexpr int of(int lane) { return lane & STEP ? WIDTH + lane - STEP : lane; }
    };
    struct High {
        static constexpr int of(int lane) { return lane & STEP ? WIDTH + lane : lane + STEP; }
    };
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
        if (i & STEP) continue;
        const Words a = rows[i], b = rows[i + STEP];
        rows[i] = shuffle<Low>(a, b);
        rows[i + STEP] = shuffle<High>(a, b);
    }
}

// Transposes WIDTH rows of WIDTH words in place.
inline void transpose(Words* rows) {
    if constexpr (WIDTH > 8) swap_lanes<8>(rows);
    if constexpr (WIDTH > 4) swap_lanes<4>(rows);
    swap_lanes<2>(rows);
    swap_lanes<1>(rows);
}

// Reduces the lanes of each of WIDTH rows with `join`; the result of row i is lane i. Overwrites
// the rows.
template <int STEP = WIDTH / 2, typename Join>
inline Words transpose_reduce(Words* rows, const Join& join) {
    swap_lanes<STEP, 2 * STEP>(rows);
#pragma GCC unroll 8
    for (int i = 0; i < STEP; ++i) rows[i] = join(rows[i], rows[i + STEP]);
    if constexpr (STEP > 1)
        return transpose_reduce<STEP / 2>(rows, join);
    else
        return rows[0];
}

}  // namespace vlm
