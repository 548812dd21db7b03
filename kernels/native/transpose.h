// Transposition of squares of 32-bit words, as many as a register has lanes.
#pragma once

#include "registers.h"

namespace vlm {

// One step: rows STEP apart swap the lanes whose number has that bit.
template <int STEP>
inline void swap_lanes(Words* rows) {
    struct Low {
        static constexpr int of(int lane) { return lane & STEP ? WIDTH + lane - STEP : lane; }
    };
    struct High {
        static constexpr int of(int lane) { return lane & STEP ? WIDTH + lane : lane + STEP; }
    };
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i) {
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

}  // namespace vlm
