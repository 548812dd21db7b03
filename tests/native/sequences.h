// The packed sequences of a call, and states that every kernel of such sequences has: rows that
// receive what a sequence has become after some of its tokens.
#pragma once

#include "cases.h"
#include "gated_delta/packed.h"

namespace cases {

constexpr int64_t STATE_ROWS = 24;

// The row that receives the state after a token, -1 for none.
inline int64_t snapshot_row(int64_t sequence, int64_t token) {
    return token % 29 == 17 && token < 87 ? 8 + 4 * sequence + token / 29 : -1;
}

inline std::vector<int64_t> snapshot_rows(const std::vector<Slice>& slices) {
    std::vector<int64_t> rows;
    for (const Slice& slice : slices)
        for (int64_t t = 0; t < slice.count; ++t)
            rows.push_back(snapshot_row(slice.sequence, slice.first + t));
    return rows;
}

inline std::vector<int64_t> collected(const std::vector<Slice>& slices, int64_t Slice::* field) {
    std::vector<int64_t> all;
    for (const Slice& slice : slices) all.push_back(slice.*field);
    return all;
}

struct Sequences {
    std::vector<int64_t> begins, src, dst, snapshots;

    explicit Sequences(const std::vector<Slice>& slices)
        : begins(offsets(slices)),
          src(collected(slices, &Slice::src)),
          dst(collected(slices, &Slice::dst)),
          snapshots(snapshot_rows(slices)) {}

    int64_t tokens() const { return begins.back(); }

    vlm::Packed packed(int64_t threads) const {
        return {.sequences = (int64_t)src.size(),
                .threads = threads,
                .offsets = begins.data(),
                .src_rows = src.data(),
                .dst_rows = dst.data(),
                .snapshot_rows = snapshots.data()};
    }
};

// Sequences that begin with zeros, in a row of their own, and in another's; the same tokens cut
// into two calls, the second of which goes on where the first has ended.
inline const std::vector<Slice> WHOLE{{0, 0, 5, -1, 0}, {1, 0, 150, 1, 1}, {2, 0, 1, 5, 2}};
inline const std::vector<Slice> FIRST{{1, 0, 67, 1, 1}, {0, 0, 1, -1, 0}};
inline const std::vector<Slice> SECOND{{0, 1, 4, 0, 0}, {2, 0, 1, 5, 2}, {1, 67, 83, 1, 1}};
constexpr int64_t SEQUENCE_TOKENS = 150;

// What a call has written for the tokens of one sequence, `width` numbers each.
template <typename T>
std::vector<T> of_sequence(const std::vector<Slice>& slices, const std::vector<T>& out,
                           int64_t width, int64_t sequence) {
    std::vector<T> rows;
    const std::vector<int64_t> begins = offsets(slices);
    for (size_t i = 0; i < slices.size(); ++i)
        if (slices[i].sequence == sequence)
            rows.insert(rows.end(), out.begin() + begins[i] * width,
                        out.begin() + begins[i + 1] * width);
    return rows;
}

// Runs `run(slices, threads, state)`, which returns a row of `width` numbers per token and changes
// the state: all slices together, and cut into two calls, which must come to the same.
template <typename T, typename State, typename Run>
void report_sequences(const std::string& name, int64_t width, const State& state, const Run& run) {
    report(BITS<T>, name, [&](int64_t threads) {
        State own = state;
        const std::vector<T> out = run(WHOLE, threads, own);
        return Digest().add(out).add(own);
    });
    State company = state, cut = state;
    const std::vector<T> out = run(WHOLE, 1, company);
    const std::vector<T> first = run(FIRST, 2, cut), second = run(SECOND, 2, cut);
    for (int64_t sequence = 0; sequence < 3; ++sequence) {
        std::vector<T> rows = of_sequence(FIRST, first, width, sequence);
        const std::vector<T> rest = of_sequence(SECOND, second, width, sequence);
        rows.insert(rows.end(), rest.begin(), rest.end());
        expect(alike(rows, of_sequence(WHOLE, out, width, sequence)), BITS<T>, name,
               "sequence " + std::to_string(sequence) + " in two calls");
    }
    expect(alike(cut, company), BITS<T>, name, "the state after two calls");
}

}  // namespace cases
