// The packed sequences of a step; see kernels/native_records.py.
#pragma once

#include <algorithm>
#include <cstdint>

namespace vlm {

// `offsets` has one entry more than there are sequences. `snapshot_rows[t]` is the row that
// receives the state after token t, or -1.
struct Packed {
    int64_t sequences, threads;
    const int64_t *offsets, *src_rows, *dst_rows, *snapshot_rows;
};

constexpr int64_t TOKEN_TILE = 64;  // tokens whose inputs are prepared together

// Calls `tile(begin, n, row)` for stretches of at most TOKEN_TILE tokens of a sequence. A stretch
// ends where a state is needed: `row` is the row that receives it, or -1.
template <typename Each>
void for_token_tiles(const Packed& packed, int64_t sequence, const Each& tile) {
    const int64_t last = packed.offsets[sequence + 1];
    for (int64_t begin = packed.offsets[sequence]; begin < last;) {
        const int64_t most = std::min(begin + TOKEN_TILE, last);
        int64_t end = begin + 1;
        while (end < most && packed.snapshot_rows[end - 1] < 0) ++end;
        const int64_t row = packed.snapshot_rows[end - 1];
        tile(begin, end - begin, row < 0 && end == last ? packed.dst_rows[sequence] : row);
        begin = end;
    }
}

}  // namespace vlm
