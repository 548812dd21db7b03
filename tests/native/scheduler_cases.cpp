// Work sharing between threads, in loops and in products.
#include <chrono>

#include "cases.h"
#include "loop_scheduler.h"
#include "products/product.h"

namespace cases {

static constexpr int64_t ITEMS = 13;

// How often each item has been used, over some loops of regions of this and fewer threads.
static std::vector<int64_t> uses(int64_t most) {
    std::vector<std::atomic<int64_t>> used(ITEMS);
    vlm::LoopScheduler scheduler;
    for (int64_t threads : {most, (int64_t)1, most}) {
        scheduler.begin(threads);
#pragma omp parallel num_threads((int)threads)
        for (int64_t items : {ITEMS, (int64_t)0, (int64_t)1, ITEMS}) {
            scheduler.for_each(items, [&](int64_t i) { ++used[i]; });
            scheduler.for_each_interleaved(items, [&](int64_t i) { ++used[i]; });
        }
    }
    return {used.begin(), used.end()};
}

// Whether others do what the thread of item 0 does not come to.
static bool helped(int64_t threads) {
    using Clock = std::chrono::steady_clock;
    vlm::LoopScheduler scheduler(threads);
    std::atomic<int64_t> done{0};
    bool alone = false;
#pragma omp parallel num_threads((int)threads)
    scheduler.for_each(ITEMS, [&](int64_t i) {
        const auto begin = Clock::now();
        while (i == 0 && threads > 1 && done < ITEMS - 1 && !alone)
            alone = Clock::now() - begin > std::chrono::seconds(20);
        ++done;
    });
    return !alone;
}

// Whether every block of rows of a product meets every panel once, and every thread has something
// to do. Weights of few bytes are no reason to leave one out: many rows take long with them, too.
static bool all_busy(int64_t rows, int64_t columns, int64_t type, int64_t threads) {
    vlm::Weight weight{};
    weight.columns = columns, weight.depth = 512, weight.type = type;
    const vlm::Split split(rows, weight, false, threads);
    std::vector<int64_t> met(split.blocks);
    int64_t busy = 0;
    for (int64_t i = 0; i < split.items(); ++i) {
        const auto item = split.item(i);
        if (met[item.block] != item.begin) return false;
        met[item.block] = item.end;
        busy += item.end > item.begin;
    }
    return busy >= threads && met == std::vector<int64_t>(split.blocks, columns / vlm::PANEL);
}

void scheduler_cases() {
    for (int64_t type : {vlm::FLOAT32, vlm::BFLOAT16, vlm::INT8, vlm::INT4})
        for (int64_t rows : {1, 4, 16, 40, 150, 300, 1000})
            for (int64_t columns : {512, 1536})
                for (int64_t threads : {1, 2, 12})
                    expect(all_busy(rows, columns, type, threads), 32,
                           "product of " + std::to_string(rows) + " rows and " +
                               std::to_string(columns) + " columns, type " + std::to_string(type),
                           "what " + std::to_string(threads) + " threads have to do");
    std::vector<int64_t> expected(ITEMS, 3 * 4);
    expected[0] += 3 * 2;
    for (int64_t threads : {1, 2, 3}) {
        const std::string name = "sharing among " + std::to_string(threads);
        expect(uses(threads) == expected, 32, name, "every item once");
        expect(helped(threads), 32, name, "others help");
    }
}

}  // namespace cases
