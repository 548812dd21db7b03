// The gated delta rule, token by token: what a step's layers and the ops of single layers share.
// See kernels/gated_delta for the mathematics.
#pragma once

#include <type_traits>

#include "functions.h"
#include "gated_delta/packed.h"
#include "guard.h"
#include "room.h"

namespace vlm {

// Vectors of a state's part: 128 x 32 float32 are half of an L1 cache.
constexpr int DELTA_VECS = WIDTH == 16 ? 2 : 1;
// Of a part that is read where it lies: whole rows are, as far as their sums stay in registers.
constexpr int WIDE_VECS = WIDTH == 16 ? 8 : 4;

// Rows of a state between the one that is copied and the one that is asked for.
constexpr int64_t STATE_AHEAD = 8;

// log of the decay: neg_decay * softplus(a + bias).
inline Vec log_decay(const Vec& a, const Vec& bias, const Vec& neg_decay) {
    return neg_decay * softplus(a + bias);
}

// Unit length, times `factor`, of n vectors in place.
inline void normalise(float* x, int64_t n, int64_t stride, int64_t dim, float factor) {
    for (int64_t t = 0; t < n; ++t, x += stride) {
        Vec squares = zero();
        for (int64_t d = 0; d < dim; d += LANES) squares = fma(load(x + d), load(x + d), squares);
        const Vec scale = all(factor / square_root(sum(squares) + 1e-6f));
        for (int64_t d = 0; d < dim; d += LANES) store(x + d, load(x + d) * scale);
    }
}

// What a line of the memory is asked for.
enum Access { READ, WRITE };

// Part of a head's state, in float32 or bfloat16: `key_dim` rows of some vectors, `stride` apart.
// Only what `rounded` gives for its type is written.
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
    // Asks the memory for `width` of a row, which it does not foresee: rows lie apart.
    template <Access ACCESS>
    VLM_INLINE void ask_for(int64_t d, int64_t width) const {
        const char* row = (const char*)(at + d * stride);
        for (int64_t b = 0; b < width * (int64_t)sizeof(E); b += 64)
            __builtin_prefetch(row + b, ACCESS);
    }
};

// COLUMNS vectors of a head's state through some tokens. With the decay outside, key and query read
// the old state together, and the read of one token shares its pass with the update of the last:
//   o = decay S'q + (k.q) change,  change = beta (v - decay S'k),  S = decay S + k change'
// The state begins as `from`, unless it is in `own` already or `from` is null for the zero state;
// `own` is worked on, and the last token's state goes to `to` unless that is null. S is the type of
// the pool: after every token the state is what that would hold. `qk` is [n, 2, key_dim] with
// queries first, `gates` [n, 4] holds decay, beta and k.q. Every token's change goes to `changes`
// unless that is null.
template <int COLUMNS, typename S, typename E>
void recurrence(StatePart<S> from, bool inside, StatePart<E> own, StatePart<S> to, int64_t key_dim,
                int64_t tokens, const float* qk, const float* gates, float* v, int64_t v_stride,
                float* changes, int64_t change_stride) {
    constexpr int N = COLUMNS * VLM_PARTS;
    Floats from_key[N], from_query[N], change[N];
    auto clear = [&] {
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) from_key[i] = from_query[i] = Floats{};
    };
    clear();
    auto meet = [&](bool copy, const auto& old) {
        for (int64_t d = 0; d < key_dim; ++d) {
            if (copy && from.at) from.template ask_for<READ>(d + STATE_AHEAD, COLUMNS * LANES);
            if (copy && to.at) to.template ask_for<WRITE>(d, COLUMNS * LANES);
            const Floats k = spread(qk[key_dim + d]), q = spread(qk[d]);
#pragma GCC unroll 8
            for (int i = 0; i < N; ++i) {
                const Floats s = old(d, i);
                if (copy) own.write(d, i, s);
                from_key[i] = fused(k, s, from_key[i]);
                from_query[i] = fused(q, s, from_query[i]);
            }
        }
    };
    if (inside)
        meet(false, [&](int64_t d, int i) { return own.read(d, i); });
    else if (from.at)
        meet((void*)from.at != (void*)own.at, [&](int64_t d, int i) { return from.read(d, i); });
    else
        meet(true, [](int64_t, int) { return Floats{}; });
    for (int64_t t = 0; t < tokens; ++t) {
        const Floats decay = spread(gates[4 * t]), beta = spread(gates[4 * t + 1]);
        const Floats overlap = spread(gates[4 * t + 2]);
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
            float* value = v + t * v_stride + i * WIDTH;
            change[i] = beta * fused(-decay, from_key[i], read<Floats>(value));
            const Floats out = fused(decay, from_query[i], overlap * change[i]);
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
                        const Floats s = fused(spread(keys[d]), change[i], decay * own.read(d, i));
                        part.write(d, i, rounded<S>(s));
                    }
            };
            to.at ? end(to) : end(own);
            return;
        }
        const float* next = qk + (2 * t + 2) * key_dim;
        clear();
        for (int64_t d = 0; d < key_dim; ++d) {
            const Floats k = spread(keys[d]), q = spread(next[d]), n = spread(next[key_dim + d]);
#pragma GCC unroll 8
            for (int i = 0; i < N; ++i) {
                const Floats s = rounded<S>(fused(k, change[i], decay * own.read(d, i)));
                own.write(d, i, s);
                from_key[i] = fused(n, s, from_key[i]);
                from_query[i] = fused(q, s, from_query[i]);
            }
        }
    }
}

// A head's state on its way through a sequence, in parts with memory of their own: rows of the
// whole state lie at a distance at which they would push each other out of the cache. The pool's
// rows are of S.
template <typename S>
class HeadState {
  public:
    HeadState() = default;
    HeadState(int64_t key_dim, int64_t value_dim, float* memory)
        : key_dim_(key_dim), value_dim_(value_dim), memory_(memory) {}

    // Starts from a row of the pool, null for the zero state.
    void begin(S* row) { from_ = row, inside_ = false; }

    // `n` tokens, 1 to TOKEN_TILE; the state after them is written to `row` unless that is null.
    void advance(int64_t n, const float* qk, const float* gates, float* v, int64_t v_stride, S* row,
                 float* changes = nullptr, int64_t change_stride = 0) {
        // A single token's state is read where it lies, in wider parts.
        const bool apart = n == 1 && row && from_ && !inside_;
        for (int64_t c = 0; c < value_dim_;) {
            int64_t vecs = apart ? WIDE_VECS : DELTA_VECS;
            while (vecs > (value_dim_ - c) / LANES) vecs /= 2;
            const StatePart<S> from = part(from_, c), to = part(row, c);
            auto run = [&](const auto& own) {
                using E = std::remove_pointer_t<decltype(own.at)>;
                const auto pass = vecs == WIDE_VECS       ? recurrence<WIDE_VECS, S, E>
                                  : vecs == WIDE_VECS / 2 ? recurrence<WIDE_VECS / 2, S, E>
                                  : vecs == 2             ? recurrence<2, S, E>
                                                          : recurrence<1, S, E>;
                pass(from, inside_, own, to, key_dim_, n, qk, gates, v + c, v_stride,
                     changes ? changes + c : nullptr, change_stride);
            };
            if (apart)
                run(from);
            else
                run(StatePart<float>{memory_ + c * key_dim_, vecs * LANES});
            c += vecs * LANES;
        }
        from_ = row;
        inside_ = row == nullptr;
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
    bool inside_ = false;
};

// What tokens do to the states of a layer, an entry for each token whose state has yet to be
// written; strides are from entry to entry, in elements.
struct Updates {
    int64_t key_stride, change_stride, decay_stride, input_stride;
    float *keys, *changes,
        *decays;   // [key_heads, key_dim], [value_heads, value_dim], [value_heads]
    void* inputs;  // of the convolution, [channels]
};

// `count` tokens' updates of a head's state in place, as `recurrence` makes them.
template <typename S>
void fold(S* state, int64_t key_dim, int64_t value_dim, int64_t count, const float* keys,
          const float* changes, const float* decays, const Updates& strides) {
    for (int64_t d = 0; d < key_dim; ++d)
        for (int64_t c = 0; c < value_dim; c += WIDTH) {
            S* at = state + d * value_dim + c;
            Floats s = load_register(at);
            for (int64_t t = 0; t < count; ++t)
                s = rounded<S>(fused(spread(keys[t * strides.key_stride + d]),
                                     read<Floats>(changes + t * strides.change_stride + c),
                                     spread(decays[t * strides.decay_stride]) * s));
            store_exact(at, s);
        }
}

// Floats that a thread needs for the states and a tile's inputs of `shared` value heads.
inline int64_t delta_room(int64_t key_dim, int64_t value_dim, int64_t shared) {
    return shared * (key_dim * value_dim + TOKEN_TILE * (value_dim + 4)) + TOKEN_TILE * 2 * key_dim;
}

Room& own_delta_room();

// Queries and keys of a tile to unit length; the products of the two to `gates`.
inline void prepare(float* qk, int64_t n, int64_t key_dim, float* gates) {
    normalise(qk, n, 2 * key_dim, key_dim, 1.0f / square_root((float)key_dim));
    normalise(qk + key_dim, n, 2 * key_dim, key_dim, 1.0f);
    for (int64_t t = 0; t < n; ++t) {
        const float* q = qk + 2 * t * key_dim;
        Vec overlap = zero();
        for (int64_t d = 0; d < key_dim; d += LANES)
            overlap = fma(load(q + d), load(q + key_dim + d), overlap);
        gates[4 * t + 2] = sum(overlap);
    }
}

}  // namespace vlm
