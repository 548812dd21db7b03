// Transposition of squares of 32-bit words, as many as a register has lanes.
#pragma once

#include "registers.h"

namespace vlm {

// One step: of ROWS rows those STEP apart swap the lanes whose number has that bit.
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
        rows[i] = shuffled<Low>(a, b);
        rows[i + STEP] = shuffled<High>(a, b);
    }
}

// WIDTH rows of WIDTH words become its columns.
inline void transpose(Words* rows) {
    if constexpr (WIDTH > 8) swap_lanes<8>(rows);
    if constexpr (WIDTH > 4) swap_lanes<4>(rows);
    swap_lanes<2>(rows);
    swap_lanes<1>(rows);
}

// The lanes of each of WIDTH rows, joined: those of row i are lane i of the result. Overwrites the
// rows.
template <int STEP = WIDTH / 2, typename Join>
inline Words folded(Words* rows, const Join& join) {
    swap_lanes<STEP, 2 * STEP>(rows);
#pragma GCC unroll 8
    for (int i = 0; i < STEP; ++i) rows[i] = join(rows[i], rows[i + STEP]);
    if constexpr (STEP > 1)
        return folded<STEP / 2>(rows, join);
    else
        return rows[0];
}

}  // namespace vlm
