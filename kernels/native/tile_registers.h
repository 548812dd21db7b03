// Tile registers (AMX) of a thread: sums (0 to 3), rows (4, 5) and a panel's columns (6, 7).
#pragma once

#include "registers.h"
#include "weight.h"

namespace vlm {

#if VLM_TILES

class TileRegisters {
  public:
    // For `rows` rows, up to 16, of `bytes` each, up to 64, and columns in words of four bytes.
    // Throws std::runtime_error if the system lets this process have none.
    TileRegisters(int64_t rows, int64_t bytes);
    ~TileRegisters() { _tile_release(); }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;

    // Compilers do not know that loading a tile reads memory.
    static VLM_INLINE void written() { asm volatile("" ::: "memory"); }
};

#endif

}  // namespace vlm
