// Routed experts: selects the experts of each token, and groups tokens by expert.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "functions.h"
#include "products/product.h"

namespace vlm {

// Softmax over all experts; then the top_k of them in descending order, with weights that sum to 1.
// Overwrites `scores` [experts].
inline void choose_experts(float* scores, int64_t experts, int64_t top_k, int64_t* ids,
                           float* weights) {
    float most = scores[0];
    for (int64_t e = 1; e < experts; ++e) most = scores[e] > most ? scores[e] : most;
    for (int64_t e = 0; e < experts; e += LANES) {
        const int64_t some = std::min<int64_t>(LANES, experts - e);
        store_partial(scores + e, exponential(load_partial(scores + e, some) - all(most)), some);
    }
    float total = 0.0f;
    for (int64_t j = 0; j < top_k; ++j) {
        int64_t best = 0;
        for (int64_t e = 1; e < experts; ++e)
            if (!(scores[e] <= scores[best])) best = e;
        ids[j] = best;
        weights[j] = scores[best];
        total += scores[best];
        scores[best] = -1.0f;
    }
    for (int64_t j = 0; j < top_k; ++j) weights[j] /= total;
}

// Sigmoids of all experts; then the top_k by sigmoid and `bias` in descending order, with weights
// whose sum is `scale`: sigmoids over theirs and `floor`. Overwrites `scores` [experts].
inline void choose_by_sigmoid(float* scores, const float* bias, int64_t experts, int64_t top_k,
                              float scale, float floor, int64_t* ids, float* weights) {
    for (int64_t e = 0; e < experts; e += LANES) {
        const int64_t some = std::min<int64_t>(LANES, experts - e);
        store_partial(scores + e, sigmoid(load_partial(scores + e, some)), some);
    }
    const auto rank = [&](int64_t e) { return bias ? scores[e] + bias[e] : scores[e]; };
    float total = floor;
    for (int64_t j = 0; j < top_k; ++j) {
        int64_t best = 0;
        for (int64_t e = 1; e < experts; ++e)
            if (!(rank(e) <= rank(best))) best = e;
        ids[j] = best;
        weights[j] = scores[best];
        total += scores[best];
        scores[best] = -INFINITY;
    }
    for (int64_t j = 0; j < top_k; ++j) weights[j] = weights[j] / total * scale;
}

// The experts in use, each with its places `token * top_k + j` in ascending order.
struct Assignment {
    std::vector<int64_t> experts, first, places;

    // Allocates enough for `count` places of `most` experts, so that `make` never allocates.
    void reserve(int64_t count, int64_t most) {
        places.reserve(count);
        experts.reserve(std::min(count, most));
        first.reserve(most + 1);
    }

    void make(const int64_t* ids, int64_t count, int64_t most) {
        experts.clear();
        first.assign(most + 1, 0);
        places.resize(count);
        for (int64_t i = 0; i < count; ++i) ++first[ids[i] + 1];
        for (int64_t e = 0; e < most; ++e) {
            if (first[e + 1]) experts.push_back(e);
            first[e + 1] += first[e];
        }
        for (int64_t i = 0; i < count; ++i) places[first[ids[i]]++] = i;
        // Each `first` now points to the start of the next expert.
        for (int64_t e = most; e > 0; --e) first[e] = first[e - 1];
        first[0] = 0;
    }

    int64_t count_of(int64_t expert) const { return first[expert + 1] - first[expert]; }
};

// Call inside a parallel region: one product per expert in use, shared among the threads.
// `at(place)` is the address of a place's row; `use(expert, panels, places, workspace)` computes
// panels.
template <typename T, typename At, typename Use>
void for_experts(const Assignment& assignment, const Weight* weights, int64_t each_weights,
                 LoopScheduler& scheduler, const At& at, const Use& use) {
    Workspace& own = thread_workspace();
    const int64_t used = assignment.experts.size();
    const int64_t panels = panels_of(weights[0]);
    // Bytes of a weight per work item, about.
    const int64_t size = panel_bytes(weights[0].depth, weights[0].type);
    const int64_t each = std::max<int64_t>(1, std::min(panels, (1 << 17) / size));
    const int64_t pieces = (panels + each - 1) / each;
    scheduler.for_each(used * pieces, [&](int64_t item) {
        const int64_t expert = assignment.experts[item / pieces], piece = item % pieces;
        const Weight& weight = weights[expert * each_weights];
        const int64_t most = max_operand_rows(weight.depth, in_tiles<T>(weight));
        const int64_t count = assignment.count_of(expert);
        for (int64_t begin = 0; begin < count; begin += most) {
            const int64_t rows = std::min(most, count - begin);
            const int64_t* places = assignment.places.data() + assignment.first[expert] + begin;
            own.operand.pack<T>(rows, weight, [&](int64_t r) { return at(places[r]); });
            const int64_t panel = piece * each;
            use(expert, Panels{panel, std::min(each, panels - panel)}, places, own);
        }
    });
}

}  // namespace vlm
