// The gated delta rule over the tokens of a step, and its gates; see kernels/gated_delta. Threads
// share the heads of all sequences.
#include <algorithm>

#include "calls.h"
#include "gated_delta/gated_delta.h"
#include "guard.h"
#include "products/product.h"

namespace vlm {

ScratchBuffer& delta_scratch() {
    static thread_local ScratchBuffer own;
    return own;
}

// Advances one head by tokens begin .. begin + n - 1. The state after them goes to `row` unless
// that is null.
template <typename T, typename S, bool DELTA>
void delta_tile(const Delta& job, int64_t head, int64_t begin, int64_t n,
                HeadState<S, DELTA>& state, float* scratch, S* row) {
    const int64_t Dk = job.key_dim, Dv = job.value_dim;
    const int64_t key_head = head * job.key_heads / job.value_heads;
    float *qk = scratch, *v = qk + TOKEN_TILE * 2 * Dk, *gates = v + TOKEN_TILE * Dv;
    for (int64_t t = 0; t < n; ++t) {
        const T* q = (const T*)job.q + (begin + t) * job.q_stride + key_head * job.q_head;
        const T* k = (const T*)job.k + (begin + t) * job.k_stride + key_head * job.k_head;
        const T* value = (const T*)job.v + (begin + t) * job.v_stride + head * job.v_head;
        for (int64_t d = 0; d < Dk; d += LANES) {
            store(qk + 2 * t * Dk + d, load(q + d));
            store(qk + (2 * t + 1) * Dk + d, load(k + d));
        }
        for (int64_t d = 0; d < Dv; d += LANES) store(v + t * Dv + d, load(value + d));
        gates[4 * t] = exponential(job.g[(begin + t) * job.value_heads + head]);
        gates[4 * t + 1] = job.beta[(begin + t) * job.value_heads + head];
    }
    DELTA ? prepare(qk, n, Dk, gates) : overlap_keys(qk, n, Dk, gates);
    state.advance(n, qk, gates, v, Dv, row);
    for (int64_t t = 0; t < n; ++t) {
        const T* value = (const T*)job.v + (begin + t) * job.v_stride + head * job.v_head;
        T* out = (T*)job.out + ((begin + t) * job.value_heads + head) * Dv;
        for (int64_t d = 0; d < Dv; d += LANES) {
            const Vec o = load(v + t * Dv + d);
            store(out + d, DELTA ? o : fma(job.skip[head], load(value + d), o));
        }
    }
}

template <typename T, typename S, bool DELTA>
void delta_head(const Delta& job, int64_t sequence, int64_t head) {
    const Packed& packed = job.packed;
    const int64_t size = job.key_dim * job.value_dim;
    float* memory = delta_scratch().get(delta_scratch_floats(job.key_dim, job.value_dim, 1));
    auto row = [&](int64_t index) {
        return index < 0 ? nullptr : (S*)job.states + index * job.state_row_stride + head * size;
    };
    HeadState<S, DELTA> state(job.key_dim, job.value_dim, memory);
    state.begin(row(packed.src_rows[sequence]));
    for_token_tiles(packed, sequence, [&](int64_t begin, int64_t n, int64_t index) {
        delta_tile<T, S, DELTA>(job, head, begin, n, state, memory + size, row(index));
    });
    state.finish(row(packed.dst_rows[sequence]));
}

template <typename T>
void delta_packed(const Delta& job) {
    const int64_t pieces = job.packed.sequences * job.value_heads;
    const bool rounded = job.state_type == BFLOAT16;
    const auto head = job.skip  ? rounded ? delta_head<T, bf16, false> : delta_head<T, float, false>
                      : rounded ? delta_head<T, bf16, true>
                                : delta_head<T, float, true>;
    on_all_threads(
        job.packed.threads,
        [&] { delta_scratch().get(delta_scratch_floats(job.key_dim, job.value_dim, 1)); },
        [&](LoopScheduler& scheduler) {
            scheduler.for_each(
                pieces, [&](int64_t i) { head(job, i / job.value_heads, i % job.value_heads); });
        });
}

template <typename T>
void gates(const Gates& job) {
    const int threads = job.tokens < TOKEN_TILE ? 1 : (int)job.threads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < job.tokens; ++t)
        for (int64_t h = 0; h < job.heads; h += LANES) {
            const int64_t some = std::min<int64_t>(LANES, job.heads - h);
            const T* raw = (const T*)job.raw + t * job.stride + h;
            const Vec decay =
                log_decay(load_partial(raw + job.heads, some), load_partial(job.dt_bias + h, some),
                          load_partial(job.neg_decay + h, some));
            store_partial(job.beta + t * job.heads + h, sigmoid(load_partial(raw, some)), some);
            store_partial(job.decay + t * job.heads + h, decay, some);
        }
}

}  // namespace vlm

extern "C" int64_t vlm_gates(const vlm::Gates* job, int64_t bits) {
    return vlm::guarded(
        [=] { bits == 32 ? vlm::gates<float>(*job) : vlm::gates<vlm::bf16>(*job); });
}

extern "C" int64_t vlm_gated_delta(const vlm::Delta* job, int64_t bits) {
    return vlm::guarded(
        [=] { bits == 32 ? vlm::delta_packed<float>(*job) : vlm::delta_packed<vlm::bf16>(*job); });
}
