// The gated delta rule and the recurrence of Mamba2, token by token, shared by compiled steps and
// the op of a single layer. See kernels/gated_delta for the mathematics.
#pragma once

#include <type_traits>

#include "functions.h"
#include "gated_delta/packed.h"
#include "guard.h"
#include "scratch.h"

namespace vlm {

// Vectors in a part of a state: 128 x 32 float32 are half of an L1 cache.
constexpr int DELTA_VECS = WIDTH == 16 ? 2 : 1;
// Vectors in a part that is read in place: whole rows, as far as accumulators fit registers.
constexpr int WIDE_VECS = WIDTH == 16 ? 8 : 4;

// Prefetch distance in rows of a state.
constexpr int64_t STATE_PREFETCH_ROWS = 8;

// Returns the log of the decay: neg_decay * softplus(a + bias).
inline Vec log_decay(const Vec& a, const Vec& bias, const Vec& neg_decay) {
    return neg_decay * softplus(a + bias);
}

// Scales n vectors in place to length `factor`.
inline void normalise(float* x, int64_t n, int64_t stride, int64_t dim, float factor) {
    for (int64_t t = 0; t < n; ++t, x += stride) {
        Vec squares = zero();
        for (int64_t d = 0; d < dim; d += LANES) squares = fma(load(x + d), load(x + d), squares);
        const Vec scale = all(factor / square_root(sum(squares) + 1e-6f));
        for (int64_t d = 0; d < dim; d += LANES) store(x + d, load(x + d) * scale);
    }
}

// Whether a line is prefetched to be read or to be written.
enum Access { READ, WRITE };

// Part of a head's state, in float32 or bfloat16: `key_dim` rows of some vectors, `stride` apart.
// Written values must be exact in E.
template <typename E>
struct StatePart {
    E* at;
    int64_t stride;

    VLM_INLINE Floats read(int64_t d, int i) const {
        return load_register(at + d * stride + i * WIDTH);
    }
    VLM_INLINE void write(int64_t d, int i, Floats s) const {
        store_exact(at + d * stride + i * WIDTH, s);
    }
    // Prefetches `width` elements of a row. Rows are too far apart for the hardware prefetcher.
    template <Access ACCESS>
    VLM_INLINE void prefetch(int64_t d, int64_t width) const {
        const char* row = (const char*)(at + d * stride);
        for (int64_t b = 0; b < width * (int64_t)sizeof(E); b += 64)
            __builtin_prefetch(row + b, ACCESS);
    }
};

// Advances COLUMNS vectors of a head's state by some tokens. With the decay factored out, key and
// query read the old state in one pass, and the read of a token shares its pass with the update of
// the token before:
// o = decay S'q + (k.q) change
// change = beta (v - decay S'k), or beta v without DELTA
// S = decay S + k change'
// The state starts as `from`, unless it is `in_scratch` (in `own`) already; a null `from` means
// zeros. `own` is the working copy, and the last token's state goes to `to` unless that is null. S
// is the type of the pool: after every token the state is rounded to it. `qk` is [n, 2, key_dim]
// with queries first, `gates` [n, 4] holds decay, beta and k.q. Every token's change goes to
// `changes` unless that is null.
template <int COLUMNS, bool DELTA, typename S, typename E>
void recurrence(StatePart<S> from, bool in_scratch, StatePart<E> own, StatePart<S> to,
                int64_t key_dim, int64_t tokens, const float* qk, const float* gates, float* v,
                int64_t v_stride, float* changes, int64_t change_stride) {
    constexpr int N = COLUMNS * VLM_REGISTERS_PER_VEC;
    Floats from_key[N], from_query[N], change[N];
    auto clear = [&] {
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) from_key[i] = from_query[i] = Floats{};
    };
    clear();
    auto read_state = [&](bool copy, const auto& old) {
        for (int64_t d = 0; d < key_dim; ++d) {
            if (copy && from.at)
                from.template prefetch<READ>(d + STATE_PREFETCH_ROWS, COLUMNS * LANES);
            if (copy && to.at) to.template prefetch<WRITE>(d, COLUMNS * LANES);
            const Floats k = broadcast(qk[key_dim + d]), q = broadcast(qk[d]);
#pragma GCC unroll 8
            for (int i = 0; i < N; ++i) {
                const Floats s = old(d, i);
                if (copy) own.write(d, i, s);
                if constexpr (DELTA) from_key[i] = fma(k, s, from_key[i]);
                from_query[i] = fma(q, s, from_query[i]);
            }
        }
    };
    if (in_scratch)
        read_state(false, [&](int64_t d, int i) { return own.read(d, i); });
    else if (from.at)
        read_state((void*)from.at != (void*)own.at,
                   [&](int64_t d, int i) { return from.read(d, i); });
    else
        read_state(true, [](int64_t, int) { return Floats{}; });
    for (int64_t t = 0; t < tokens; ++t) {
        const Floats decay = broadcast(gates[4 * t]), beta = broadcast(gates[4 * t + 1]);
        const Floats overlap = broadcast(gates[4 * t + 2]);
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
            float* value = v + t * v_stride + i * WIDTH;
            const Floats whole = read<Floats>(value);
            change[i] = beta * (DELTA ? fma(-decay, from_key[i], whole) : whole);
            const Floats out = fma(decay, from_query[i], overlap * change[i]);
            std::memcpy(value, &out, sizeof out);
            if (changes)
                std::memcpy(changes + t * change_stride + i * WIDTH, &change[i], sizeof change[i]);
        }
        const float* keys = qk + (2 * t + 1) * key_dim;
        if (t + 1 == tokens) {
            auto end = [&](const auto& part) {
                for (int64_t d = 0; d < key_dim; ++d)
#pragma GCC unroll 8
                    for (int i = 0; i < N; ++i) {
                        const Floats s = fma(broadcast(keys[d]), change[i], decay * own.read(d, i));
                        part.write(d, i, rounded<S>(s));
                    }
            };
            to.at ? end(to) : end(own);
            return;
        }
        const float* next = qk + (2 * t + 2) * key_dim;
        clear();
        for (int64_t d = 0; d < key_dim; ++d) {
            const Floats k = broadcast(keys[d]), q = broadcast(next[d]),
                         n = broadcast(next[key_dim + d]);
#pragma GCC unroll 8
            for (int i = 0; i < N; ++i) {
                const Floats s = rounded<S>(fma(k, change[i], decay * own.read(d, i)));
                own.write(d, i, s);
                if constexpr (DELTA) from_key[i] = fma(n, s, from_key[i]);
                from_query[i] = fma(q, s, from_query[i]);
            }
        }
    }
}

// The state of a head throughout a sequence, in parts with memory of their own: the rows of a whole
// state are so far apart that they would evict each other from the cache. The pool's rows are of S.
template <typename S, bool DELTA = true>
class HeadState {
  public:
    HeadState() = default;
    HeadState(int64_t key_dim, int64_t value_dim, float* memory)
        : key_dim_(key_dim), value_dim_(value_dim), memory_(memory) {}

    // Starts from a row of the pool; null means zeros.
    void begin(S* row) { from_ = row, in_scratch_ = false; }

    // Advances by `n` tokens, 1 to TOKEN_TILE, and writes the state after them to `row` unless that
    // is null.
    void advance(int64_t n, const float* qk, const float* gates, float* v, int64_t v_stride, S* row,
                 float* changes = nullptr, int64_t change_stride = 0) {
        // A single token's state is read in place, in wider parts.
        const bool in_place = n == 1 && row && from_ && !in_scratch_;
        for (int64_t c = 0; c < value_dim_;) {
            int64_t vecs = in_place ? WIDE_VECS : DELTA_VECS;
            while (vecs > (value_dim_ - c) / LANES) vecs /= 2;
            const StatePart<S> from = part(from_, c), to = part(row, c);
            auto run = [&](const auto& own) {
                using E = std::remove_pointer_t<decltype(own.at)>;
                const auto pass = vecs == WIDE_VECS       ? recurrence<WIDE_VECS, DELTA, S, E>
                                  : vecs == WIDE_VECS / 2 ? recurrence<WIDE_VECS / 2, DELTA, S, E>
                                  : vecs == 2             ? recurrence<2, DELTA, S, E>
                                                          : recurrence<1, DELTA, S, E>;
                pass(from, in_scratch_, own, to, key_dim_, n, qk, gates, v + c, v_stride,
                     changes ? changes + c : nullptr, change_stride);
            };
            if (in_place)
                run(from);
            else
                run(StatePart<float>{memory_ + c * key_dim_, vecs * LANES});
            c += vecs * LANES;
        }
        from_ = row;
        in_scratch_ = row == nullptr;
    }

    // Copies the last state to `row` if it went elsewhere.
    void finish(S* row) const {
        const int64_t bytes = key_dim_ * value_dim_ * sizeof(S);
        if (!from_) std::memset(row, 0, bytes);
        if (from_ && from_ != row) std::memcpy(row, from_, bytes);
    }

  private:
    StatePart<S> part(S* row, int64_t c) const { return {row ? row + c : nullptr, value_dim_}; }

    int64_t key_dim_ = 0, value_dim_ = 0;
    float* memory_ = nullptr;
    S* from_ = nullptr;
    bool in_scratch_ = false;
};

// Updates of a layer's states that are not applied yet, one entry per token. Strides are from entry
// to entry, in elements.
struct Updates {
    int64_t key_stride, change_stride, decay_stride, input_stride;
    float *keys, *changes,
        *decays;   // [key_heads, key_dim], [value_heads, value_dim], [value_heads]
    void* inputs;  // of the convolution, [channels]
};

// Applies `count` tokens' updates to a head's state in place, as `recurrence` does.
template <typename S>
void fold(S* state, int64_t key_dim, int64_t value_dim, int64_t count, const float* keys,
          const float* changes, const float* decays, const Updates& strides) {
    for (int64_t d = 0; d < key_dim; ++d)
        for (int64_t c = 0; c < value_dim; c += WIDTH) {
            S* at = state + d * value_dim + c;
            Floats s = load_register(at);
            for (int64_t t = 0; t < count; ++t)
                s = rounded<S>(fma(broadcast(keys[t * strides.key_stride + d]),
                                   read<Floats>(changes + t * strides.change_stride + c),
                                   broadcast(decays[t * strides.decay_stride]) * s));
            store_exact(at, s);
        }
}

// Returns the floats of scratch memory for the states and a tile's inputs of `shared` value heads.
inline int64_t delta_scratch_floats(int64_t key_dim, int64_t value_dim, int64_t shared) {
    return shared * (key_dim * value_dim + TOKEN_TILE * (value_dim + 4)) + TOKEN_TILE * 2 * key_dim;
}

ScratchBuffer& delta_scratch();

// Writes the products of a tile's queries and keys to `gates`.
inline void overlap_keys(const float* qk, int64_t n, int64_t key_dim, float* gates) {
    for (int64_t t = 0; t < n; ++t) {
        const float* q = qk + 2 * t * key_dim;
        Vec overlap = zero();
        for (int64_t d = 0; d < key_dim; d += LANES)
            overlap = fma(load(q + d), load(q + key_dim + d), overlap);
        gates[4 * t + 2] = sum(overlap);
    }
}

// Normalises queries and keys of a tile to unit length, and writes their products to `gates`.
inline void prepare(float* qk, int64_t n, int64_t key_dim, float* gates) {
    normalise(qk, n, 2 * key_dim, key_dim, 1.0f / square_root((float)key_dim));
    normalise(qk + key_dim, n, 2 * key_dim, key_dim, 1.0f);
    overlap_keys(qk, n, key_dim, gates);
}

}  // namespace vlm
