// Ranks of one host, each a process: they meet, and what each has written into its slot of the
// memory that they share is then read by all.
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

constexpr int64_t MOST_RANKS = 64;
// A step has fewer meetings; where its counts begin is its number times this.
constexpr int64_t MOST_MEETINGS = 1048576;

// How a rank finds the others. A rank has two slots and writes to that of `count`, so that one
// meeting is enough: nobody writes to a slot again before all have read it and met once more.
struct Ranks {
    int64_t rank, size;
    int64_t count;       // meetings so far
    int64_t slot_bytes;  // of one slot
    int64_t limit;       // nanoseconds that a rank waits for the others
    int64_t spins;       // looks before it falls asleep; none where ranks share a core
    void* shared;        // a Board, and the slots of rank 0, of rank 1, ...
};

// What is left of the memory before the slots.
constexpr int64_t BOARD_BYTES = 8192;

struct Board {
    std::atomic<uint32_t> rung;  // changes whenever all have arrived, or somebody gives up
    std::atomic<uint32_t> asleep;
    std::atomic<int64_t> failed;  // the last step that somebody has given up
    struct alignas(64) Place {
        std::atomic<int64_t> count;
    } places[MOST_RANKS];
};
static_assert(sizeof(Board) <= BOARD_BYTES, "the board has room");

inline Board& board(const Ranks& ranks) { return *(Board*)ranks.shared; }

// A slot of `rank` for its meeting number `count`.
inline char* slot(const Ranks& ranks, int64_t rank, int64_t count) {
    return (char*)ranks.shared + BOARD_BYTES + (2 * rank + count % 2) * ranks.slot_bytes;
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

inline void ring(Board& board) {
    board.rung.fetch_add(1);
    if (board.asleep.load()) wake_all(board.rung);
}

// Nobody waits for this step any more, and nobody will.
inline void give_up(const Ranks& ranks, int64_t step) {
    Board& own = board(ranks);
    int64_t last = own.failed.load();
    while (last < step && !own.failed.compare_exchange_weak(last, step)) {
    }
    ring(own);
}

inline bool all_here(const Ranks& ranks, int64_t count) {
    const Board& own = board(ranks);
    for (int64_t r = 0; r < ranks.size; ++r)
        if (own.places[r].count.load() < count) return false;
    return true;
}

// Returns when all ranks have come as far; false if one of them has given up the step, or has not
// come within the limit: then it is given up.
inline bool meet(Ranks& ranks) {
    Board& own = board(ranks);
    const int64_t count = ++ranks.count, step = count / MOST_MEETINGS;
    own.places[ranks.rank].count.store(count);
    if (all_here(ranks, count)) {
        ring(own);
        return own.failed.load() < step;
    }
    for (int64_t i = 0; i < ranks.spins; ++i) {
        if (all_here(ranks, count)) return own.failed.load() < step;
        pause_briefly();
    }
    const int64_t begin = nanoseconds();
    own.asleep.fetch_add(1);
    bool late = false;
    for (;;) {
        const uint32_t seen = own.rung.load();
        if (all_here(ranks, count) || own.failed.load() >= step) break;
        late = nanoseconds() - begin > ranks.limit;
        if (late) break;
        sleep_on(own.rung, seen);
    }
    own.asleep.fetch_sub(1);
    if (late) give_up(ranks, step);
    return own.failed.load() < step;
}

}  // namespace vlm
