// Routed experts, in batches of tokens.
#pragma once

#include <cstring>

#include "ops_products.h"

namespace vlm {

// The changes of one expert's weight, for some of its places. Tokens count from `first` of the
// step's.
struct ExpertChanges {
    const Run* run = nullptr;  // null: the weight is not changed
    const int64_t* places = nullptr;
    int64_t site = 0, first = 0, top_k = 1;
    Strided<float> u{};

    VLM_INLINE const float* apply(int64_t row, int64_t column, const float* results,
                                  float* sums) const {
        if (!run) return results;
        const int64_t place = places[row];
        const int64_t adapter = run->memory.groups.adapter(first + place / top_k);
        if (adapter < 0) return results;
        const LowRankChange& change = run->step.changes[adapter][site];
        if (!change.count) return results;
        std::memcpy(sums, results, PANEL * sizeof(float));
        extend_columns(change, column, u(place), sums);
        return sums;
    }
};

// u of all places at one of an expert's weights.
struct ExpertLowRank {
    const Run& run;
    const int64_t* sites;  // of every expert's weight, `each` of them an expert
    int64_t each, which, first, top_k;
    Strided<float> u{run.memory.low_rank[which], run.step.widest};
    bool any = false;

    // Computes u, shared among the threads, and ends with a barrier. `at(place)` is the address of
    // a place's row.
    template <typename T, typename At>
    void compute(const Assignment& assignment, const At& at) {
        const Step& step = run.step;
        if (!sites || !step.adapters) return;
        for (const int64_t expert : assignment.experts)
            for (int64_t a = 0; a < step.adapters && !any; ++a)
                any = step.changes[a][sites[expert * each + which]].count;
        if (!any) return;
        const int64_t used = assignment.experts.size();
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < used; ++i) compute_expert<T>(assignment, assignment.experts[i], at);
    }

    ExpertChanges of(int64_t expert, const int64_t* places) const {
        if (!any) return {};
        return {&run, places, sites[expert * each + which], first, top_k, u};
    }

  private:
    template <typename T, typename At>
    void compute_expert(const Assignment& assignment, int64_t expert, const At& at) {
        const int64_t* places = assignment.places.data() + assignment.first[expert];
        const int64_t count = assignment.count_of(expert);
        Workspace& own = thread_workspace();
        for (int64_t a = 0; a < run.step.adapters; ++a) {
            const LowRankChange& change = run.step.changes[a][sites[expert * each + which]];
            if (!change.count) continue;
            const int64_t most = max_operand_rows(change.down.depth, in_tiles<T>(change.down));
            int64_t chosen[AMX_ROW_BLOCK];
            for (int64_t next = 0; next < count;) {
                int64_t rows = 0;
                for (; next < count && rows < most; ++next)
                    if (run.memory.groups.adapter(first + places[next] / top_k) == a)
                        chosen[rows++] = places[next];
                if (!rows) break;
                own.operand.pack<T>(rows, change.down, [&](int64_t r) { return at(chosen[r]); });
                for_results(change.down, Panels{0, panels_of(change.down)}, own.operand,
                            own.results_of(0),
                            [&](int64_t r, int64_t column, auto wide, const float* results) {
                                scale_columns(change, column, wide, results, u(chosen[r]));
                            });
            }
        }
    }
};

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
            if (op.sigmoid)
                choose_by_sigmoid(scores(t), op.bias, op.experts, op.top_k, (float)op.scale,
                                  (float)op.floor, ids(t), weights(t));
            else
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
        const int64_t each = op.ungated ? 1 : 2;
        ExpertLowRank gate{run, op.gate_up_sites, each, 0, first, op.top_k},
            up{run, op.gate_up_sites, each, 1, first, op.top_k},
            down{run, op.down_sites, 1, 0, first, op.top_k};
        auto of_place = [&](int64_t place) { return x(first + place / op.top_k); };
        gate.template compute<T>(assignment, of_place);
        if (!op.ungated) up.template compute<T>(assignment, of_place);
        for_experts<T>(
            assignment, op.gate_up, each, run.memory.scheduler, of_place,
            [&](int64_t expert, const Panels& panels, const int64_t* places, Workspace& own) {
                const Weight* pair = op.gate_up + each * expert;
                const auto to = [&](int64_t r) { return hidden(places[r]); };
                if (op.ungated)
                    return square_panels<T>(pair[0], panels, own, to, gate.of(expert, places));
                gate_panels<T>(pair[0], pair[1], panels, own, to, gate.of(expert, places),
                               up.of(expert, places), 0);
            });
        down.template compute<T>(assignment, hidden);
        for_experts<T>(
            assignment, op.down, 1, run.memory.scheduler, hidden,
            [&](int64_t expert, const Panels& panels, const int64_t* places, Workspace& own) {
                const ExpertChanges changes = down.of(expert, places);
                for_results(op.down[expert], panels, own.operand, own.results_of(0),
                            [&](int64_t r, int64_t column, int64_t count, const float* results) {
                                float sums[PANEL];
                                std::memcpy(routed(places[r]) + column,
                                            changes.apply(r, column, results, sums),
                                            count * sizeof(float));
                            });
            });
        auto from = [&](int64_t r) { return shared(first + r); };
        const Changes changes = compute_low_rank<T>(run, op.shared_site, 0, first, n, from);
        if (op.has_shared() && op.apart)
            project<T>(op.shared_down, n, run.memory.scheduler, from,
                       changed(changes, StoreResults<float, float>{shared_results}));
        else if (op.has_shared())
            project<T>(op.shared_down, n, run.memory.scheduler, from,
                       changed(changes, StoreResults<T, float>{shared_results}));
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
