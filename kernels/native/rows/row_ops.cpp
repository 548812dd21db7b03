// Row-wise ops; see rows.h.
#include <algorithm>

#include "calls.h"
#include "guard.h"
#include "rows/rows.h"

namespace vlm {

// Elements below which a second thread costs more than it saves.
constexpr int64_t MIN_PARALLEL = 1 << 15;

template <typename T>
const T* row_of(const Rows& rows, int64_t i) {
    return (const T*)rows.x + i / rows.heads * rows.stride + i % rows.heads * rows.head_stride;
}

template <typename T, typename Each>
void for_rows(const Rows& rows, const Each& each) {
    const int64_t count = rows.tokens * rows.heads;
    const int threads = count * rows.width < MIN_PARALLEL ? 1 : (int)rows.threads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < count; ++i) each(i, row_of<T>(rows, i), (T*)rows.out + i * rows.width);
}

template <typename T>
void rms_norm(const Rows& rows, const float* factors, float eps) {
    for_rows<T>(rows,
                [&](int64_t, const T* x, T* out) { norm_row(x, out, rows.width, factors, eps); });
}

template <typename T>
void gated_rms_norm(const Rows& rows, const Rows& gates, const float* factors, float eps) {
    for_rows<T>(rows, [&](int64_t i, const T* x, T* out) {
        gated_norm_row(x, row_of<T>(gates, i), out, rows.width, factors, eps);
    });
}

template <typename T>
void times_sigmoid(const Rows& rows, const Rows& gates) {
    for_rows<T>(rows, [&](int64_t i, const T* x, T* out) {
        times_sigmoid_row(x, row_of<T>(gates, i), out, rows.width);
    });
}

template <typename T>
void silu_times(const Rows& gates, const Rows& rows) {
    for_rows<T>(rows, [&](int64_t i, const T* x, T* out) {
        const T* gate = row_of<T>(gates, i);
        for (int64_t c = 0; c < rows.width; c += LANES)
            store(out + c, silu(load(gate + c)) * load(x + c));
    });
}

template <typename T>
void norm_rope(const Rows& rows, const float* factors, const float* cos, const float* sin,
               int64_t half, float eps) {
    for_rows<T>(rows, [&](int64_t i, const T* x, T* out) {
        const int64_t t = i / rows.heads;
        norm_and_rotate(x, out, factors, cos + t * half, sin + t * half, rows.width, half, eps);
    });
}

void all_rotations(int64_t tokens, int64_t half, int64_t threads, const double* positions,
                   const float* inv_freq, const int32_t* axis, float scale, float* cos,
                   float* sin) {
    const int shared = tokens * half < MIN_PARALLEL / 16 ? 1 : (int)threads;
#pragma omp parallel for schedule(static) num_threads(shared)
    for (int64_t t = 0; t < tokens; ++t)
        rotations(positions + t, tokens, inv_freq, axis, half, scale, cos + t * half,
                  sin + t * half);
}

}  // namespace vlm

using vlm::bf16;
using vlm::guarded;
using vlm::Rows;

extern "C" {

int64_t vlm_rms_norm(const Rows* rows, const float* factors, double eps, int64_t bits) {
    return guarded([=] {
        bits == 32 ? vlm::rms_norm<float>(*rows, factors, eps)
                   : vlm::rms_norm<bf16>(*rows, factors, eps);
    });
}

int64_t vlm_gated_rms_norm(const Rows* rows, const Rows* gates, const float* factors, double eps,
                           int64_t bits) {
    return guarded([=] {
        bits == 32 ? vlm::gated_rms_norm<float>(*rows, *gates, factors, eps)
                   : vlm::gated_rms_norm<bf16>(*rows, *gates, factors, eps);
    });
}

int64_t vlm_times_sigmoid(const Rows* rows, const Rows* gates, int64_t bits) {
    return guarded([=] {
        bits == 32 ? vlm::times_sigmoid<float>(*rows, *gates)
                   : vlm::times_sigmoid<bf16>(*rows, *gates);
    });
}

int64_t vlm_silu_times(const Rows* gates, const Rows* rows, int64_t bits) {
    return guarded([=] {
        bits == 32 ? vlm::silu_times<float>(*gates, *rows) : vlm::silu_times<bf16>(*gates, *rows);
    });
}

int64_t vlm_rotations(int64_t tokens, int64_t half, int64_t threads, const double* positions,
                      const float* inv_freq, const int32_t* axis, double scale, float* cos,
                      float* sin) {
    return guarded([=] {
        vlm::all_rotations(tokens, half, threads, positions, inv_freq, axis, (float)scale, cos,
                           sin);
    });
}

int64_t vlm_norm_rope(const Rows* rows, const float* factors, const float* cos, const float* sin,
                      int64_t half, double eps, int64_t bits) {
    return guarded([=] {
        bits == 32 ? vlm::norm_rope<float>(*rows, factors, cos, sin, half, eps)
                   : vlm::norm_rope<bf16>(*rows, factors, cos, sin, half, eps);
    });
}
}
