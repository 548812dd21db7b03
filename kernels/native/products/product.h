// Products of rows with a packed weight, for one row and for thousands.
//
// A packed weight is panels of 32 columns (rows of the `[N, K]` weight). In a panel the 32 columns
// of every k lie next to each other; bfloat16 has the two values of every pair of k next to each
// other, `[K / 2, 32, 2]`. What a panel or a pair lacks is zero.
//
// A result is one chain of fused multiply-adds over ascending k, from zero on, whatever other rows
// and columns there are; bias and whatever follows come after the last k. Where the processor
// multiplies pairs of bfloat16 in one instruction, both factors are bfloat16 and the chain is one
// of pairs. Codes that share scales in groups are summed as grouped.h says.
#pragma once

#include <algorithm>
#include <type_traits>

#include "guard.h"
#include "products/operand.h"

namespace vlm {

constexpr int64_t STRIDE = 1 << 18;  // bytes of a weight that a thread takes, if there are enough
constexpr int64_t SHORT = 8 << 20;   // bytes of a weight that threads have done in no time
constexpr int64_t RUN_ROWS = 64;     // rows whose sums are kept until they are used, about

// sums[p][r][PANEL] = x[r] . panel `panels.first + p` + bias.
void multiply(const Weight& weight, const Panels& panels, const Operand& x, float* sums);

// Likewise of any number of panels, whose sums are handed on as they are complete; `room` is for
// RUN_ROWS rows of a panel or for all that there are.
void multiply(const Weight& weight, const Panels& panels, const Operand& x, float* room,
              const Complete& complete);

// Calls `each(some)` for some of the panels at a time, as many as are worth it: where few rows wait
// for the memory, whatever else is read or written between two panels makes the processor lose
// sight of the weight.
template <typename Each>
void for_runs(const Panels& panels, int64_t rows, const Each& each) {
    const int64_t most = std::max<int64_t>(1, RUN_ROWS / rows);
    for (int64_t p = 0; p < panels.count; p += most)
        each(Panels{panels.first + p, std::min(most, panels.count - p)});
}

// What a thread needs for its share of a product.
struct Workplace {
    Operand operand;
    Room sums[2];

    float* sums_of(int which) {
        return sums[which].of((TILE_PRODUCTS ? TILES_BLOCK : ROW_BLOCK) * PANEL);
    }

    // Has room for products of such a depth.
    void reserve(int64_t depth) {
        operand.reserve(depth);
        sums_of(0);
        sums_of(1);
    }
};

Workplace& own_workplace();

using Whole = std::integral_constant<int64_t, PANEL>;

// Calls `use(row, column, count, sums)` for every row of every panel, with the sums of `count`
// columns from `column` on, which is a Whole for whole panels. `room` is as `multiply` wants it.
template <typename Use>
void for_sums(const Weight& weight, const Panels& panels, const Operand& x, float* room,
              const Use& use) {
    auto complete = [&](int64_t p, int64_t row, int64_t rows, const float* sums) {
        const int64_t column = (panels.first + p) * PANEL, end = row + rows;
        if (const int64_t count = weight.columns - column; count < PANEL)
            for (; row < end; ++row, sums += PANEL) use(row, column, count, sums);
        else
            for (; row < end; ++row, sums += PANEL) use(row, column, Whole(), sums);
    };
    multiply(weight, panels, x, room, complete);
}

// Asks the memory for where the next panels' columns of a row will go, behind those at `out`: for
// two lines next to each other, which come from it as fast as one.
template <typename T>
VLM_INLINE void ask_for_next(const T* out) {
    constexpr int64_t TWO = 128;
    const char* next = (const char*)(out + PANEL);
    if ((uintptr_t)next % TWO >= PANEL * sizeof(T)) return;
    __builtin_prefetch(next, 0, L2_CACHE);
    __builtin_prefetch(next + TWO / 2, 0, L2_CACHE);
}

// How a product is shared out: blocks of rows times groups of panels.
struct Split {
    int64_t rows, panels, blocks, groups;
    int64_t whole = 0;  // blocks that come first, each for one thread with all of its panels
    int64_t large = 0, ahead = 0;  // groups that come first, and the panels that they have together

    // What a thread takes: panels `begin` to `end` of one block.
    struct Item {
        int64_t block, begin, end;
    };

    Split(int64_t count, const Weight& weight, bool tiles, int64_t threads)
        : rows(count), panels(panels_of(weight)) {
        const int64_t most = most_rows(weight.depth, tiles);
        blocks = (rows + most - 1) / most;
        const int64_t bytes = panel_bytes(weight.depth, weight.type);
        if ((tiles ? rows <= TILE_ROWS : rows < FEW) && threads > 1) {
            split_few(bytes, threads);
            return;
        }
        // A whole block is packed once. Threads end together if there is enough to take, so that
        // the last blocks are shared, and packed by each of them; weights are read with long
        // strides.
        whole = std::max<int64_t>(0, blocks / threads - 1) * threads;
        const int64_t shared = std::max<int64_t>(1, blocks - whole);
        // What a thread takes is worth packing rows for, or long, if all have something to take.
        const int64_t worth = blocks > 1 ? tiles ? 16 : 8 : STRIDE / bytes;
        const int64_t fair = panels * shared / (blocks > 1 ? threads : 4 * threads);
        const int64_t least = std::max<int64_t>(1, std::min(worth, fair));
        groups = std::max<int64_t>(1, std::min(16 * threads / shared, panels / least));
    }

    int64_t items() const { return whole + (blocks - whole) * groups; }
    Item item(int64_t index) const {
        if (index < whole) return {index, 0, panels};
        const int64_t block = whole + (index - whole) / groups, group = (index - whole) % groups;
        return {block, first_panel(group), first_panel(group + 1)};
    }
    int64_t first_row(int64_t block) const { return block * rows / blocks; }

  private:
    int64_t first_panel(int64_t group) const {
        if (group < large) return group * ahead / large;
        return ahead + (group - large) * (panels - ahead) / std::max<int64_t>(1, groups - large);
    }

    // Every place where the reading of a weight begins anew costs time that few rows have nothing
    // to compute in, so that each thread has a long part; of weights that take long, short ones are
    // left for those that are done first.
    void split_few(int64_t bytes, int64_t threads) {
        const int64_t each = std::max<int64_t>(1, STRIDE / 8 / bytes);
        large = threads;
        ahead = panels * (panels * bytes < SHORT ? 16 : 15) / 16 / threads * threads;
        groups = large + (panels - ahead + each - 1) / each;
    }
};

// Inside a parallel region: the panels of `weight`, shared out among its threads, which all have
// passed when it is done. Their workplaces have room for it. `at(r)` is where row r lies;
// `each(first, panels, workplace)` computes panels for the rows that the workplace's operand holds,
// from row `first` on.
template <typename T, typename At, typename Each>
void for_panels(const Weight& weight, int64_t rows, Sharing& sharing, const At& at,
                const Each& each) {
    const Split split(rows, weight, in_tiles<T>(weight), sharing.threads());
    Workplace& own = own_workplace();
    int64_t taken = -1;
    sharing.in_turn(split.items(), [&](int64_t i) {
        const Split::Item item = split.item(i);
        const int64_t first = split.first_row(item.block);
        const int64_t count = split.first_row(item.block + 1) - first;
        if (taken != item.block)
            own.operand.take<T>(count, weight, [&](int64_t r) { return at(first + r); });
        taken = item.block;
        each(first, Panels{item.begin, item.end - item.begin}, own);
    });
}

// Likewise the product of all rows: `use(row, column, count, sums)` is called as by `for_sums`, and
// may write behind `count`, up to PANEL.
template <typename T, typename At, typename Use>
void project(const Weight& weight, int64_t rows, Sharing& sharing, const At& at, const Use& use) {
    for_panels<T>(weight, rows, sharing, at,
                  [&](int64_t first, const Panels& panels, Workplace& own) {
                      for_sums(weight, panels, own.operand, own.sums_of(0),
                               [&](int64_t r, int64_t column, auto count, const float* sums) {
                                   use(first + r, column, count, sums);
                               });
                  });
}

}  // namespace vlm
