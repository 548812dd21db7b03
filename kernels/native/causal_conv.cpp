// Causal depthwise convolution of a prefill; see kernels/causal_conv for what it computes.
// Pieces of the sequences are taken by threads as they come.
#include <algorithm>
#include <vector>

#include "guard.h"
#include "layout.h"
#include "packed.h"
#include "vectors.h"

namespace vlm {

struct Convolution {
    Packed packed;
    int64_t channels, kernel, x_stride, tail_row_stride;
    const void* x;      // [N, channels]
    const float* taps;  // [kernel, channels]
    void* tails;        // [rows, channels, kernel - 1]
    void* out;          // [N, channels], contiguous
};

// The tokens from `begin` to `end` of one sequence that starts at `first`; `old` holds what lies
// before it, [kernel - 1, channels], oldest first.
template <typename T>
void convolve_tokens(const Convolution& job, const float* old, int64_t first, int64_t begin,
                     int64_t end) {
    const int64_t kept = job.kernel - 1;
    for (int64_t t = begin; t < end; ++t)
        for (int64_t c = 0; c < job.channels; c += LANES) {
            Vec total{};
            for (int64_t j = 0; j <= kept; ++j) {
                const int64_t at = t - kept + j;
                Vec x = at < first ? load(old + (at - first + kept) * job.channels + c)
                                   : load((const T*)job.x + at * job.x_stride + c);
                total += x * load(job.taps + j * job.channels + c);
            }
            store((T*)job.out + t * job.channels + c, silu(total));
        }
}

template <typename T>
void convolve_packed(const Convolution& job) {
    const Packed& packed = job.packed;
    const int64_t kept = job.kernel - 1, size = kept * job.channels;
    // All old tails first: a row may be read and written.
    std::vector<float> old(packed.sequences * size, 0.0f);
    std::vector<int64_t> owner, begin;
    for (int64_t i = 0; i < packed.sequences; ++i) {
        for (int64_t t = packed.offsets[i]; t < packed.offsets[i + 1]; t += TILE) {
            owner.push_back(i);
            begin.push_back(t);
        }
        if (packed.src_rows[i] < 0) continue;
        const T* tail = (const T*)job.tails + packed.src_rows[i] * job.tail_row_stride;
        for (int64_t c = 0; c < job.channels; ++c)
            for (int64_t j = 0; j < kept; ++j)
                old[i * size + j * job.channels + c] = load_one(tail + c * kept + j);
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)packed.threads)
    for (int64_t piece = 0; piece < (int64_t)owner.size(); ++piece) {
        const int64_t i = owner[piece], first = packed.offsets[i];
        const int64_t end = std::min(begin[piece] + TILE, packed.offsets[i + 1]);
        convolve_tokens<T>(job, old.data() + i * size, first, begin[piece], end);
    }
    auto keep = [&](int64_t i, int64_t stop, int64_t row) {
        const int64_t first = packed.offsets[i];
        T* tail = (T*)job.tails + row * job.tail_row_stride;
        for (int64_t j = 0; j < kept; ++j) {
            const int64_t at = stop - kept + j;
            const T* x = (const T*)job.x + at * job.x_stride;
            const float* before = old.data() + i * size + (at - first + kept) * job.channels;
            for (int64_t c = 0; c < job.channels; ++c)
                store_one(tail + c * kept + j, at < first ? before[c] : load_one(x + c));
        }
    };
    for (int64_t i = 0; i < packed.sequences; ++i) {
        for (int64_t t = packed.offsets[i]; t < packed.offsets[i + 1]; ++t)
            if (packed.snapshot_rows[t] >= 0) keep(i, t + 1, packed.snapshot_rows[t]);
        keep(i, packed.offsets[i + 1], packed.dst_rows[i]);
    }
}

VLM_STRUCT(Packed, sequences, threads, offsets, src_rows, dst_rows, snapshot_rows);
VLM_STRUCT(Convolution, packed, channels, kernel, x_stride, tail_row_stride, x, taps, tails, out);

}  // namespace vlm

// `bits` is 32 for float32 inputs, 16 for bfloat16. Arguments are checked by the caller. Returns
// what `guarded` does.
extern "C" int64_t vlm_causal_conv_prefill(const vlm::Convolution* job, int64_t bits) {
    return vlm::guarded([=] {
        bits == 32 ? vlm::convolve_packed<float>(*job) : vlm::convolve_packed<vlm::bf16>(*job);
    });
}
