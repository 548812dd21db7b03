// Row-wise operations.
#pragma once

#include <cstring>
#include <stdexcept>

#include "rows/rows.h"
#include "run.h"

namespace vlm {

// Throws std::out_of_range for a token without an embedding.
inline void check_tokens(const Program& program, const Step& step) {
    for (int64_t t = 0; t < step.tokens && !step.x; ++t)
        if (step.token_ids[t] < 0 || step.token_ids[t] >= program.known)
            throw std::out_of_range("a token without embedding");
}

// Widens the embeddings into the residual.
template <typename T>
void widen(const Run& run) {
    const int64_t hidden = run.program.hidden;
    const Step& step = run.step;
    const Strided<float> residual = run.rows<float>({run.program.residual, 0, hidden});
#pragma omp for schedule(static)
    for (int64_t t = 0; t < run.tokens; ++t) {
        const T* from = step.x ? (const T*)step.x + t * hidden
                               : (const T*)run.program.embeddings + step.token_ids[t] * hidden;
        for (int64_t c = 0; c < hidden; c += LANES) store(residual(t) + c, load(from + c));
    }
}

inline void find_argmax(const Step& step, int64_t vocab) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < step.rows; ++r) step.best[r] = argmax(step.logits + r * vocab, vocab);
}

template <typename T>
void perform(const Run& run, const Norm& op) {
    const Strided<float> x = run.rows<float>(op.x);
    const Strided<T> out = run.rows<T>(op.out);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < run.tokens; ++t)
        norm_row(x(t), out(t), op.width, op.factors, (float)op.eps);
}

template <typename T>
void perform(const Run& run, const LayerNorm& op) {
    const Strided<float> x = run.rows<float>(op.x);
    const Strided<T> out = run.rows<T>(op.out);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < run.tokens; ++t)
        layer_norm_row(x(t), out(t), op.width, op.factors, op.offsets, (float)op.eps);
}

template <typename T>
void perform(const Run& run, const Rotations& op) {
    const Strided<float> cos = run.rows<float>(op.cos), sin = run.rows<float>(op.sin);
    const Step& step = run.step;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < run.tokens; ++t)
        rotations(step.positions + t, step.tokens, op.inv_freq, op.axis, op.half, (float)op.scale,
                  cos(t), sin(t));
}

template <typename T>
void perform(const Run& run, const Sigmoid& op) {
    const Strided<T> x = run.rows<T>(op.x), gate = run.rows<T>(op.gate);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < run.tokens; ++t) times_sigmoid_row(x(t), gate(t), x(t), op.width);
}

template <typename T>
void perform(Run& run, const GateNorm& op) {
    const Strided<T> x = run.rows<T>(op.x), gate = run.rows<T>(op.gate), out = run.rows<T>(op.out);
    float* scratch = delta_scratch().get(op.width);
    const bool shared = op.sharers > 1;
    if (shared) {
        const Strided<float> squares = run.own_slot(1);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < run.tokens; ++t) {
            gate_row(x(t), gate(t), scratch, op.width);
            *squares(t) = sum_of_squares(scratch, op.width);
        }
        if (!run.meet()) return;
    }
    const int64_t first_rank = shared ? run.program.ranks->rank / op.sharers * op.sharers : 0;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < run.tokens * op.groups; ++i) {
        const int64_t t = i / op.groups, first = i % op.groups * op.width;
        gate_row(x(t) + first, gate(t) + first, scratch, op.width);
        float squares = shared ? *run.slot_of(first_rank, 1)(t) : sum_of_squares(scratch, op.width);
        for (int64_t other = 1; other < op.sharers; ++other)
            squares += *run.slot_of(first_rank + other, 1)(t);
        const float mean = squares / (float)(op.sharers * op.width);
        scale_row(scratch, out(t) + first, op.width, op.factors + first,
                  1.0f / square_root(mean + (float)op.eps));
    }
}

template <typename T>
void perform(const Run& run, const Features& op) {
    const Step& step = run.step;
    const Strided<float> out = run.rows<float>(op.out);
    for (int64_t i = 0; i < step.media; ++i) {
        const Strided<const T> rows{(const T*)step.media_rows[i] + op.column, step.media_stride};
#pragma omp for schedule(static) nowait
        for (int64_t r = 0; r < step.media_tokens[i]; ++r) {
            float* to = out(step.media_first[i] + r);
            for (int64_t c = 0; c < op.width; c += LANES)
                store(to + c, rounded<T>(load(to + c) + load(rows(r) + c)));
        }
    }
#pragma omp barrier
}

template <typename T>
void perform(const Run& run, const Hidden& op) {
    const Strided<T> x = run.rows<T>(op.x);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < run.tokens; ++t)
        std::memcpy((T*)run.step.hidden + t * op.stride + op.column, x(t), op.width * sizeof(T));
}

// Copies by way of scratch memory, because rows may come in any order.
template <typename E>
void gather_rows(const Run& run, const View& view, int64_t width) {
    const Strided<E> rows = run.rows<E>(view), kept{(E*)run.memory.kept, width};
    for (int64_t r = 0; r < run.step.rows; ++r)
        std::memcpy(kept(r), rows(run.step.logit_rows[r]), width * sizeof(E));
    for (int64_t r = 0; r < run.step.rows; ++r) std::memcpy(rows(r), kept(r), width * sizeof(E));
}

template <typename T>
void perform(Run& run, const Keep& op) {
    if ((run.step.expert_ids != nullptr) != (bool)op.reporting) return;
#pragma omp single
    {
        gather_rows<float>(run, op.residual, op.residual_width);
        gather_rows<T>(run, op.x, op.width);
        run.tokens = run.step.rows;
        run.group_rows([&](int64_t r) { return run.step.logit_rows[r]; });
    }
}

}  // namespace vlm
