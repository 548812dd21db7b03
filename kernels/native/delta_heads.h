// A Gated DeltaNet mixer inside of a step: one key head of one sequence and the value heads that it
// serves, from the projected input to the gated norm, a tile of tokens after the other.
#pragma once

#include "gated_delta.h"
#include "program.h"
#include "rows.h"

namespace vlm {

constexpr int64_t MOST_SHARED = 16;  // value heads of a key head

inline int64_t delta_heads_room(const Sizes& s) {
    if (!s.key_heads) return 0;
    const int64_t shared = s.value_heads / s.key_heads;
    const int64_t channels = 2 * s.key_dim + shared * s.value_dim;
    return delta_room(s.key_dim, s.value_dim, shared) + channels * MOST_TAPS;
}

template <typename T>
class DeltaHeads {
  public:
    // `wide` has the projected rows: query, key, value, z, b, a of all heads. Results go to `out`,
    // [tokens, value_heads * value_dim].
    DeltaHeads(const Sizes& sizes, const Layer& layer, int64_t head, const T* wide,
               int64_t wide_stride, T* out)
        : s_(sizes),
          layer_(layer),
          head_(head),
          shared_(sizes.value_heads / sizes.key_heads),
          kept_(sizes.conv_kernel - 1),
          channels_(2 * sizes.key_heads * sizes.key_dim + sizes.value_heads * sizes.value_dim),
          wide_(wide),
          stride_(wide_stride),
          out_(out) {
        float* memory = own_delta_room().of(delta_heads_room(s_));
        for (int64_t own = 0; own < shared_; ++own, memory += state_size())
            states_[own] = HeadState(s_.key_dim, s_.value_dim, memory);
        qk_ = memory;
        v_ = qk_ + TOKEN_TILE * 2 * s_.key_dim;
        gates_ = v_ + TOKEN_TILE * shared_ * s_.value_dim;
        windows_ = gates_ + TOKEN_TILE * shared_ * 4;
    }

    void run(const Packed& packed, int64_t sequence) {
        const int64_t src = packed.src_rows[sequence], dst = packed.dst_rows[sequence];
        for (int64_t own = 0; own < shared_; ++own) states_[own].begin(state_row(src, own));
        const Tails<T> old = tails(src);
        each_channel([&](int64_t c, Vec* window, float*, int64_t) { old.load(c, window); });
        for_tiles(packed, sequence,
                  [&](int64_t begin, int64_t n, int64_t row) { tile(begin, n, row); });
        keep_tails(dst);
        for (int64_t own = 0; own < shared_; ++own) states_[own].finish(state_row(dst, own));
    }

  private:
    int64_t state_size() const { return s_.key_dim * s_.value_dim; }

    float* state_row(int64_t row, int64_t own) const {
        if (row < 0) return nullptr;
        return layer_.states + row * s_.state_row_stride + (head_ * shared_ + own) * state_size();
    }

    Tails<T> tails(int64_t row) const {
        return {row < 0 ? nullptr : (T*)layer_.tails + row * s_.conv_row_stride, kept_};
    }

    void keep_tails(int64_t row) {
        const Tails<T> to = tails(row);
        each_channel([&](int64_t c, Vec* window, float*, int64_t) { to.store(c, window); });
    }

    // 16 channels at a time: which they are, their window, where their outputs of a tile go and how
    // far apart those of its tokens are.
    template <typename Work>
    void each_channel(const Work& work) {
        Vec* window = (Vec*)windows_;
        auto stretch = [&](int64_t first, int64_t width, float* to, int64_t stride) {
            for (int64_t c = 0; c < width; c += LANES, window += kept_)
                work(first + c, window, to + c, stride);
        };
        const int64_t keys = s_.key_heads * s_.key_dim, values = shared_ * s_.value_dim;
        stretch(head_ * s_.key_dim, s_.key_dim, qk_, 2 * s_.key_dim);
        stretch(keys + head_ * s_.key_dim, s_.key_dim, qk_ + s_.key_dim, 2 * s_.key_dim);
        stretch(2 * keys + head_ * values, values, v_, values);
    }

    void tile(int64_t begin, int64_t n, int64_t row) {
        const T* x = wide_ + begin * stride_;
        const Tails<T> to = tails(row);
        each_channel([&](int64_t c, Vec* window, float* y, int64_t y_stride) {
            convolve(x + c, stride_, n, layer_.conv + c, channels_, kept_, window, y, y_stride);
            to.store(c, window);
        });
        prepare(qk_, n, s_.key_dim, gates_);
        const int64_t values = shared_ * s_.value_dim;
        // The last value head first, whose gates do not lie over the products of keys and queries.
        for (int64_t own = shared_ - 1; own >= 0; --own) {
            float *gates = gates_ + own * TOKEN_TILE * 4, *v = v_ + own * s_.value_dim;
            const int64_t h = head_ * shared_ + own;
            make_gates(x, n, h, gates);
            states_[own].advance(n, qk_, gates, v, values, state_row(row, own));
            for (int64_t t = 0; t < n; ++t) {
                float* o = v + t * values;
                for (int64_t d = 0; d < s_.value_dim; d += LANES)
                    store(o + d, rounded<T>(load(o + d)));
                const T* z = x + t * stride_ + channels_ + h * s_.value_dim;
                T* out = out_ + ((begin + t) * s_.value_heads + h) * s_.value_dim;
                gated_norm_row(o, z, out, s_.value_dim, layer_.gated_norm, (float)s_.eps);
            }
        }
    }

    // Decay, write strength and k.q of one value head, 16 tokens at a time.
    void make_gates(const T* x, int64_t n, int64_t h, float* gates) const {
        const T* raw = x + channels_ + s_.value_heads * s_.value_dim + h;
        const Vec bias = all(layer_.dt_bias[h]), neg_decay = all(layer_.neg_decay[h]);
        for (int64_t t = 0; t < n; t += LANES) {
            const int64_t some = std::min<int64_t>(LANES, n - t);
            float a[LANES] = {}, b[LANES] = {};
            for (int64_t i = 0; i < some; ++i) {
                b[i] = load_one(raw + (t + i) * stride_);
                a[i] = load_one(raw + (t + i) * stride_ + s_.value_heads);
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

    const Sizes& s_;
    const Layer& layer_;
    int64_t head_, shared_, kept_, channels_;
    const T* wide_;
    int64_t stride_;
    T* out_;
    HeadState states_[MOST_SHARED];
    float *qk_, *v_, *gates_, *windows_;
};

}  // namespace vlm
