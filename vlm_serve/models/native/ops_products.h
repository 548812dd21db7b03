// Products with weights, and their epilogues.
#pragma once

#include "functions.h"
#include "ops_low_rank.h"
#include "products/product.h"

namespace vlm {

inline Vec identity(const Vec& x) { return x; }

// Epilogue that stores up to 32 columns of a product, after ACTIVATE, rounded as an op of its own
// would.
template <typename T, typename Out, Vec (*ACTIVATE)(const Vec&) = identity>
struct StoreResults {
    Strided<Out> out;

    template <typename Count>
    void operator()(int64_t row, int64_t column, Count count, const float* results) const {
        Out* to = out(row) + column;
        prefetch_output(to);
        for (int64_t c = 0; c < count; c += LANES) {
            const Vec value = rounded<T>(ACTIVATE(load(results + c)));
            if (count - c >= LANES)
                store(to + c, value);
            else
                store_partial(to + c, value, count - c);
        }
    }
};

template <typename T>
struct AddResults {
    Strided<float> out;

    template <typename Count>
    void operator()(int64_t row, int64_t column, Count count, const float* results) const {
        float* to = out(row) + column;
        for (int64_t c = 0; c < count; c += LANES)
            store(to + c, rounded<T>(load(to + c) + load(results + c)));
    }
};

template <typename T>
void perform(const Run& run, const Product& op) {
    const Strided<T> x = run.rows<T>(op.x);
    const Changes changes = compute_low_rank<T>(run, op.site, 0, 0, run.tokens, x);
    auto to = [&](const auto& use) {
        project<T>(op.weight, run.tokens, run.memory.scheduler, x, changed(changes, use));
    };
    switch (op.use) {
        case STORE:
            return to(StoreResults<T, T>{run.rows<T>(op.out)});
        case ADD:
            return to(AddResults<T>{run.rows<float>(op.out)});
        case SCORES:
            return to(StoreResults<T, float>{run.rows<float>(op.out)});
        case LOGITS:
            return to(StoreResults<T, float>{{run.step.logits, run.program.vocab}});
        case SHARED:
            return to(StoreResults<float, float>{run.own_slot(op.weight.columns)});
        case STORE_GELU:
            return to(StoreResults<T, T, gelu>{run.rows<T>(op.out)});
        case STORE_GELU_TANH:
            return to(StoreResults<T, T, gelu_tanh>{run.rows<T>(op.out)});
        case STORE_RELU2:
            return to(StoreResults<T, T, relu2>{run.rows<T>(op.out)});
    }
}

template <typename T>
void perform(Run& run, const Reduce& op) {
    if (!run.meet()) return;
    const int64_t ranks = run.program.ranks->size;
    const Strided<float> out = run.rows<float>(op.out);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < run.tokens; ++t)
        for (int64_t c = 0; c < op.width; c += LANES) {
            auto part = [&](int64_t rank) { return load(run.slot_of(rank, op.width)(t) + c); };
            Vec sum = part(0);
            for (int64_t rank = 1; rank < ranks; ++rank) sum = sum + part(rank);
            store(out(t) + c, rounded<T>(load(out(t) + c) + sum));
        }
}

// Computes silu(gate . x) * (up . x) for panels of the operand's rows; `out(r)` is the address of
// row r, which is row `first` + r of the changes.
template <typename T, typename Out, typename Added>
void gate_panels(const Weight& gate, const Weight& up, const Panels& panels, Workspace& own,
                 const Out& out, const Added& gate_changes, const Added& up_changes,
                 int64_t first) {
    const Operand& x = own.operand;
    float* gates = own.results_of(0);
    for_runs(panels, x.rows(), [&](const Panels& run) {
        multiply(gate, run, x, gates);
        for_results(up, run, x, own.results_of(1),
                    [&](int64_t r, int64_t column, auto count, const float* ups) {
                        const int64_t at = ((column / PANEL - run.first) * x.rows() + r) * PANEL;
                        float sums[2][PANEL];
                        const float* gated =
                            gate_changes.apply(first + r, column, gates + at, sums[0]);
                        ups = up_changes.apply(first + r, column, ups, sums[1]);
                        for (int64_t c = 0; c < count; c += LANES)
                            store(out(r) + column + c,
                                  silu(rounded<T>(load(gated + c))) * rounded<T>(load(ups + c)));
                    });
    });
}

// Computes relu2(up . x), see gate_panels.
template <typename T, typename Out, typename Added>
void square_panels(const Weight& up, const Panels& panels, Workspace& own, const Out& out,
                   const Added& changes) {
    for_results(up, panels, own.operand, own.results_of(0),
                [&](int64_t r, int64_t column, auto count, const float* ups) {
                    float sums[PANEL];
                    ups = changes.apply(r, column, ups, sums);
                    for (int64_t c = 0; c < count; c += LANES)
                        store(out(r) + column + c, relu2(rounded<T>(load(ups + c))));
                });
}

template <typename T>
void perform(const Run& run, const Gated& op) {
    const Strided<T> x = run.rows<T>(op.x), out = run.rows<T>(op.out);
    const Changes gate = compute_low_rank<T>(run, op.gate_site, 0, 0, run.tokens, x),
                  up = compute_low_rank<T>(run, op.up_site, 1, 0, run.tokens, x);
    for_panels<T>(op.gate, run.tokens, run.memory.scheduler, x,
                  [&](int64_t first, const Panels& panels, Workspace& own) {
                      const auto at = [&](int64_t r) { return out(first + r); };
                      gate_panels<T>(op.gate, op.up, panels, own, at, gate, up, first);
                  });
}

}  // namespace vlm
