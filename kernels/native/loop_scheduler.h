// Scheduling of loops among the threads of a parallel region, with work stealing.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace vlm {

// Gives every thread a fixed range of a loop's items; a thread that runs out steals from others.
// The same number of items is always split the same way.
class LoopScheduler {
  public:
    explicit LoopScheduler(int64_t threads = 1) { begin(threads); }

    // Prepares for a region of `threads` threads, before it starts. Throws std::bad_alloc.
    void begin(int64_t threads) {
        if (threads > capacity_) {
            capacity_ = 0;
            workers_.reset(new Worker[threads]);
            capacity_ = threads;
        }
        threads_ = threads;
        for (int64_t i = 0; i < threads; ++i) workers_[i].taken = workers_[i].loops = 0;
    }

    int64_t threads() const { return threads_; }

    // Call inside the region, from all of its threads: calls `use(item)` once for every item and
    // ends with a barrier. A thread's items are contiguous, so that the memory it reads is, too:
    // every jump costs a late prefetch.
    template <typename Use>
    void for_each(int64_t items, const Use& use) {
        run(
            [=](int64_t owner, int64_t threads) {
                const int64_t first = items * owner / threads;
                return Range{first, 1, items * (owner + 1) / threads - first};
            },
            use);
    }

    // The same, but item i belongs to thread i % threads: items start in order.
    template <typename Use>
    void for_each_interleaved(int64_t items, const Use& use) {
        run(
            [=](int64_t owner, int64_t threads) {
                return Range{owner, threads, (items - owner + threads - 1) / threads};
            },
            use);
    }

  private:
    struct Range {
        int64_t first, step, count;
    };

    template <typename RangeOf, typename Use>
    void run(const RangeOf& range_of, const Use& use) {
        const int64_t self = omp_get_thread_num(), threads = omp_get_num_threads();
        const uint64_t loop = ++workers_[self].loops;
        for (int64_t next = 0; next < threads; ++next) {
            const int64_t owner = (self + next) % threads;
            const Range range = range_of(owner, threads);
            for (int64_t i; (i = workers_[owner].take(loop, range.count)) < range.count;)
                use(range.first + i * range.step);
        }
#pragma omp barrier
    }

    // Aligned to two cache lines, because processors prefetch lines in pairs.
    struct alignas(128) Worker {
        // Takes the next item of this loop and returns its number; `count` if none is left.
        int64_t take(uint64_t loop, int64_t count) {
            uint64_t seen = taken.load(std::memory_order_relaxed);
            for (;;) {
                const uint64_t before = seen >> 32 == loop ? (uint32_t)seen : 0;
                if ((int64_t)before >= count) return count;
                if (taken.compare_exchange_weak(seen, loop << 32 | (before + 1),
                                                std::memory_order_relaxed))
                    return (int64_t)before;
            }
        }

        std::atomic<uint64_t> taken{0};  // the loop's number, then how many of its items are taken
        uint64_t loops = 0;              // how many loops this thread has started
    };

    std::unique_ptr<Worker[]> workers_;
    int64_t threads_ = 0, capacity_ = 0;
};

}  // namespace vlm
