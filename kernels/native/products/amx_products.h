// Products of whole tiles in one instruction (AMX): sums of 16 rows by 16 columns of float32 gain
// those of 32 k of bfloat16.
//
// A sum is a chain over blocks of 32 k. A block adds one number to it: what its even k give, a
// chain of fused multiply-adds from zero on, plus what its odd k give, likewise; what is too small
// to be normal is zero. The last block is filled up with zeros.
#pragma once

#include "products/operand.h"

namespace vlm {

// What a tile of rows has: 16 unless there are fewer.
inline int64_t rows_of_tile(const Operand& x) { return std::min(x.rows(), TILE_ROWS); }

// sums[p][r][PANEL] = x[r] . panel `panels.first + p` of bfloat16, without the bias; only where
// TILE_PRODUCTS. Writes behind the rows, up to a multiple of TILE_ROWS.
void multiply_tiles(const Weight& weight, const Panels& panels, const Operand& x, float* sums);

// Likewise, with sums handed on while others are computed; `room` is for those of one panel.
void multiply_tiles(const Weight& weight, const Panels& panels, const Operand& x, float* room,
                    const Complete& complete);

// Of codes of e4m3, group by group as grouped.h has it.
void multiply_float8_tiles(const Weight& weight, const Panels& panels, const Operand& x,
                           float* sums);

}  // namespace vlm
