// Barriers for the ranks of one host, each a process. Each rank writes to its slot of shared
// memory; after a barrier all ranks read it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace vlm {

constexpr int64_t MAX_RANKS = 64;
// A step has fewer barriers; its counts start at its number times this.
constexpr int64_t MAX_BARRIERS = 1048576;

// One rank's view of the shared memory. A rank has two slots and alternates between them by
// `count`, so one barrier per exchange is enough: a slot is only reused after all have read it and
// met once more.
struct Ranks {
    int64_t rank, size;
    int64_t count;       // barriers so far
    int64_t slot_bytes;  // of one slot
    int64_t limit;       // nanoseconds to wait for other ranks
    int64_t spins;       // polls before the rank sleeps; 0 if ranks share a core
    void* shared;        // a SharedHeader, then the slots of rank 0, of rank 1, ...
};

// Bytes of the shared memory before the slots.
constexpr int64_t HEADER_BYTES = 8192;

struct SharedHeader {
    std::atomic<uint32_t> wakeups;  // futex; changes when all have arrived, or a rank gives up
    std::atomic<uint32_t> sleepers;
    std::atomic<int64_t> failed;  // the last step that a rank has given up
    struct alignas(64) Arrival {
        std::atomic<int64_t> count;
    } arrivals[MAX_RANKS];
};
static_assert(sizeof(SharedHeader) <= HEADER_BYTES, "the header fits its space");

inline SharedHeader& header(const Ranks& ranks) { return *(SharedHeader*)ranks.shared; }

// Returns the slot of `rank` for barrier number `count`.
inline char* slot(const Ranks& ranks, int64_t rank, int64_t count) {
    return (char*)ranks.shared + HEADER_BYTES + (2 * rank + count % 2) * ranks.slot_bytes;
}

#if defined(__linux__)
inline void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
    const timespec some{0, 50'000'000};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &some, nullptr, 0);
}
inline void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}
#else
inline void sleep_on(std::atomic<uint32_t>&, uint32_t) {
    const timespec some{0, 50'000};
    nanosleep(&some, nullptr);
}
inline void wake_all(std::atomic<uint32_t>&) {}
#endif

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

inline void notify(SharedHeader& header) {
    header.wakeups.fetch_add(1);
    if (header.sleepers.load()) wake_all(header.wakeups);
}

// Gives up a step: no rank waits for it any longer.
inline void give_up(const Ranks& ranks, int64_t step) {
    SharedHeader& own = header(ranks);
    int64_t last = own.failed.load();
    while (last < step && !own.failed.compare_exchange_weak(last, step)) {
    }
    notify(own);
}

inline bool all_arrived(const Ranks& ranks, int64_t count) {
    const SharedHeader& own = header(ranks);
    for (int64_t r = 0; r < ranks.size; ++r)
        if (own.arrivals[r].count.load() < count) return false;
    return true;
}

// Waits until all ranks have reached this barrier. Returns false if a rank has given up the step,
// or does not arrive within the limit, in which case this rank gives up the step.
inline bool barrier(Ranks& ranks) {
    SharedHeader& own = header(ranks);
    const int64_t count = ++ranks.count, step = count / MAX_BARRIERS;
    own.arrivals[ranks.rank].count.store(count);
    if (all_arrived(ranks, count)) {
        notify(own);
        return own.failed.load() < step;
    }
    for (int64_t i = 0; i < ranks.spins; ++i) {
        if (all_arrived(ranks, count)) return own.failed.load() < step;
        pause_briefly();
    }
    const int64_t begin = nanoseconds();
    own.sleepers.fetch_add(1);
    bool late = false;
    for (;;) {
        const uint32_t seen = own.wakeups.load();
        if (all_arrived(ranks, count) || own.failed.load() >= step) break;
        late = nanoseconds() - begin > ranks.limit;
        if (late) break;
        sleep_on(own.wakeups, seen);
    }
    own.sleepers.fetch_sub(1);
    if (late) give_up(ranks, step);
    return own.failed.load() < step;
}

}  // namespace vlm
