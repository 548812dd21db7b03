// Ops of a prefill step over packed sequences, one entry point each; see the op's module in kernels/
// for what they compute. Work is shared out in pieces that threads take as they come.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "gated_delta.h"
#include "guard.h"
#include "prefill_attention.h"

namespace vlm {

constexpr int64_t TILE = 64;  // tokens whose inputs are made ready together

// A packed prefill: `snapshot_rows[t]` receives the state after token t, -1 for none.
struct Packed {
    int64_t sequences, threads;
    const int64_t *offsets, *src_rows, *dst_rows, *snapshot_rows;
};

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

struct Delta {
    Packed packed;
    int64_t key_heads, value_heads, key_dim, value_dim;
    int64_t q_stride, q_head, k_stride, k_head, v_stride, v_head;  // of tokens and heads
    int64_t state_row_stride;
    const void *q, *k, *v;
    const float *g, *beta;  // [N, value_heads], contiguous
    float* states;
    void* out;  // [N, value_heads, value_dim], contiguous
};

constexpr int COLUMNS = 2;  // vectors of a state's part: 128 x 32 float32 are half of an L1 cache

// One head's state in parts of COLUMNS vectors, each in memory of its own: rows of the whole state
// lie at a distance at which they would push each other out of the cache.
class HeadState {
  public:
    HeadState(int64_t key_dim, int64_t value_dim) : key_dim_(key_dim), value_dim_(value_dim) {
        parts_.resize(key_dim * value_dim);
    }

    // The part that begins with column c, rows of `width(c)`.
    float* part(int64_t c) { return parts_.data() + c * key_dim_; }

    int64_t width(int64_t c) const {
        const int64_t wide = COLUMNS * LANES;
        return value_dim_ - c >= wide ? wide : LANES;
    }

    void clear() { std::fill(parts_.begin(), parts_.end(), 0.0f); }

    void read(const float* row) {
        each([row](float* own, int64_t place, int64_t size) { std::memcpy(own, row + place, size); });
    }

    void write(float* row) {
        each([row](float* own, int64_t place, int64_t size) { std::memcpy(row + place, own, size); });
    }

  private:
    template <typename Move>
    void each(const Move& move) {
        for (int64_t c = 0; c < value_dim_; c += width(c))
            for (int64_t d = 0; d < key_dim_; ++d)
                move(part(c) + d * width(c), d * value_dim_ + c, width(c) * sizeof(float));
    }

    int64_t key_dim_, value_dim_;
    std::vector<float> parts_;
};

// Tokens begin .. begin + n - 1 of one head. `scratch` has TILE * (2 key_dim + value_dim + 4).
template <typename T>
void delta_tile(const Delta& job, int64_t head, int64_t begin, int64_t n, HeadState& state,
                float* scratch) {
    const int64_t Dk = job.key_dim, Dv = job.value_dim;
    const int64_t key_head = head * job.key_heads / job.value_heads;
    float *qk = scratch, *v = qk + TILE * 2 * Dk, *gates = v + TILE * Dv;
    for (int64_t t = 0; t < n; ++t) {
        const T* q = (const T*)job.q + (begin + t) * job.q_stride + key_head * job.q_head;
        const T* k = (const T*)job.k + (begin + t) * job.k_stride + key_head * job.k_head;
        const T* value = (const T*)job.v + (begin + t) * job.v_stride + head * job.v_head;
        for (int64_t d = 0; d < Dk; d += LANES) {
            store(qk + 2 * t * Dk + d, load(q + d));
            store(qk + (2 * t + 1) * Dk + d, load(k + d));
        }
        for (int64_t d = 0; d < Dv; d += LANES) store(v + t * Dv + d, load(value + d));
    }
    normalise(qk, n, 2 * Dk, Dk, 1.0f / std::sqrt((float)Dk));
    normalise(qk + Dk, n, 2 * Dk, Dk, 1.0f);
    for (int64_t t = 0; t < n; ++t) {
        Vec overlap{};
        for (int64_t d = 0; d < Dk; d += LANES)
            overlap += load(qk + 2 * t * Dk + d) * load(qk + (2 * t + 1) * Dk + d);
        gates[4 * t] = std::exp(job.g[(begin + t) * job.value_heads + head]);
        gates[4 * t + 1] = job.beta[(begin + t) * job.value_heads + head];
        gates[4 * t + 2] = sum(overlap);
    }
    for (int64_t c = 0; c < Dv; c += state.width(c)) {
        const int64_t wide = state.width(c);
        float* own = state.part(c);
        wide == LANES ? recurrence<1>(own, own, Dk, wide, n, qk, gates, v + c, Dv, nullptr)
                      : recurrence<COLUMNS>(own, own, Dk, wide, n, qk, gates, v + c, Dv, nullptr);
    }
    for (int64_t t = 0; t < n; ++t)
        for (int64_t d = 0; d < Dv; d += LANES)
            store((T*)job.out + ((begin + t) * job.value_heads + head) * Dv + d,
                  load(v + t * Dv + d));
}

template <typename T>
void delta_head(const Delta& job, int64_t sequence, int64_t head, HeadState& state,
                float* scratch) {
    const Packed& packed = job.packed;
    const int64_t last = packed.offsets[sequence + 1], src = packed.src_rows[sequence];
    float* states = job.states + head * job.key_dim * job.value_dim;
    src < 0 ? state.clear() : state.read(states + src * job.state_row_stride);
    for (int64_t begin = packed.offsets[sequence]; begin < last;) {
        // Up to the next snapshot, at most a tile.
        const int64_t most = std::min(begin + TILE, last);
        int64_t end = begin + 1;
        while (end < most && packed.snapshot_rows[end - 1] < 0) ++end;
        delta_tile<T>(job, head, begin, end - begin, state, scratch);
        const int64_t row = packed.snapshot_rows[end - 1];
        if (row >= 0) state.write(states + row * job.state_row_stride);
        begin = end;
    }
    state.write(states + packed.dst_rows[sequence] * job.state_row_stride);
}

template <typename T>
void delta_packed(const Delta& job) {
    const int64_t pieces = job.packed.sequences * job.value_heads;
#pragma omp parallel num_threads((int)job.packed.threads)
    {
        HeadState state(job.key_dim, job.value_dim);
        std::vector<float> scratch(TILE * (2 * job.key_dim + job.value_dim + 4));
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pieces; ++i)
            delta_head<T>(job, i / job.value_heads, i % job.value_heads, state, scratch.data());
    }
}

}  // namespace vlm

extern "C" {

// `bits` is 32 for float32 inputs, 16 for bfloat16. Arguments are checked by the caller. All return
// what `guarded` does.
int64_t vlm_causal_conv_prefill(const vlm::Convolution* job, int64_t bits) {
    return vlm::guarded([=] {
        bits == 32 ? vlm::convolve_packed<float>(*job) : vlm::convolve_packed<vlm::bf16>(*job);
    });
}

int64_t vlm_attention_prefill(const vlm::PrefillAttention* job, int64_t bits) {
    return vlm::guarded([=] {
        bits == 32 ? vlm::attend_packed<float>(*job) : vlm::attend_packed<vlm::bf16>(*job);
    });
}

int64_t vlm_chunk_gated_delta(const vlm::Delta* job, int64_t bits) {
    return vlm::guarded([=] {
        bits == 32 ? vlm::delta_packed<float>(*job) : vlm::delta_packed<vlm::bf16>(*job);
    });
}
}
