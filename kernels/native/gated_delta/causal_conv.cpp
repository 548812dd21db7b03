// Causal depthwise convolution of a step; see kernels/causal_conv. Threads take channels of
// sequences dynamically.
#include <algorithm>

#include "calls.h"
#include "gated_delta/convolution.h"
#include "guard.h"

namespace vlm {

constexpr int64_t GROUPS = 16;  // of 16 channels each, per pass over a tile of tokens

// Convolves some groups of channels of one sequence. The old tail may be the row that receives the
// new one.
template <typename T, bool SILU>
void convolve_channels(const Convolution& job, int64_t sequence, int64_t first, int64_t count) {
    const Packed& packed = job.packed;
    const int64_t history = job.kernel - 1;
    auto tails = [&](int64_t row) {
        return Tails<T>{row < 0 ? nullptr : (T*)job.tails + row * job.tail_row_stride, history};
    };
    Vec windows[GROUPS][MAX_TAPS];
    auto each = [&](const auto& work) {
        for (int64_t g = 0; g < count; ++g) work((first + g) * LANES, windows[g]);
    };
    each([&](int64_t c, Vec* window) { tails(packed.src_rows[sequence]).load(c, window); });
    for_token_tiles(packed, sequence, [&](int64_t begin, int64_t n, int64_t row) {
        const T* x = (const T*)job.x + begin * job.x_stride;
        T* out = (T*)job.out + begin * job.channels;
        each([&](int64_t c, Vec* window) {
            convolve<T, SILU>(x + c, job.x_stride, n, job.taps + c,
                              job.bias ? job.bias + c : nullptr, job.channels, history, window,
                              out + c, job.channels);
            tails(row).store(c, window);
        });
    });
    each([&](int64_t c, Vec* window) { tails(packed.dst_rows[sequence]).store(c, window); });
}

template <typename T>
void convolve_packed(const Convolution& job) {
    const int64_t groups = job.channels / LANES, chunks = (groups + GROUPS - 1) / GROUPS;
    const int64_t pieces = job.packed.sequences * chunks;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)job.packed.threads)
    for (int64_t i = 0; i < pieces; ++i) {
        const int64_t first = i % chunks * GROUPS;
        const int64_t sequence = i / chunks, count = std::min(GROUPS, groups - first);
        job.silu ? convolve_channels<T, true>(job, sequence, first, count)
                 : convolve_channels<T, false>(job, sequence, first, count);
    }
}

}  // namespace vlm

extern "C" int64_t vlm_causal_conv(const vlm::Convolution* job, int64_t bits) {
    return vlm::guarded([=] {
        bits == 32 ? vlm::convolve_packed<float>(*job) : vlm::convolve_packed<vlm::bf16>(*job);
    });
}
