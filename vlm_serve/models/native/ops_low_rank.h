// What adapters add to the products of a step; see products/low_rank.h.
#pragma once

#include "run.h"

namespace vlm {

// The changes of one product: u of every row, and its adapter's part. Rows count from `first` of
// the step's.
struct Changes {
    const Run* run = nullptr;  // null: the product is not changed
    int64_t site = 0, first = 0;
    Strided<float> u{};

    // Returns a row's results with its change: `results` themselves, or `sums`.
    VLM_INLINE const float* apply(int64_t row, int64_t column, const float* results,
                                  float* sums) const {
        if (!run) return results;
        const int64_t adapter = run->memory.groups.adapter(first + row);
        if (adapter < 0) return results;
        const LowRankChange& change = run->step.changes[adapter][site];
        if (!change.count) return results;
        std::memcpy(sums, results, PANEL * sizeof(float));
        extend_columns(change, column, u(row), sums);
        return sums;
    }
};

// A `use` of `project` behind the changes.
template <typename Use>
struct Changed {
    const Changes& changes;
    Use use;

    template <typename Count>
    void operator()(int64_t row, int64_t column, Count count, const float* results) const {
        float sums[PANEL];
        use(row, column, count, changes.apply(row, column, results, sums));
    }
};

template <typename Use>
Changed<Use> changed(const Changes& changes, const Use& use) {
    return {changes, use};
}

// Most rows whose u every thread computes for itself: reading `down` once more is faster than
// waiting for the other threads.
constexpr int64_t MAX_OWN_ROWS = 16;

// A thread's own u of a few rows; `which` of two products that share an operand.
inline ScratchBuffer& own_low_rank(int64_t which) {
    static thread_local ScratchBuffer own[2];
    return own[which];
}

// Computes u of `count` rows from row `first` of the step on, for every adapter that changes the
// product. Of many rows the threads share the work, and end with a barrier. `at(r)` is the address
// of row `first` + r; `which` selects the memory.
template <typename T, typename At>
Changes compute_low_rank(const Run& run, int64_t site, int64_t which, int64_t first, int64_t count,
                         const At& at) {
    const Step& step = run.step;
    if (!site || !step.adapters) return {};
    const bool alone = count <= MAX_OWN_ROWS;
    const Strided<float> u{
        alone ? own_low_rank(which).get(MAX_OWN_ROWS * step.widest) : run.memory.low_rank[which],
        step.widest};
    const RowGroups& groups = run.memory.groups;
    bool any = false;
    for (int64_t adapter = 0; adapter < step.adapters; ++adapter) {
        const LowRankChange& change = step.changes[adapter][site];
        const int64_t* rows = groups.rows(adapter);
        const int64_t* begin = std::lower_bound(rows, rows + groups.count(adapter), first);
        const int64_t* end = std::lower_bound(begin, rows + groups.count(adapter), first + count);
        if (!change.count || begin == end) continue;
        any = true;
        auto from = [&](int64_t r) { return at(begin[r] - first); };
        auto use = [&](int64_t r, int64_t column, int64_t own, const float* results) {
            scale_columns(change, column, own, results, u(begin[r] - first));
        };
        if (!alone) {
            project<T>(change.down, end - begin, run.memory.scheduler, from, use);
            continue;
        }
        Workspace& own = thread_workspace();
        own.operand.pack<T>(end - begin, change.down, from);
        for_results(change.down, Panels{0, panels_of(change.down)}, own.operand, own.results_of(0),
                    use);
    }
    return any ? Changes{&run, site, first, u} : Changes{};
}

}  // namespace vlm
