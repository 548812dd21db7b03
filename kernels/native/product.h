// Products of rows with a packed weight, for one row and for thousands.
//
// A packed weight is panels of 32 columns (rows of the `[N, K]` weight). In a panel the 32 columns
// of every k lie next to each other; bfloat16 has the two values of every pair of k next to each
// other, `[K / 2, 32, 2]`. What a panel or a pair lacks is zero.
//
// A result is one chain of fused multiply-adds over ascending k, from zero on, whatever other rows
// and columns there are; bias and whatever follows come after the last k. Where the processor
// multiplies pairs of bfloat16 in one instruction, both factors are bfloat16 and the chain is one
// of pairs.
#pragma once

#include <algorithm>

#include "guard.h"
#include "room.h"
#include "vectors.h"

namespace vlm {

constexpr int PANEL = 32;  // columns of a panel
constexpr int REGISTERS = PANEL / WIDTH;
constexpr int64_t MOST_ROWS = WIDTH == 16 ? 12 : 3;  // rows whose sums stay in registers
constexpr int64_t DEPTH = WIDTH == 16 ? 256 : 128;   // of a panel's part that stays in the L1 cache
constexpr int64_t ROW_BLOCK = 192;          // rows that pass over a panel together, at most
constexpr int64_t STRIDE = 1 << 18;         // bytes of a weight that a thread takes for a few rows
constexpr int64_t OPERAND_BYTES = 3 << 19;  // of their packed values, unless that is a few rows

enum Type : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

struct Weight {
    const void* packed;
    const float* bias;  // may be null
    int64_t columns;    // N
    int64_t depth;      // K
    int64_t type;       // of the packed values
};

inline int64_t panels_of(const Weight& weight) { return (weight.columns + PANEL - 1) / PANEL; }

inline int64_t bytes_of(int64_t type) { return type == FLOAT32 ? 4 : 2; }

// K as a panel has it.
inline int64_t padded(int64_t depth, int64_t type) {
    return type == BFLOAT16 ? (depth + 1) / 2 * 2 : depth;
}

inline int64_t panel_bytes(int64_t depth, int64_t type) {
    return padded(depth, type) * PANEL * bytes_of(type);
}

// Whether rows of T meet such a weight in products of pairs.
template <typename T>
inline bool in_pairs(int64_t type) {
    return PAIR_PRODUCTS && sizeof(T) == 2 && type == BFLOAT16;
}

// Most rows of an operand of such a depth.
inline int64_t most_rows(int64_t depth) {
    const int64_t most = OPERAND_BYTES / (4 * depth) / MOST_ROWS * MOST_ROWS;
    return std::max(2 * MOST_ROWS, std::min(most, ROW_BLOCK));
}

// Rows as the products read them: in groups of equal size whose values of one k, or of one pair of
// k, lie next to each other. Kept by a thread from product to product.
class Operand {
  public:
    // `at(r)` is where row r of T lies. A single row of float is not copied.
    template <typename T, typename At>
    void take(int64_t rows, int64_t depth, int64_t type, const At& at) {
        rows_ = rows;
        pairs_ = in_pairs<T>(type);
        groups_ = (rows + MOST_ROWS - 1) / MOST_ROWS;
        words_ = pairs_ ? (depth + 1) / 2 : padded(depth, type);
        if (rows == 1 && sizeof(T) == 4 && words_ == depth) {
            place_ = (const float*)at(0);
            return;
        }
        float* to = room_.of(rows * words_ + LANES);
        place_ = to;
        for (int64_t group = 0; group < groups_; ++group) {
            const T* from[MOST_ROWS];
            for (int64_t r = 0; r < size(group); ++r) from[r] = at(first(group) + r);
            pack(from, size(group), depth, to);
            to += size(group) * words_;
        }
    }

    // Has room for as many rows as `most_rows` says, so that `take` asks for none.
    void reserve(int64_t depth) { room_.of(most_rows(depth) * (depth + 1) + LANES); }

    int64_t rows() const { return rows_; }
    int64_t groups() const { return groups_; }
    bool pairs() const { return pairs_; }
    int64_t first(int64_t group) const { return group * rows_ / groups_; }
    int64_t size(int64_t group) const { return first(group + 1) - first(group); }
    const float* group(int64_t index) const { return place_ + first(index) * words_; }

  private:
    void pack(const float* const* from, int64_t rows, int64_t depth, float* to) const;
    void pack(const bf16* const* from, int64_t rows, int64_t depth, float* to) const;

    Room room_;
    const float* place_ = nullptr;
    int64_t rows_ = 0, groups_ = 1, words_ = 0;
    bool pairs_ = false;
};

// sums[r][PANEL] += x[r][begin:end] . panel[begin:end], of a panel with values of `type`; where
// `begin` is 0 the sums begin. It is even.
void accumulate(const void* panel, int64_t type, const Operand& x, int64_t begin, int64_t end,
                float* sums);

// sums[r][PANEL] = x[r] . panel `index` + bias.
void multiply(const Weight& weight, int64_t index, const Operand& x, float* sums);

// What a thread needs for its share of a product.
struct Workplace {
    Operand operand;
    Room sums[2];

    float* sums_of(int which) { return sums[which].of(ROW_BLOCK * PANEL); }

    // Has room for products of such a depth.
    void reserve(int64_t depth) {
        operand.reserve(depth);
        sums_of(0);
        sums_of(1);
    }
};

Workplace& own_workplace();

// How a product is shared out: blocks of rows times groups of panels.
struct Split {
    int64_t rows, panels, blocks, groups;

    Split(int64_t count, const Weight& weight, int64_t threads)
        : rows(count), panels(panels_of(weight)) {
        const int64_t most = most_rows(weight.depth);
        blocks = (rows + most - 1) / most;
        // Threads end together if there is enough to take; a few rows are read with long strides.
        const int64_t wanted =
            std::max<int64_t>(1, (rows == 1 ? 64 : 16) * threads / std::max<int64_t>(blocks, 1));
        // One row waits for the memory alone: threads end together if they take less at a time.
        const int64_t bytes = rows == 1 ? STRIDE / 4 : STRIDE;
        const int64_t stride = bytes / panel_bytes(weight.depth, weight.type);
        const int64_t least = blocks > 1 ? 8 : std::max<int64_t>(1, stride);
        groups = std::max<int64_t>(1, std::min(wanted, panels / least));
    }

    int64_t items() const { return blocks * groups; }
    int64_t first_row(int64_t block) const { return block * rows / blocks; }
    int64_t first_panel(int64_t group) const { return group * panels / groups; }
};

// Inside a parallel region: the panels of `weight`, shared out among its threads, which all have
// passed when it is done. Their workplaces have room for it. `at(r)` is where row r lies;
// `each(first, panel, workplace)` computes one panel for the rows that the workplace's operand
// holds, from row `first` on.
template <typename T, typename At, typename Each>
void for_panels(const Weight& weight, int64_t rows, int64_t threads, const At& at,
                const Each& each) {
    const Split split(rows, weight, threads);
    Workplace& own = own_workplace();
    int64_t taken = -1;
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < split.items(); ++item) {
        const int64_t block = item / split.groups, group = item % split.groups;
        const int64_t first = split.first_row(block), count = split.first_row(block + 1) - first;
        if (taken != block)
            own.operand.take<T>(count, weight.depth, weight.type,
                                [&](int64_t r) { return at(first + r); });
        taken = block;
        for (int64_t p = split.first_panel(group); p < split.first_panel(group + 1); ++p)
            each(first, p, own);
    }
}

// Likewise the product of all rows: `use(row, column, count, sums)` gets up to PANEL finished
// columns and may write behind `count`, up to PANEL.
template <typename T, typename At, typename Use>
void project(const Weight& weight, int64_t rows, int64_t threads, const At& at, const Use& use) {
    for_panels<T>(weight, rows, threads, at, [&](int64_t first, int64_t p, Workplace& own) {
        float* sums = own.sums_of(0);
        multiply(weight, p, own.operand, sums);
        const int64_t wide = std::min<int64_t>(PANEL, weight.columns - p * PANEL);
        for (int64_t r = 0; r < own.operand.rows(); ++r)
            use(first + r, p * PANEL, wide, sums + r * PANEL);
    });
}

}  // namespace vlm
