// How the threads of a parallel region share out the items of its loops.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace vlm {

// Every thread has items of its own, the same ones whenever there are as many, and whoever has none
// left takes those of others.
class Sharing {
  public:
    explicit Sharing(int64_t threads = 1) { begin(threads); }

    // Before a region of as many threads. Throws std::bad_alloc.
    void begin(int64_t threads) {
        if (threads > room_) {
            room_ = 0;
            seats_.reset(new Seat[threads]);
            room_ = threads;
        }
        threads_ = threads;
        for (int64_t i = 0; i < threads; ++i) seats_[i].taken = seats_[i].loops = 0;
    }

    int64_t threads() const { return threads_; }

    // Inside of the region, called by all of its threads alike: `use(item)` for every item, once.
    // All have passed when it is done. A thread's items are next to each other, as what they read
    // should be: where it ends, the memory is asked late.
    template <typename Use>
    void each(int64_t items, const Use& use) {
        share(
            [=](int64_t owner, int64_t threads) {
                const int64_t first = items * owner / threads;
                return Own{first, 1, items * (owner + 1) / threads - first};
            },
            use);
    }

    // Likewise, but item i is for thread i % threads: those that come first are begun first.
    template <typename Use>
    void in_turn(int64_t items, const Use& use) {
        share(
            [=](int64_t owner, int64_t threads) {
                return Own{owner, threads, (items - owner + threads - 1) / threads};
            },
            use);
    }

  private:
    struct Own {
        int64_t first, step, count;
    };

    template <typename Of, typename Use>
    void share(const Of& of, const Use& use) {
        const int64_t self = omp_get_thread_num(), threads = omp_get_num_threads();
        const uint64_t loop = ++seats_[self].loops;
        for (int64_t next = 0; next < threads; ++next) {
            const int64_t owner = (self + next) % threads;
            const Own own = of(owner, threads);
            for (int64_t i; (i = seats_[owner].take(loop, own.count)) < own.count;)
                use(own.first + i * own.step);
        }
#pragma omp barrier
    }

    // Has its own line, and the one that processors ask for with it.
    struct alignas(128) Seat {
        // How many of `count` items had been taken in this loop before; `count` if all.
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

        std::atomic<uint64_t> taken{0};  // a loop's number, and behind it how many of its items
        uint64_t loops = 0;              // which the seat's thread has come to
    };

    std::unique_ptr<Seat[]> seats_;
    int64_t threads_ = 0, room_ = 0;
};

}  // namespace vlm
