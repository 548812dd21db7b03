// AMX tile registers of a thread: 0 to 3 are accumulators, 4 and 5 hold rows, 6 and 7 a panel's
// columns.
#pragma once

#include "products/weight.h"
#include "vectors.h"

namespace vlm {

#if VLM_AMX

class TileRegisters {
  public:
    // Configures tiles of `rows` rows (up to 16) of `bytes` bytes (up to 64), and columns in words
    // of four bytes. Throws std::runtime_error if the system grants no tile registers.
    TileRegisters(int64_t rows, int64_t bytes);
    ~TileRegisters() { _tile_release(); }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;

    // Compilers do not know that loading a tile reads memory.
    static VLM_INLINE void compiler_fence() { asm volatile("" ::: "memory"); }
};

// The accumulators of one or two tiles of rows, `[rows, PANEL]` in memory.
template <bool TWO>
struct TileAccumulators {
    static constexpr int64_t BYTES = PANEL * sizeof(float);  // of a row

    static VLM_INLINE void clear() {
        _tile_zero(0);
        _tile_zero(1);
        if (TWO) _tile_zero(2);
        if (TWO) _tile_zero(3);
    }
    static VLM_INLINE void load(const float* from) {
        _tile_loadd(0, from, BYTES);
        _tile_loadd(1, from + LANES, BYTES);
        if (TWO) _tile_loadd(2, from + TILE_ROWS * PANEL, BYTES);
        if (TWO) _tile_loadd(3, from + TILE_ROWS * PANEL + LANES, BYTES);
    }
    static VLM_INLINE void store(float* to) {
        _tile_stored(0, to, BYTES);
        _tile_stored(1, to + LANES, BYTES);
        if (TWO) _tile_stored(2, to + TILE_ROWS * PANEL, BYTES);
        if (TWO) _tile_stored(3, to + TILE_ROWS * PANEL + LANES, BYTES);
    }
};

#endif

}  // namespace vlm
