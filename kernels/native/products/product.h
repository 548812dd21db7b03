// Matrix products of rows with a packed weight, from one row to thousands.
//
// A packed weight is a sequence of panels of 32 columns (rows of the `[N, K]` weight). Within a
// panel the 32 columns of each k are contiguous. bfloat16 stores pairs of k together: `[K / 2, 32,
// 2]`. Missing columns and a missing half of a pair are zero.
//
// A result is one chain of fused multiply-adds over ascending k, starting at zero, whatever the
// other rows and columns are. Bias and epilogue follow the last k. Where the processor has an
// instruction for pairs of bfloat16 and both factors are bfloat16, the chain is over pairs. See
// grouped.h for codes with group scales.
#pragma once

#include <algorithm>
#include <type_traits>

#include "guard.h"
#include "products/operand.h"

namespace vlm {

// Bytes of a weight per work item, if the weight is large enough.
constexpr int64_t ITEM_BYTES = 1 << 18;
// Weights below this size are multiplied in negligible time.
constexpr int64_t SMALL_WEIGHT_BYTES = 8 << 20;
// About how many rows of results stay in the cache until the epilogue.
constexpr int64_t RUN_ROWS = 64;

// results[p][r][PANEL] = x[r] . panel `panels.first + p` + bias.
void multiply(const Weight& weight, const Panels& panels, const Operand& x, float* results);

// The same for any number of panels, with an epilogue that is called as results complete. `scratch`
// holds RUN_ROWS rows of one panel, or all rows if there are more.
void multiply(const Weight& weight, const Panels& panels, const Operand& x, float* scratch,
              const Epilogue& epilogue);

// Calls `each(run)` for runs of panels. Few rows are memory-bound: any other memory access between
// two panels makes the hardware prefetcher lose the weight's stream, so a run has several panels.
template <typename Each>
void for_runs(const Panels& panels, int64_t rows, const Each& each) {
    const int64_t most = std::max<int64_t>(1, RUN_ROWS / rows);
    for (int64_t p = 0; p < panels.count; p += most)
        each(Panels{panels.first + p, std::min(most, panels.count - p)});
}

// Buffers of one thread for its share of a product.
struct Workspace {
    Operand operand;
    ScratchBuffer results[2], looked_up;

    float* results_of(int which) {
        return results[which].get((HAS_AMX ? AMX_ROW_BLOCK : ROW_BLOCK) * PANEL);
    }

    // Allocates enough for products of this depth.
    void reserve(int64_t depth) {
        operand.reserve(depth);
        results_of(0);
        results_of(1);
        bytes_of_panel(depth);
    }

    // Returns the place of a panel whose codes are looked up.
    char* bytes_of_panel(int64_t depth) { return (char*)looked_up.get(depth * PANEL / 4); }
};

Workspace& thread_workspace();

using Whole = std::integral_constant<int64_t, PANEL>;

// Calls `use(row, column, count, results)` for every row of every panel, with the results of
// `count` columns starting at `column`. For whole panels `count` is a Whole. `scratch` is as for
// `multiply`.
template <typename Use>
void for_results(const Weight& weight, const Panels& panels, const Operand& x, float* scratch,
                 const Use& use) {
    auto epilogue = [&](int64_t p, int64_t row, int64_t rows, const float* results) {
        const int64_t column = (panels.first + p) * PANEL, end = row + rows;
        if (const int64_t count = weight.columns - column; count < PANEL)
            for (; row < end; ++row, results += PANEL) use(row, column, count, results);
        else
            for (; row < end; ++row, results += PANEL) use(row, column, Whole(), results);
    };
    multiply(weight, panels, x, scratch, epilogue);
}

// Prefetches the output behind `out`, where the next panel's columns go: two adjacent lines at
// once, which arrive as fast as one.
template <typename T>
VLM_INLINE void prefetch_output(const T* out) {
    constexpr int64_t TWO = 128;
    const char* next = (const char*)(out + PANEL);
    if ((uintptr_t)next % TWO >= PANEL * sizeof(T)) return;
    __builtin_prefetch(next, 0, L2_CACHE);
    __builtin_prefetch(next + TWO / 2, 0, L2_CACHE);
}

// Tells whether the product of this many rows waits for the weight's bytes.
constexpr bool is_memory_bound(int64_t rows, bool tiles) {
    return tiles ? rows <= TILE_ROWS : rows < FEW_ROWS;
}

// Returns the fewest panels worth a work item. Several blocks of rows: enough to pay for packing
// the rows. A single block: a long enough range of the weight.
constexpr int64_t min_item_panels(int64_t blocks, bool tiles, int64_t panel_size) {
    return blocks > 1 ? (tiles ? 16 : 8) : ITEM_BYTES / panel_size;
}

// Partition of a product into work items: blocks of rows times groups of panels.
struct Split {
    int64_t rows, panels, blocks, groups;
    int64_t whole_blocks = 0;  // leading blocks that go to one thread with all of their panels
    // Leading groups, and the panels that they cover together.
    int64_t large_groups = 0, large_panels = 0;

    // A work item: panels `begin` to `end` of one block of rows.
    struct Item {
        int64_t block, begin, end;
    };

    Split(int64_t count, const Weight& weight, bool tiles, int64_t threads)
        : rows(count), panels(panels_of(weight)) {
        const int64_t most = max_operand_rows(weight.depth, tiles);
        blocks = (rows + most - 1) / most;
        const int64_t bytes = panel_bytes(weight.depth, weight.type);
        if (is_memory_bound(rows, tiles) && threads > 1) {
            split_memory_bound(bytes, threads);
            return;
        }
        // A whole block is packed once, by one thread. The last blocks are split among threads, and
        // packed by each of them, so that all threads finish together. Their weights are read with
        // long strides.
        whole_blocks = std::max<int64_t>(0, blocks / threads - 1) * threads;
        const int64_t shared = std::max<int64_t>(1, blocks - whole_blocks);
        const int64_t worth = min_item_panels(blocks, tiles, bytes);
        const int64_t fair = panels * shared / (blocks > 1 ? threads : 4 * threads);
        const int64_t least = std::max<int64_t>(1, std::min(worth, fair));
        groups = std::max<int64_t>(1, std::min(16 * threads / shared, panels / least));
    }

    int64_t items() const { return whole_blocks + (blocks - whole_blocks) * groups; }
    Item item(int64_t index) const {
        if (index < whole_blocks) return {index, 0, panels};
        const int64_t block = whole_blocks + (index - whole_blocks) / groups,
                      group = (index - whole_blocks) % groups;
        return {block, first_panel(group), first_panel(group + 1)};
    }
    int64_t first_row(int64_t block) const { return block * rows / blocks; }

  private:
    int64_t first_panel(int64_t group) const {
        if (group < large_groups) return group * large_panels / large_groups;
        return large_panels + (group - large_groups) * (panels - large_panels) /
                                  std::max<int64_t>(1, groups - large_groups);
    }

    // Every restart of the weight's stream costs time that few rows cannot hide behind arithmetic:
    // give each thread one long range. Weights that take long also get short items at the end, for
    // load balancing.
    void split_memory_bound(int64_t bytes, int64_t threads) {
        const int64_t each = std::max<int64_t>(1, ITEM_BYTES / 8 / bytes);
        large_groups = threads;
        large_panels =
            panels * (panels * bytes < SMALL_WEIGHT_BYTES ? 16 : 15) / 16 / threads * threads;
        groups = large_groups + (panels - large_panels + each - 1) / each;
    }
};

// Call inside a parallel region, with reserved workspaces: multiplies the panels of `weight`,
// shared among the region's threads, and ends with a barrier. `at(r)` is the address of row r.
// `each(first, panels, workspace)` computes panels for the rows in the workspace's operand, which
// start at row `first`.
template <typename T, typename At, typename Each>
void for_panels(const Weight& weight, int64_t rows, LoopScheduler& scheduler, const At& at,
                const Each& each) {
    const Split split(rows, weight, in_tiles<T>(weight), scheduler.threads());
    Workspace& own = thread_workspace();
    int64_t taken = -1;
    scheduler.for_each_interleaved(split.items(), [&](int64_t i) {
        const Split::Item item = split.item(i);
        const int64_t first = split.first_row(item.block);
        const int64_t count = split.first_row(item.block + 1) - first;
        if (taken != item.block)
            own.operand.pack<T>(count, weight, [&](int64_t r) { return at(first + r); });
        taken = item.block;
        each(first, Panels{item.begin, item.end - item.begin}, own);
    });
}

// The same for the product of all rows: `use(row, column, count, results)` is called as by
// `for_results`, and may write behind `count`, up to PANEL columns.
template <typename T, typename At, typename Use>
void project(const Weight& weight, int64_t rows, LoopScheduler& scheduler, const At& at,
             const Use& use) {
    for_panels<T>(weight, rows, scheduler, at,
                  [&](int64_t first, const Panels& panels, Workspace& own) {
                      for_results(weight, panels, own.operand, own.results_of(0),
                                  [&](int64_t r, int64_t column, auto count, const float* results) {
                                      use(first + r, column, count, results);
                                  });
                  });
}

}  // namespace vlm
