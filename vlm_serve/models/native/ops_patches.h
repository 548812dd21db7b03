// Operations of vision towers: tokens are patches, and sequences are pictures.
#pragma once

#include <cstring>

#include "ops_mixers.h"

namespace vlm {

template <typename T>
void perform(const Run& run, const Turn& op) {
    const Strided<T> x = run.rows<T>(op.x), out = run.rows<T>(op.out);
    const Strided<float> cos = run.rows<float>(op.cos), sin = run.rows<float>(op.sin);
    const int64_t dim = op.head_dim;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < run.tokens; ++t)
        for (int64_t head = 0; head < 3 * op.heads; ++head) {
            float row[MAX_DIM] = {};
            for (int64_t d = 0; d < dim; d += LANES)
                store(row + d,
                      load_partial(x(t) + head * dim + d, std::min<int64_t>(LANES, dim - d)));
            if (head < 2 * op.heads) rotate(row, cos(t), sin(t), dim / 2);
            for (int64_t d = 0; d < op.padded_dim; d += LANES)
                store(out(t) + head * op.padded_dim + d, load(row + d));
        }
}

// Reads keys and values in place: every token is a block.
template <typename T>
Attention attention_job(const Run& run, const SeeAll& op) {
    T* first = run.rows<T>(op.x)(0);
    Pages pages{};
    pages.form = sizeof(T) == 4 ? KV_FLOAT32 : KV_BFLOAT16;
    pages.block_size = 1;
    pages.block_stride = op.x.stride;
    pages.head_stride = op.padded_dim;
    pages.k = first + op.heads * op.padded_dim;
    pages.v = first + 2 * op.heads * op.padded_dim;
    const Attend same{.q = op.x,
                      .out = op.out,
                      .heads = op.heads,
                      .kv_heads = op.heads,
                      .head_dim = op.padded_dim,
                      .pages = pages,
                      .first_key = 0,
                      .scale = op.scale};
    Attention job = attention_job<T>(run, same);
    job.whole = 1;
    return job;
}

template <typename T>
void perform(const Run& run, const SeeAll& op) {
    const Attention job = attention_job<T>(run, op);
    attend<T>(job, run.memory.plans.of(job), run.memory.scheduler);
}

template <typename T>
void perform(const Run& run, const Narrow& op) {
    const Strided<T> x = run.rows<T>(op.x), out = run.rows<T>(op.out);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < run.tokens; ++t)
        for (int64_t head = 0; head < op.heads; ++head)
            std::memcpy(out(t) + head * op.head_dim, x(t) + head * op.padded_dim,
                        op.head_dim * sizeof(T));
}

template <typename T>
void perform(Run& run, const Squares& op) {
#pragma omp single
    {
        run.tokens = run.step.tokens / op.size;
        run.group_rows([&](int64_t r) { return r * op.size; });
    }
}

}  // namespace vlm
