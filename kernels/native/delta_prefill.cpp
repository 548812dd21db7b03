// The gated delta rule over a prefill, token by token; see kernels/gated_delta for what it
// computes. Heads of the sequences are taken by threads as they come.
#include <algorithm>
#include <vector>

#include "gated_delta.h"
#include "guard.h"
#include "layout.h"
#include "packed.h"

namespace vlm {

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
        each([row](float* own, int64_t place, int64_t size) {
            std::memcpy(own, row + place, size);
        });
    }

    void write(float* row) {
        each([row](float* own, int64_t place, int64_t size) {
            std::memcpy(row + place, own, size);
        });
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

// Write strength and log decay, [tokens, heads] each, from b and a side by side.
struct Gates {
    int64_t tokens, heads, stride, threads;
    const void* raw;
    const float *neg_decay, *dt_bias;
    float *beta, *decay;
};

template <typename T>
void gates(const Gates& job) {
    const int threads = job.tokens < TILE ? 1 : (int)job.threads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < job.tokens; ++t)
        for (int64_t h = 0; h < job.heads; ++h) {
            const T* raw = (const T*)job.raw + t * job.stride + h;
            job.beta[t * job.heads + h] = sigmoid(load_one(raw));
            job.decay[t * job.heads + h] =
                log_decay(load_one(raw + job.heads), job.dt_bias[h], job.neg_decay[h]);
        }
}

VLM_STRUCT(Delta, packed, key_heads, value_heads, key_dim, value_dim, q_stride, q_head, k_stride,
           k_head, v_stride, v_head, state_row_stride, q, k, v, g, beta, states, out);
VLM_STRUCT(Gates, tokens, heads, stride, threads, raw, neg_decay, dt_bias, beta, decay);

}  // namespace vlm

extern "C" int64_t vlm_gates(const vlm::Gates* job, int64_t bits) {
    return vlm::guarded(
        [=] { bits == 32 ? vlm::gates<float>(*job) : vlm::gates<vlm::bf16>(*job); });
}

// `bits` is 32 for float32 inputs, 16 for bfloat16. Arguments are checked by the caller. Returns
// what `guarded` does.
extern "C" int64_t vlm_chunk_gated_delta(const vlm::Delta* job, int64_t bits) {
    return vlm::guarded(
        [=] { bits == 32 ? vlm::delta_packed<float>(*job) : vlm::delta_packed<vlm::bf16>(*job); });
}
