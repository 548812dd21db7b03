// The packed sequences of a prefill step, as kernels/native_records.py hands them over.
#pragma once

#include <cstdint>

namespace vlm {

constexpr int64_t TILE = 64;  // tokens whose inputs are made ready together

// `offsets` has one more than there are sequences; `snapshot_rows[t]` receives the state after
// token t, -1 for none.
struct Packed {
    int64_t sequences, threads;
    const int64_t *offsets, *src_rows, *dst_rows, *snapshot_rows;
};

}  // namespace vlm
