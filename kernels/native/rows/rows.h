// Operations on one row: norms, gating, rotation. See kernels/norms, kernels/rope and
// kernels/elementwise for the mathematics.
#pragma once

#include "functions.h"

namespace vlm {

constexpr int64_t MAX_DIM = 256;

template <typename X, typename T>
inline void scale_row(const X* x, T* out, int64_t width, const float* factors, float scale) {
    for (int64_t c = 0; c < width; c += LANES)
        store(out + c, load(x + c) * scale * load(factors + c));
}

template <typename X, typename T>
inline void norm_row(const X* x, T* out, int64_t width, const float* factors, float eps) {
    scale_row(x, out, width, factors, inverse_rms(x, width, eps));
}

template <typename X, typename T>
inline void layer_norm_row(const X* x, T* out, int64_t width, const float* factors,
                           const float* offsets, float eps) {
    Vec total = zero(), squares = zero();
    for (int64_t c = 0; c < width; c += LANES) total = total + load(x + c);
    const Vec mean = all(sum(total) / (float)width);
    for (int64_t c = 0; c < width; c += LANES) {
        const Vec own = load(x + c) - mean;
        squares = fma(own, own, squares);
    }
    const float scale = 1.0f / square_root(sum(squares) / (float)width + eps);
    for (int64_t c = 0; c < width; c += LANES)
        store(out + c, fma((load(x + c) - mean) * scale, load(factors + c), load(offsets + c)));
}

template <typename X, typename T>
inline void gated_norm_row(const X* x, const T* gate, T* out, int64_t width, const float* factors,
                           float eps) {
    const float scale = inverse_rms(x, width, eps);
    for (int64_t c = 0; c < width; c += LANES)
        store(out + c, load(x + c) * scale * load(factors + c) * silu(load(gate + c)));
}

template <typename T>
inline void gate_row(const T* x, const T* gate, float* out, int64_t width) {
    for (int64_t c = 0; c < width; c += LANES) store(out + c, load(x + c) * silu(load(gate + c)));
}

template <typename T>
inline void times_sigmoid_row(const T* x, const T* gate, T* out, int64_t width) {
    for (int64_t c = 0; c < width; c += LANES)
        store(out + c, load(x + c) * sigmoid(load(gate + c)));
}

// Returns the index of the first maximum. NaN is larger than all other numbers.
inline int64_t argmax(const float* row, int64_t count) {
    constexpr int64_t BLOCK = 64 * LANES;
    auto exceeds = [](float a, float b) { return a > b || (a != a && b == b); };
    int64_t place = 0;
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        const int64_t end = std::min(count, begin + BLOCK);
        Vec most = all(row[begin]), broken = zero();
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES) {
            const Vec x = load(row + i);
            most = maximum(x, most);
            broken = where_nan(x, all(1.0f), broken);
        }
        // Most blocks contain nothing larger than the maximum so far.
        const bool none = !(reduce_max(most) > row[place]) && reduce_max(broken) == 0.0f;
        for (int64_t j = none ? i : begin; j < end; ++j)
            if (exceeds(row[j], row[place])) place = j;
    }
    return place;
}

// Computes cosine and sine of one token's angles, times `scale`; the positions of the three axes
// are `stride` apart.
inline void rotations(const double* positions, int64_t stride, const float* inv_freq,
                      const int32_t* axis, int64_t half, float scale, float* cos, float* sin) {
    for (int64_t i = 0; i < half; ++i) {
        cosine_and_sine((float)positions[axis[i] * stride] * inv_freq[i], cos + i, sin + i);
        cos[i] *= scale;
        sin[i] *= scale;
    }
}

// Rotates the first 2 * half numbers of x.
inline void rotate(float* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float low = x[i], high = x[i + half];
        x[i] = low * cos[i] - high * sin[i];
        x[i + half] = high * cos[i] + low * sin[i];
    }
}

// Zero-centred norm over one head, none without factors; then rotation of its first 2 * half dims.
template <typename X, typename T>
inline void norm_and_rotate(const X* x, T* out, const float* factors, const float* cos,
                            const float* sin, int64_t dim, int64_t half, float eps) {
    float wide[MAX_DIM];
    if (factors != nullptr)
        norm_row(x, wide, dim, factors, eps);
    else
        for (int64_t d = 0; d < dim; d += LANES) store(wide + d, load(x + d));
    rotate(wide, cos, sin, half);
    for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(wide + d));
}

}  // namespace vlm
