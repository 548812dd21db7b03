// vlm_ranks_begin, vlm_ranks_barrier and vlm_ranks_give_up, with threads in place of processes.
#include <thread>

#include "calls.h"
#include "cases.h"

namespace cases {

constexpr int64_t SIZE = 3, NUMBERS = 40, BARRIERS = 50, SECOND = 1'000'000'000;

// Calls `work` on every rank at the same time.
static void on_ranks(int64_t spins, int64_t limit, const std::function<void(vlm::Ranks&)>& work) {
    std::vector<vlm::SharedHeader> header(
        1 + (vlm::HEADER_BYTES + 2 * SIZE * NUMBERS * sizeof(float)) / sizeof(vlm::SharedHeader));
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < SIZE; ++rank)
        threads.emplace_back([&, rank] {
            vlm::Ranks own{.rank = rank,
                           .size = SIZE,
                           .count = 0,
                           .slot_bytes = NUMBERS * (int64_t)sizeof(float),
                           .limit = limit,
                           .spins = spins,
                           .shared = header.data()};
            must(vlm_ranks_begin(&own, 1), "vlm_ranks_begin");
            work(own);
        });
    for (std::thread& thread : threads) thread.join();
}

static float* floats(const vlm::Ranks& ranks, int64_t rank, int64_t count) {
    return (float*)vlm::slot(ranks, rank, count);
}

// What every rank reads after all barriers.
static Digest sums(int64_t spins) {
    std::vector<std::vector<float>> read(SIZE);
    on_ranks(spins, 60 * SECOND, [&](vlm::Ranks& ranks) {
        Random random("rank " + std::to_string(ranks.rank));
        for (int64_t i = 0; i < BARRIERS; ++i) {
            const std::vector<float> part = random.numbers(NUMBERS);
            std::copy(part.begin(), part.end(), floats(ranks, ranks.rank, ranks.count));
            must(vlm_ranks_barrier(&ranks), "vlm_ranks_barrier");
            for (int64_t n = 0; n < NUMBERS; ++n) {
                float sum = floats(ranks, 0, ranks.count - 1)[n];
                for (int64_t rank = 1; rank < SIZE; ++rank)
                    sum += floats(ranks, rank, ranks.count - 1)[n];
                read[ranks.rank].push_back(sum);
            }
        }
    });
    expect(alike(read[0], read[1]) && alike(read[0], read[2]), 32, "vlm_ranks_barrier", "ranks");
    return Digest().add(read[0]);
}

// The result of a barrier that the last rank does not reach.
static Digest left(bool says_so) {
    std::vector<int64_t> results(SIZE);
    on_ranks(0, says_so ? 60 * SECOND : SECOND / 20, [&](vlm::Ranks& ranks) {
        if (ranks.rank < SIZE - 1)
            results[ranks.rank] = vlm_ranks_barrier(&ranks);
        else if (says_so)
            must(vlm_ranks_give_up(&ranks, 1), "vlm_ranks_give_up");
    });
    expect(results == std::vector<int64_t>{3, 3, 0}, 32, "vlm_ranks_give_up", "who waits");
    return Digest().add(results);
}

void ranks_cases() {
    report(32, "vlm_ranks_begin", [](int64_t) {
        std::vector<int64_t> counts(SIZE);
        on_ranks(0, SECOND, [&](vlm::Ranks& ranks) { counts[ranks.rank] = ranks.count; });
        return Digest().add(counts);
    });
    report(32, "vlm_ranks_barrier", [](int64_t threads) { return sums(1000 * (threads - 1)); });
    report(32, "vlm_ranks_give_up", [](int64_t threads) { return left(threads == 1); });
}

}  // namespace cases
