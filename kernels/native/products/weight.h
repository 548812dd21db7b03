// A packed weight.
#pragma once

#include <algorithm>

#include "callback.h"
#include "codes/small_floats.h"
#include "registers.h"

namespace vlm {

constexpr int PANEL = 32;  // columns of a panel
constexpr int REGISTERS = PANEL / WIDTH;
constexpr int SUM_REGISTERS = WIDTH == 8 ? 12 : 24;
// Rows whose sums stay in registers: of all columns of a panel, and of as many as are taken at
// once.
constexpr int64_t WHOLE_ROWS = SUM_REGISTERS / REGISTERS;
constexpr int64_t MOST_ROWS = WIDTH == 8 ? 2 * WHOLE_ROWS : WHOLE_ROWS;
// Of a panel's part that stays in the L1 cache; beside less than FEW rows, together with the part
// that comes next.
constexpr int64_t DEPTH = WIDTH == 4 ? 128 : 256, FEW_DEPTH = WIDTH == 16 ? 256 : 128, FEW = 32;
constexpr int64_t ROW_BLOCK = 192;          // rows that pass over a panel together, at most
constexpr int64_t OPERAND_BYTES = 3 << 19;  // of their packed values, unless that is a few rows

// Likewise of rows in tiles, whose sums a processor may compute in one instruction.
constexpr int64_t TILE_ROWS = 16, TILE_DEPTH = 32;
inline int64_t tile_steps(int64_t depth) { return (depth + TILE_DEPTH - 1) / TILE_DEPTH; }
constexpr int64_t TILES_BLOCK = 256, TILES_BYTES = 3 << 18;

constexpr int64_t LEAST_GROUP = 16, MOST_GROUP = 128;

enum Type : int64_t {
    FLOAT32 = 0,
    BFLOAT16 = 1,
    FLOAT16 = 2,
    // Codes; see grouped.h.
    INT8 = 3,
    INT6 = 4,
    INT4 = 5,
    FLOAT8 = 6,  // also scales
    FLOAT4 = 7,
    // Scales alone: signed bytes q that stand for q * |q|, and bytes e that stand for 2^(e - 127).
    ROOTS = 8,
    E8M0 = 9,
};

struct Weight {
    const void* packed;
    const float* bias;  // may be null
    int64_t columns;    // N
    int64_t depth;      // K
    int64_t type;       // of the packed values
    // Of codes only, by panel, group and column: scales and zero points, which may be null.
    const void* scales;
    const uint8_t* zeros;
    int64_t group;       // k that share a scale: a multiple of 16, at most MOST_GROUP; divides K
    int64_t scale_type;  // of the scales
    int64_t dynamic;     // 1: activations are quantised too
    // Of scales of one byte only, null beside others: `[panels, 32]` numbers by which those of a
    // column have to be multiplied. Its sum is, in the end, which has the same bits if they are
    // powers of two.
    const float* factors;
};

inline int64_t panels_of(const Weight& weight) { return (weight.columns + PANEL - 1) / PANEL; }

// Panels next to each other, from `first` on.
struct Panels {
    int64_t first, count;
};

// Called for so many rows of a panel of a run, from a row on, with their complete sums.
using Complete = Callback<int64_t, int64_t, int64_t, float*>;

// How many k of a row share a scale if it is quantised: fewer than those of a weight may, since
// activations have values that are much larger than their neighbours.
inline int64_t row_group(const Weight& weight) { return weight.group % 32 ? 16 : 32; }

// The code that stands for zero where there are no zero points.
inline float middle_of(int64_t type) {
    return type == INT8     ? 128.0f
           : type == INT6   ? 32.0f
           : type == INT4   ? 8.0f
           : type == FLOAT4 ? FLOAT4_MIDDLE
                            : 0.0f;
}

inline bool is_codes(int64_t type) { return type >= INT8; }
inline bool is_half_bytes(int64_t type) { return type == INT4 || type == FLOAT4; }

// How many of so many rows are taken at once, at most. Where MOST_ROWS are more than WHOLE_ROWS,
// few have more chains under way in groups with all columns than in larger ones with half of them,
// if the first one, which widens values for the others, is smaller: beside as many sums there are
// no registers left for pairs of bfloat16. Sums of whole numbers are of a register's columns.
inline int64_t most_together(int64_t rows, const Weight& weight) {
    if (is_codes(weight.type)) return weight.dynamic ? MOST_ROWS : WHOLE_ROWS;
    const bool even = weight.type == BFLOAT16 && rows > WHOLE_ROWS && rows % WHOLE_ROWS == 0;
    return rows <= 2 * MOST_ROWS && !even ? WHOLE_ROWS : MOST_ROWS;
}

// Bytes of a k in a panel.
inline int64_t panel_step(int64_t type) {
    return type == FLOAT32       ? 4 * PANEL
           : type == INT6        ? PANEL * 3 / 4
           : is_half_bytes(type) ? PANEL / 2
           : is_codes(type)      ? PANEL
                                 : 2 * PANEL;
}

// Of a value that is no code, and of a scale.
inline int64_t bytes_of(int64_t type) { return type == FLOAT32 ? 4 : is_codes(type) ? 1 : 2; }

// K as a panel has it.
inline int64_t padded(int64_t depth, int64_t type) {
    return type == BFLOAT16 ? (depth + 1) / 2 * 2 : depth;
}

inline int64_t panel_bytes(int64_t depth, int64_t type) {
    return padded(depth, type) * panel_step(type);
}

inline const char* panel_at(const Weight& weight, int64_t index) {
    return (const char*)weight.packed + index * panel_bytes(weight.depth, weight.type);
}

// Whether rows of T meet such a weight in products of pairs, or in products of tiles, also of
// bytes. Where there are tiles, pairs are multiplied in those.
template <typename T>
inline bool in_pairs(const Weight& weight) {
    if (!PAIR_PRODUCTS || sizeof(T) != 2) return false;
    const bool whole_tiles = !TILE_PRODUCTS || weight.group % TILE_DEPTH == 0;
    return weight.type == BFLOAT16 || (weight.type == FLOAT8 && !weight.zeros && whole_tiles);
}
template <typename T>
inline bool in_tiles(const Weight& weight) {
    return TILE_PRODUCTS && (weight.dynamic || in_pairs<T>(weight));
}

// Most rows of an operand of such a depth, in products of tiles or others.
inline int64_t most_rows(int64_t depth, bool tiles) {
    if (tiles) {
        const int64_t most = TILES_BYTES / (2 * depth) / (2 * TILE_ROWS) * (2 * TILE_ROWS);
        return std::max(2 * TILE_ROWS, std::min(most, TILES_BLOCK));
    }
    const int64_t most = OPERAND_BYTES / (4 * depth) / MOST_ROWS * MOST_ROWS;
    return std::max(2 * MOST_ROWS, std::min(most, ROW_BLOCK));
}

}  // namespace vlm
