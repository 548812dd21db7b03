// Operations that mix the tokens of a sequence.
#pragma once

#include <cstring>

#include "delta_heads.h"

namespace vlm {

template <typename T, typename S>
void run_delta(const Run& run, const DeltaNet& op) {
    const Step& step = run.step;
    const Packed packed{step.sequences, step.threads,  step.first_token,
                        step.src_rows,  step.dst_rows, step.snapshot_rows};
    const Strided<T> x = run.rows<T>(op.x), out = run.rows<T>(op.out);
    run.memory.scheduler.for_each(step.sequences * op.key_heads, [&](int64_t i) {
        DeltaHeads<T, S> heads(op, i % op.key_heads, x, out);
        const int64_t sequence = i / op.key_heads;
        const int64_t first = step.updates ? step.updates[sequence] : -1;
        first < 0 ? heads.run(packed, sequence)
                  : heads.verify(packed, sequence, first, step.folded[sequence]);
    });
}

template <typename T>
void perform(const Run& run, const DeltaNet& op) {
    op.state_type == BFLOAT16 ? run_delta<T, bf16>(run, op) : run_delta<T, float>(run, op);
}

template <typename T>
void perform(const Run& run, const Heads& op) {
    const Strided<T> rows = run.rows<T>(op.x);
    const Strided<float> cos = run.rows<float>(op.cos), sin = run.rows<float>(op.sin);
    const int64_t dim = op.head_dim, heads = op.heads + op.kv_heads;
    const float eps = (float)op.eps;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < run.tokens * heads; ++i) {
        const int64_t t = i / heads, head = i % heads;
        T* x = rows(t) + head * dim;
        if (head < op.heads) {
            norm_and_rotate(x, x, op.q_norm, cos(t), sin(t), dim, op.half, eps);
            continue;
        }
        const int64_t slot = run.step.slots[t];
        if (slot < 0) continue;
        float row[MAX_DIM];
        norm_and_rotate(x, row, op.k_norm, cos(t), sin(t), dim, op.half, eps);
        store_row(op.pages, false, slot, head - op.heads, row, dim);
        for (int64_t d = 0; d < dim; d += LANES) store(row + d, load(x + op.kv_heads * dim + d));
        store_row(op.pages, true, slot, head - op.heads, row, dim);
    }
}

template <typename T>
Attention attention_job(const Run& run, const Attend& op) {
    const Step& step = run.step;
    return {.sequences = step.sequences,
            .threads = step.threads,
            .heads = op.heads,
            .kv_heads = op.kv_heads,
            .head_dim = op.head_dim,
            .q_stride = op.q.stride,
            .q_head = op.head_dim,
            .pages = op.pages,
            .first_key = op.first_key,
            .whole = 0,
            .scale = op.scale,
            .offsets = step.first_token,
            .starts = step.start,
            .tables = step.tables,
            .q = run.rows<T>(op.q)(0),
            .out = run.rows<T>(op.out)(0)};
}

template <typename T>
void perform(const Run& run, const Attend& op) {
    const Attention job = attention_job<T>(run, op);
    attend<T>(job, run.memory.plans.of(job), run.memory.scheduler);
}

}  // namespace vlm
