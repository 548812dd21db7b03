// Packed weights, and the block sizes of their products.
#pragma once

#include <algorithm>

#include "callback.h"
#include "codes/small_floats.h"
#include "registers.h"

namespace vlm {

constexpr int PANEL = 32;  // columns of a panel
constexpr int PANEL_REGISTERS = PANEL / WIDTH;
constexpr int ACCUMULATOR_REGISTERS = WIDTH == 8 ? 12 : 24;
// Register blocking, in rows per micro-kernel: with accumulators for all columns of a panel, and at
// most (then for half of the columns at a time).
constexpr int64_t FULL_WIDTH_ROWS = ACCUMULATOR_REGISTERS / PANEL_REGISTERS;
constexpr int64_t MAX_ROWS = WIDTH == 8 ? 2 * FULL_WIDTH_ROWS : FULL_WIDTH_ROWS;
// Cache blocking: the k of a panel that stay in the L1 cache. With fewer than FEW_ROWS rows the
// next part is prefetched into L1 as well.
constexpr int64_t L1_DEPTH = WIDTH == 4 ? 128 : 256, FEW_ROWS_L1_DEPTH = WIDTH == 16 ? 256 : 128,
                  FEW_ROWS = 32;
constexpr int64_t ROW_BLOCK = 192;          // rows per operand, at most
constexpr int64_t OPERAND_BYTES = 3 << 19;  // packed bytes per operand, unless that is a few rows

// Tiles of rows that one AMX instruction multiplies, and their limits.
constexpr int64_t TILE_ROWS = 16, TILE_DEPTH = 32;
inline int64_t tile_steps(int64_t depth) { return (depth + TILE_DEPTH - 1) / TILE_DEPTH; }
constexpr int64_t AMX_ROW_BLOCK = 256, AMX_OPERAND_BYTES = 3 << 18;

constexpr int64_t MIN_GROUP = 16, MAX_GROUP = 128;

enum Type : int64_t {
    FLOAT32 = 0,
    BFLOAT16 = 1,
    FLOAT16 = 2,
    // Codes; see grouped.h.
    INT8 = 3,
    INT6 = 4,
    INT4 = 5,
    FLOAT8 = 6,  // also a type of scales
    FLOAT4 = 7,
    // Types of scales only: ROOTS are signed bytes q that mean q * |q|; E8M0 are bytes e that mean
    // 2^(e - 127).
    ROOTS = 8,
    E8M0 = 9,
    TWO_LEVEL = 10,  // signed bytes, factors of numbers in `Weight::outer`
    // Codes again, of so many bits: places in `Weight::table`.
    TABLE4 = 11,
    TABLE3 = 12,
    TABLE2 = 13,
};

struct Weight {
    const void* packed;
    const float* bias;  // may be null
    int64_t columns;    // N
    int64_t depth;      // K
    int64_t type;       // of the packed values
    // Codes only: scales and zero points by panel, group and column. `zeros` may be null.
    const void* scales;
    const uint8_t* zeros;
    int64_t group;       // k per scale: a multiple of 16, at most MAX_GROUP, that divides K
    int64_t scale_type;  // of the scales
    int64_t dynamic;     // 1: activations are quantised too
    // One-byte scales of one level only, else null: `[panels, 32]` factors of the columns' scales.
    // They are applied to the finished results, which has the same bits if they are powers of two.
    // Beside codes of a table they may be there with two levels too.
    const float* factors;
    // TWO_LEVEL only: float16 `[panels, K / outer_group, 32]`, factors of scales. With `floors`,
    // zero points times these are minima, which are subtracted from codes times scales. INT8 has
    // none: processors differ in what they take off its codes.
    const void *outer, *floors;
    int64_t outer_group;   // k per factor: a multiple of `group` that divides K
    const uint8_t* table;  // TABLE4 and the like only: the INT8 codes of 16 codes
};

inline int64_t panels_of(const Weight& weight) { return (weight.columns + PANEL - 1) / PANEL; }

// A run of adjacent panels, starting at `first`.
struct Panels {
    int64_t first, count;
};

// Called as (panel of the run, first row, rows, results) when these results are complete.
using Epilogue = Callback<int64_t, int64_t, int64_t, float*>;

// Returns the k per scale of a quantised row. Groups of rows are smaller than groups of a weight,
// because activations have outliers.
inline int64_t row_group(const Weight& weight) { return weight.group % 32 ? 16 : 32; }

inline bool is_codes(int64_t type) { return type >= INT8; }
inline bool is_table(int64_t type) { return type >= TABLE4; }

// Returns the code of zero for weights without zero points.
inline float middle_of(int64_t type) {
    return type == INT8 || is_table(type) ? 128.0f
           : type == INT6                 ? 32.0f
           : type == INT4                 ? 8.0f
           : type == FLOAT4               ? FLOAT4_MIDDLE
                                          : 0.0f;
}

inline bool is_half_bytes(int64_t type) { return type == INT4 || type == FLOAT4 || type == TABLE4; }

// Returns the most rows per micro-kernel. Where MAX_ROWS exceeds FULL_WIDTH_ROWS, few rows have
// more independent chains in groups over all columns than in larger groups over half of them. The
// exception is an even split of bfloat16: its first group widens the values, and beside that many
// accumulators no registers remain for that. Integer kernels accumulate one register of columns at
// a time.
inline int64_t max_kernel_rows(int64_t rows, const Weight& weight) {
    if (is_codes(weight.type)) return weight.dynamic ? MAX_ROWS : FULL_WIDTH_ROWS;
    const bool even =
        weight.type == BFLOAT16 && rows > FULL_WIDTH_ROWS && rows % FULL_WIDTH_ROWS == 0;
    return rows <= 2 * MAX_ROWS && !even ? FULL_WIDTH_ROWS : MAX_ROWS;
}

// Returns the bytes of one k in a panel.
inline int64_t panel_step(int64_t type) {
    return type == FLOAT32       ? 4 * PANEL
           : type == INT6        ? PANEL * 3 / 4
           : type == TABLE3      ? PANEL * 3 / 8
           : type == TABLE2      ? PANEL / 4
           : is_half_bytes(type) ? PANEL / 2
           : is_codes(type)      ? PANEL
                                 : 2 * PANEL;
}

// Returns the bytes of one unpacked value or of one scale.
inline int64_t bytes_of(int64_t type) { return type == FLOAT32 ? 4 : is_codes(type) ? 1 : 2; }

// Returns K as a panel stores it.
inline int64_t padded(int64_t depth, int64_t type) {
    return type == BFLOAT16 ? (depth + 1) / 2 * 2 : depth;
}

inline int64_t panel_bytes(int64_t depth, int64_t type) {
    return padded(depth, type) * panel_step(type);
}

inline const char* panel_at(const Weight& weight, int64_t index) {
    return (const char*)weight.packed + index * panel_bytes(weight.depth, weight.type);
}

// Tells whether rows of T are multiplied by this weight in pairs of bfloat16, or in AMX tiles (of
// pairs or bytes). With AMX, pairs are always multiplied in tiles.
template <typename T>
inline bool in_pairs(const Weight& weight) {
    if (!HAS_BF16_DOT || sizeof(T) != 2) return false;
    const bool whole_tiles = !HAS_AMX || weight.group % TILE_DEPTH == 0;
    return weight.type == BFLOAT16 || (weight.type == FLOAT8 && !weight.zeros && whole_tiles);
}
template <typename T>
inline bool in_tiles(const Weight& weight) {
    return HAS_AMX && (weight.dynamic || in_pairs<T>(weight));
}

// Returns the most rows of an operand of this depth, with or without AMX tiles.
inline int64_t max_operand_rows(int64_t depth, bool tiles) {
    if (tiles) {
        const int64_t most = AMX_OPERAND_BYTES / (2 * depth) / (2 * TILE_ROWS) * (2 * TILE_ROWS);
        return std::max(2 * TILE_ROWS, std::min(most, AMX_ROW_BLOCK));
    }
    const int64_t most = OPERAND_BYTES / (4 * depth) / MAX_ROWS * MAX_ROWS;
    return std::max(2 * MAX_ROWS, std::min(most, ROW_BLOCK));
}

}  // namespace vlm
