// Routed experts, in batches of tokens.
#pragma once

#include <cstring>

#include "ops_products.h"

namespace vlm {

template <typename T>
struct ExpertsOf {
    const Run& run;
    const Experts& op;
    Strided<T> x = run.rows<T>(op.x), shared = run.rows<T>(op.shared);
    Strided<float> scores = run.rows<float>(op.scores);
    Strided<float> out = op.apart ? run.own_slot(op.hidden) : run.rows<float>(op.out);
    Strided<int64_t> ids{run.memory.ids, op.top_k};
    Strided<float> weights{run.memory.weights, op.top_k};

    void route() const {
        const Step& step = run.step;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < run.tokens; ++t) {
            choose_experts(scores(t), op.experts, op.top_k, ids(t), weights(t));
            if (step.expert_ids)
                std::memcpy(step.expert_ids +
                                (t * run.program.expert_layers + op.index) * run.program.top_k,
                            ids(t), op.top_k * sizeof(int64_t));
        }
    }

    void compute(int64_t first, int64_t n) const {
        Assignment& assignment = run.memory.assignment;
        const Strided<T> hidden{(T*)run.memory.expert_hidden, op.gate_up[0].columns};
        const Strided<float> routed{run.memory.results, op.hidden};
        const Strided<float> shared_results{routed(n * op.top_k), op.hidden};
#pragma omp single
        assignment.make(ids(first), n * op.top_k, op.experts);
        for_experts<T>(
            assignment, op.gate_up, 2, run.memory.scheduler,
            [&](int64_t place) { return x(first + place / op.top_k); },
            [&](int64_t expert, const Panels& panels, const int64_t* places, Workspace& own) {
                const Weight* pair = op.gate_up + 2 * expert;
                gate_panels<T>(pair[0], pair[1], panels, own,
                               [&](int64_t r) { return hidden(places[r]); });
            });
        for_experts<T>(
            assignment, op.down, 1, run.memory.scheduler, hidden,
            [&](int64_t expert, const Panels& panels, const int64_t* places, Workspace& own) {
                for_results(op.down[expert], panels, own.operand, own.results_of(0),
                            [&](int64_t r, int64_t column, int64_t count, const float* results) {
                                std::memcpy(routed(places[r]) + column, results,
                                            count * sizeof(float));
                            });
            });
        auto from = [&](int64_t r) { return shared(first + r); };
        if (op.has_shared() && op.apart)
            project<T>(op.shared_down, n, run.memory.scheduler, from,
                       StoreResults<float, float>{shared_results});
        else if (op.has_shared())
            project<T>(op.shared_down, n, run.memory.scheduler, from,
                       StoreResults<T, float>{shared_results});
#pragma omp for schedule(static)
        for (int64_t t = 0; t < n; ++t) add(first + t, shared_results(t), routed(t * op.top_k));
    }

    // Adds the shared expert first, then the routed ones in the order of their weights.
    void add(int64_t token, const float* shared_results, const float* routed) const {
        const float gate = op.has_shared() ? sigmoid(scores(token)[op.experts]) : 0.0f;
        for (int64_t c = 0; c < op.hidden; c += LANES) {
            Vec total = op.has_shared() ? load(shared_results + c) * gate : zero();
            for (int64_t j = 0; j < op.top_k; ++j)
                total = fma(weights(token)[j], load(routed + j * op.hidden + c), total);
            float* to = out(token) + c;
            store(to, op.apart ? total : rounded<T>(load(to) + total));
        }
    }
};

template <typename T>
void perform(const Run& run, const Experts& op) {
    const ExpertsOf<T> experts{run, op};
    const int64_t tokens = run.tokens;
    experts.route();
    for (int64_t first = 0; first < tokens; first += EXPERT_TOKENS)
        experts.compute(first, std::min(EXPERT_TOKENS, tokens - first));
}

}  // namespace vlm
