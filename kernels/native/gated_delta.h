// One Gated DeltaNet mixer over the few tokens of one sequence: convolution, gates, recurrence and
// gated norm of one key head and the value heads it serves. See kernels/gated_delta.py and
// kernels/causal_conv.py for the mathematics.
#pragma once

#include "program.h"

namespace vlm {

inline float log_decay(float a, float bias, float neg_decay) {
    const float x = a + bias;
    return neg_decay * (x > 20.0f ? x : std::log1p(std::exp(x)));
}

// Inputs and outputs of a sequence's tokens, rows `n` apart from each other by their strides.
template <typename T>
struct DeltaTask {
    const Sizes* sizes;
    const Layer* layer;
    const float* mixed;  // [n, stride]: query, key, value, z, b, a of the in_proj, rounded to T
    int64_t mixed_stride;
    T* out;  // [n, stride]
    int64_t out_stride;
    int64_t tokens, src, dst;
    const int64_t* snapshot_rows;  // [n]
};

inline int64_t delta_scratch(const Sizes& s, int64_t tokens) {
    int64_t shared = s.value_heads / s.key_heads;
    return tokens * (2 * s.key_dim + (shared + 1) * s.value_dim + 4);
}

// The convolution of `width` channels from `channel` on: outputs to y [n, stride], new tails
// stored.
template <typename T>
void convolve(const DeltaTask<T>& task, int64_t channel, int64_t width, float* y, int64_t stride) {
    const Sizes& s = *task.sizes;
    const int64_t kept = s.conv_kernel - 1;
    const int64_t channels = 2 * s.key_heads * s.key_dim + s.value_heads * s.value_dim;
    T* tails = (T*)task.layer->tails;
    for (int64_t c = channel; c < channel + width; c += LANES) {
        Vec window[8];  // window[j] is the input j steps before the tail's end
        for (int64_t j = 0; j < kept; ++j) {
            float lanes[LANES] = {};
            if (task.src >= 0) {
                const T* tail = tails + task.src * s.conv_row_stride + c * kept + j;
                for (int i = 0; i < LANES; ++i) lanes[i] = load_one(tail + i * kept);
            }
            window[j] = load(lanes);
        }
        for (int64_t t = 0; t < task.tokens; ++t) {
            Vec x = load(task.mixed + t * task.mixed_stride + c);
            Vec total{};
            for (int64_t j = 0; j < kept; ++j)
                total += window[j] * load(task.layer->conv + j * channels + c);
            total += x * load(task.layer->conv + kept * channels + c);
            store(y + t * stride + c - channel, rounded<T>(silu(total)));
            for (int64_t j = 0; j + 1 < kept; ++j) window[j] = window[j + 1];
            window[kept - 1] = x;
            const int64_t rows[] = {task.snapshot_rows[t], t + 1 == task.tokens ? task.dst : -1};
            for (int64_t row : rows) {
                if (row < 0) continue;
                T* tail = tails + row * s.conv_row_stride + c * kept;
                for (int64_t j = 0; j < kept; ++j) {
                    float lanes[LANES];
                    store(lanes, window[j]);
                    for (int i = 0; i < LANES; ++i) store_one(tail + i * kept + j, lanes[i]);
                }
            }
        }
    }
}

// Unit length, times `factor`, of n vectors in place.
inline void normalise(float* x, int64_t n, int64_t stride, int64_t dim, float factor) {
    for (int64_t t = 0; t < n; ++t, x += stride) {
        Vec squares{};
        for (int64_t d = 0; d < dim; d += LANES) squares += load(x + d) * load(x + d);
        Vec scale = all(factor / std::sqrt(sum(squares) + 1e-6f));
        for (int64_t d = 0; d < dim; d += LANES) store(x + d, load(x + d) * scale);
    }
}

// COLUMNS vectors of a head's state through all tokens. With the decay outside, key and query read
// the old state together, and the read of one token shares its pass with the update of the last:
//   o = decay S'q + (k.q) change,  change = beta (v - decay S'k),  S = decay S + k change'
// `qk` is [n, 2, key_dim] with queries first, `gates` [n, 4] holds decay, beta and k.q; `snapshots`
// may be null.
template <int COLUMNS>
void recurrence(const float* from, float* to, int64_t key_dim, int64_t value_dim, int64_t tokens,
                const float* qk, const float* gates, float* v, int64_t v_stride,
                float* const* snapshots) {
    Vec from_key[COLUMNS] = {}, from_query[COLUMNS] = {}, change[COLUMNS];
    if (from)
        for (int64_t d = 0; d < key_dim; ++d) {
            Vec k = all(qk[key_dim + d]), q = all(qk[d]);
            for (int c = 0; c < COLUMNS; ++c) {
                Vec s = load(from + d * value_dim + c * LANES);
                from_key[c] += s * k;
                from_query[c] += s * q;
            }
        }
    for (int64_t t = 0; t < tokens; ++t) {
        const float decay = gates[4 * t], beta = gates[4 * t + 1], overlap = gates[4 * t + 2];
        for (int c = 0; c < COLUMNS; ++c) {
            float* value = v + t * v_stride + c * LANES;
            change[c] = beta * (load(value) - decay * from_key[c]);
            store(value, decay * from_query[c] + overlap * change[c]);
        }
        const float* keys = qk + (2 * t + 1) * key_dim;
        const bool last = t + 1 == tokens;
        const float* next = last ? nullptr : qk + (2 * t + 2) * key_dim;
        for (int c = 0; c < COLUMNS; ++c) from_key[c] = from_query[c] = Vec{};
        for (int64_t d = 0; d < key_dim; ++d) {
            Vec k = all(keys[d]);
            Vec next_query = all(last ? 0.0f : next[d]);
            Vec next_key = all(last ? 0.0f : next[key_dim + d]);
            for (int c = 0; c < COLUMNS; ++c) {
                Vec old = from ? load(from + d * value_dim + c * LANES) : Vec{};
                Vec s = decay * old + k * change[c];
                store(to + d * value_dim + c * LANES, s);
                from_key[c] += s * next_key;
                from_query[c] += s * next_query;
            }
        }
        from = to;
        if (snapshots && snapshots[t])
            for (int64_t d = 0; d < key_dim; ++d)
                for (int c = 0; c < COLUMNS; ++c)
                    store(snapshots[t] + d * value_dim + c * LANES,
                          load(to + d * value_dim + c * LANES));
    }
}

// All of it for key head `head`. `scratch` has room for `delta_scratch` floats, `snapshots` for n.
template <typename T>
void gated_delta_head(const DeltaTask<T>& task, int64_t head, float* scratch, float** snapshots) {
    const Sizes& s = *task.sizes;
    const Layer& layer = *task.layer;
    const int64_t n = task.tokens, Dk = s.key_dim, Dv = s.value_dim;
    const int64_t shared = s.value_heads / s.key_heads, keys = s.key_heads * Dk;
    const int64_t channels = 2 * keys + s.value_heads * Dv, values = shared * Dv;
    float* qk = scratch;
    float* v = qk + n * 2 * Dk;
    float* gates = v + n * values;
    convolve(task, head * Dk, Dk, qk, 2 * Dk);
    convolve(task, keys + head * Dk, Dk, qk + Dk, 2 * Dk);
    convolve(task, 2 * keys + head * values, values, v, values);
    normalise(qk, n, 2 * Dk, Dk, 1.0f / std::sqrt((float)Dk));
    normalise(qk + Dk, n, 2 * Dk, Dk, 1.0f);
    for (int64_t own = 0; own < shared; ++own) {
        const int64_t h = head * shared + own;
        for (int64_t t = 0; t < n; ++t) {
            const float* raw = task.mixed + t * task.mixed_stride + channels + s.value_heads * Dv;
            Vec overlap{};
            for (int64_t d = 0; d < Dk; d += LANES)
                overlap += load(qk + 2 * t * Dk + d) * load(qk + (2 * t + 1) * Dk + d);
            gates[4 * t] =
                std::exp(log_decay(raw[s.value_heads + h], layer.dt_bias[h], layer.neg_decay[h]));
            gates[4 * t + 1] = sigmoid(raw[h]);
            gates[4 * t + 2] = sum(overlap);
        }
        const int64_t place = h * Dk * Dv;
        const float* from =
            task.src < 0 ? nullptr : layer.states + task.src * s.state_row_stride + place;
        float* to = layer.states + task.dst * s.state_row_stride + place;
        for (int64_t c = 0; c < Dv;) {
            for (int64_t t = 0; t < n; ++t) {
                int64_t row = task.snapshot_rows[t];
                snapshots[t] =
                    row < 0 ? nullptr : layer.states + row * s.state_row_stride + place + c;
            }
            const float* source = from ? from + c : nullptr;
            float* value = v + own * Dv + c;
            if (Dv - c >= 4 * LANES) {
                recurrence<4>(source, to + c, Dk, Dv, n, qk, gates, value, values, snapshots);
                c += 4 * LANES;
            } else {
                recurrence<1>(source, to + c, Dk, Dv, n, qk, gates, value, values, snapshots);
                c += LANES;
            }
        }
        for (int64_t t = 0; t < n; ++t) {
            float* o = v + t * values + own * Dv;
            for (int64_t d = 0; d < Dv; d += LANES) store(o + d, rounded<T>(load(o + d)));
            const float* z = task.mixed + t * task.mixed_stride + channels + h * Dv;
            const float scale = inverse_rms(o, Dv, (float)s.eps);
            for (int64_t d = 0; d < Dv; d += LANES)
                store(task.out + t * task.out_stride + h * Dv + d,
                      load(o + d) * scale * load(layer.gated_norm + d) * silu(load(z + d)));
        }
    }
}

}  // namespace vlm
