// The Gated DeltaNet mixer of a step: one key head of one sequence and the value heads that share
// it. Goes from the projected input to the gated norm, one tile of tokens at a time.
#pragma once

#include "gated_delta/convolution.h"
#include "gated_delta/gated_delta.h"
#include "rows/rows.h"
#include "run.h"

namespace vlm {

constexpr int64_t MAX_SHARED = 16;  // value heads per key head

inline int64_t delta_heads_scratch_floats(const DeltaNet& op) {
    const int64_t shared = op.value_heads / op.key_heads;
    const int64_t channels = 2 * op.key_dim + shared * op.value_dim;
    return delta_scratch_floats(op.key_dim, op.value_dim, shared) + channels * MAX_TAPS;
}

// Activations are of T, states of S.
template <typename T, typename S>
class DeltaHeads {
  public:
    DeltaHeads(const DeltaNet& op, int64_t head, Strided<T> x, Strided<T> out)
        : op_(op),
          head_(head),
          shared_(op.value_heads / op.key_heads),
          history_(op.taps - 1),
          channels_(2 * op.key_heads * op.key_dim + op.value_heads * op.value_dim),
          x_(x),
          out_(out) {
        float* memory = delta_scratch().get(delta_heads_scratch_floats(op_));
        for (int64_t own = 0; own < shared_; ++own, memory += state_size())
            states_[own] = HeadState<S>(op_.key_dim, op_.value_dim, memory);
        qk_ = memory;
        v_ = qk_ + TOKEN_TILE * 2 * op_.key_dim;
        gates_ = v_ + TOKEN_TILE * shared_ * op_.value_dim;
        windows_ = gates_ + TOKEN_TILE * shared_ * 4;
    }

    void run(const Packed& packed, int64_t sequence) {
        const int64_t src = packed.src_rows[sequence], dst = packed.dst_rows[sequence];
        for (int64_t own = 0; own < shared_; ++own) states_[own].begin(state_row(src, own));
        const Tails<T> old = tails(src);
        each_channel([&](int64_t c, Vec* window, float*, int64_t) { old.load(c, window); });
        for_token_tiles(packed, sequence,
                        [&](int64_t begin, int64_t n, int64_t row) { tile(begin, n, row); });
        keep_tails(dst);
        for (int64_t own = 0; own < shared_; ++own) states_[own].finish(state_row(dst, own));
    }

    // Processes drafted tokens. First folds `folded` updates, from number `first` on, into the row.
    // Then the tokens' own updates replace them, and the row stays as it is.
    void verify(const Packed& packed, int64_t sequence, int64_t first, int64_t folded) {
        const int64_t row = packed.src_rows[sequence], begun = packed.offsets[sequence];
        for (int64_t own = 0; own < shared_; ++own) {
            S* state = state_row(row, own);
            if (folded)
                fold(state, op_.key_dim, op_.value_dim, folded, keys(first), changes(first, own),
                     decays(first, own), op_.updates);
            states_[own].begin(state);
        }
        const Tails<T> old = tails(row);
        each_channel([&](int64_t c, Vec* window, float*, int64_t) {
            old.load(c, window);
            for (int64_t t = 0; t < folded; ++t)
                shift(window, history_, load(inputs(first + t) + c));
            if (folded) old.store(c, window);
        });
        for_token_tiles(packed, sequence, [&](int64_t begin, int64_t n, int64_t) {
            tile(begin, n, -1, first + begin - begun);
        });
    }

  private:
    int64_t state_size() const { return op_.key_dim * op_.value_dim; }

    S* state_row(int64_t row, int64_t own) const {
        if (row < 0) return nullptr;
        return (S*)op_.states + row * op_.state_stride + (head_ * shared_ + own) * state_size();
    }

    Tails<T> tails(int64_t row) const {
        return {row < 0 ? nullptr : (T*)op_.tails + row * op_.tail_stride, history_};
    }

    void keep_tails(int64_t row) {
        const Tails<T> to = tails(row);
        each_channel([&](int64_t c, Vec* window, float*, int64_t) { to.store(c, window); });
    }

    // Calls `work(channel, window, outputs, stride)` for 16 channels at a time: `outputs` of a
    // tile's tokens are `stride` apart.
    template <typename Work>
    void each_channel(const Work& work) {
        Vec* window = (Vec*)windows_;
        auto stretch = [&](int64_t first, int64_t width, float* to, int64_t stride) {
            for (int64_t c = 0; c < width; c += LANES, window += history_)
                work(first + c, window, to + c, stride);
        };
        const int64_t keys = op_.key_heads * op_.key_dim, values = shared_ * op_.value_dim;
        stretch(head_ * op_.key_dim, op_.key_dim, qk_, 2 * op_.key_dim);
        stretch(keys + head_ * op_.key_dim, op_.key_dim, qk_ + op_.key_dim, 2 * op_.key_dim);
        stretch(2 * keys + head_ * values, values, v_, values);
    }

    float* keys(int64_t entry) const {
        return op_.updates.keys + entry * op_.updates.key_stride + head_ * op_.key_dim;
    }

    float* changes(int64_t entry, int64_t own) const {
        const int64_t h = head_ * shared_ + own;
        return op_.updates.changes + entry * op_.updates.change_stride + h * op_.value_dim;
    }

    float* decays(int64_t entry, int64_t own) const {
        return op_.updates.decays + entry * op_.updates.decay_stride + head_ * shared_ + own;
    }

    T* inputs(int64_t entry) const {
        return (T*)op_.updates.inputs + entry * op_.updates.input_stride;
    }

    // Saves the keys and inputs of a tile's tokens as updates.
    void keep(int64_t begin, int64_t n, int64_t first) {
        for (int64_t t = 0; t < n; ++t) {
            const float* key = qk_ + (2 * t + 1) * op_.key_dim;
            std::memcpy(keys(first + t), key, op_.key_dim * sizeof(float));
            const T* x = x_(begin + t);
            T* to = inputs(first + t);
            each_channel([&](int64_t c, Vec*, float*, int64_t) {
                std::memcpy(to + c, x + c, LANES * sizeof(T));
            });
        }
    }

    // Saves the tokens' updates from number `first` on, unless that is -1.
    void tile(int64_t begin, int64_t n, int64_t row, int64_t first = -1) {
        const T* x = x_(begin);
        const Tails<T> to = tails(row);
        each_channel([&](int64_t c, Vec* window, float* y, int64_t y_stride) {
            convolve<T>(x + c, x_.stride, n, op_.conv + c, nullptr, channels_, history_, window, y,
                        y_stride);
            to.store(c, window);
        });
        prepare(qk_, n, op_.key_dim, gates_);
        if (first >= 0) keep(begin, n, first);
        const int64_t values = shared_ * op_.value_dim;
        // Start with the last value head: its gates do not overwrite the products of keys and
        // queries.
        for (int64_t own = shared_ - 1; own >= 0; --own) {
            float *gates = gates_ + own * TOKEN_TILE * 4, *v = v_ + own * op_.value_dim;
            const int64_t h = head_ * shared_ + own;
            make_gates(x, n, h, gates);
            float* to_changes = first < 0 ? nullptr : changes(first, own);
            states_[own].advance(n, qk_, gates, v, values, state_row(row, own), to_changes,
                                 op_.updates.change_stride);
            for (int64_t t = 0; t < n && to_changes; ++t) *decays(first + t, own) = gates[4 * t];
            for (int64_t t = 0; t < n; ++t) {
                float* o = v + t * values;
                for (int64_t d = 0; d < op_.value_dim; d += LANES)
                    store(o + d, rounded<T>(load(o + d)));
                const T* z = x + t * x_.stride + channels_ + h * op_.value_dim;
                T* out = out_(begin + t) + h * op_.value_dim;
                gated_norm_row(o, z, out, op_.value_dim, op_.norm, (float)op_.eps);
            }
        }
    }

    // Computes decay, write strength and k.q of one value head, 16 tokens at a time.
    void make_gates(const T* x, int64_t n, int64_t h, float* gates) const {
        const T* raw = x + channels_ + op_.value_heads * op_.value_dim + h;
        const Vec bias = all(op_.dt_bias[h]), neg_decay = all(op_.neg_decay[h]);
        for (int64_t t = 0; t < n; t += LANES) {
            const int64_t some = std::min<int64_t>(LANES, n - t);
            float a[LANES] = {}, b[LANES] = {};
            for (int64_t i = 0; i < some; ++i) {
                b[i] = load_one(raw + (t + i) * x_.stride);
                a[i] = load_one(raw + (t + i) * x_.stride + op_.value_heads);
            }
            store(a, exponential(log_decay(load(a), bias, neg_decay)));
            store(b, sigmoid(load(b)));
            for (int64_t i = 0; i < some; ++i) {
                float* own = gates + 4 * (t + i);
                own[0] = a[i];
                own[1] = b[i];
                own[2] = gates_[4 * (t + i) + 2];
            }
        }
    }

    const DeltaNet& op_;
    int64_t head_, shared_, history_, channels_;
    Strided<T> x_, out_;
    HeadState<S> states_[MAX_SHARED];
    float *qk_, *v_, *gates_, *windows_;
};

}  // namespace vlm
