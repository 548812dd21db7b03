// Products of bfloat16 in AMX tiles: one instruction adds 32 k to 16 x 16 float32 accumulators.
//
// An accumulator is a chain over blocks of 32 k. A block adds one number: the chain of fused
// multiply-adds over its even k, plus the one over its odd k, both starting at zero. Subnormal
// numbers count as zero. The last block is padded with zeros.
#pragma once

#include "products/operand.h"

namespace vlm {

// Returns the rows of a tile: 16, or all rows if there are fewer.
inline int64_t rows_of_tile(const Operand& x) { return std::min(x.rows(), TILE_ROWS); }

// results[p][r][PANEL] = x[r] . panel `panels.first + p` of bfloat16, without the bias. Requires
// HAS_AMX. Writes behind the rows, up to a multiple of TILE_ROWS.
void multiply_tiles(const Weight& weight, const Panels& panels, const Operand& x, float* results);

// The same with an epilogue that overlaps the products; `scratch` holds the results of one panel.
void multiply_tiles(const Weight& weight, const Panels& panels, const Operand& x, float* scratch,
                    const Epilogue& epilogue);

// The same for e4m3 codes, group by group as in grouped.h.
void multiply_float8_tiles(const Weight& weight, const Panels& panels, const Operand& x,
                           float* results);

}  // namespace vlm
