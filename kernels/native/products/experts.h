// Routed experts of some tokens: which they are, and which tokens each of them serves.
#pragma once

#include <algorithm>
#include <vector>

#include "functions.h"
#include "products/product.h"

namespace vlm {

// Softmax over all experts, the top_k of them in descending order, weights that sum to 1.
// `scores` is [experts] and is used up.
inline void choose(float* scores, int64_t experts, int64_t top_k, int64_t* ids, float* weights) {
    float most = scores[0];
    for (int64_t e = 1; e < experts; ++e) most = scores[e] > most ? scores[e] : most;
    for (int64_t e = 0; e < experts; e += LANES) {
        const int64_t some = std::min<int64_t>(LANES, experts - e);
        store_some(scores + e, exponential(load_some(scores + e, some) - all(most)), some);
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

// The experts that some tokens use, each with its places `token * top_k + j` in ascending order.
struct Assignment {
    std::vector<int64_t> experts, first, places;

    // Has room for so many places of so many experts, so that `make` asks for none.
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
        // Each `first` has moved to where the next expert began.
        for (int64_t e = most; e > 0; --e) first[e] = first[e - 1];
        first[0] = 0;
    }

    int64_t count_of(int64_t expert) const { return first[expert + 1] - first[expert]; }
};

// Inside a parallel region: a product per expert in use, shared out among its threads. `at(place)`
// is where the row of a place lies; `use(expert, panels, places, workplace)` computes panels.
template <typename T, typename At, typename Use>
void for_experts(const Assignment& assignment, const Weight* weights, int64_t each_weights,
                 Sharing& sharing, const At& at, const Use& use) {
    Workplace& own = own_workplace();
    const int64_t used = assignment.experts.size();
    const int64_t panels = panels_of(weights[0]);
    // About as many bytes of a weight as are worth taking at a time.
    const int64_t size = panel_bytes(weights[0].depth, weights[0].type);
    const int64_t each = std::max<int64_t>(1, std::min(panels, (1 << 17) / size));
    const int64_t pieces = (panels + each - 1) / each;
    sharing.each(used * pieces, [&](int64_t item) {
        const int64_t expert = assignment.experts[item / pieces], piece = item % pieces;
        const Weight& weight = weights[expert * each_weights];
        const int64_t most = most_rows(weight.depth, in_tiles<T>(weight));
        const int64_t count = assignment.count_of(expert);
        for (int64_t begin = 0; begin < count; begin += most) {
            const int64_t rows = std::min(most, count - begin);
            const int64_t* places = assignment.places.data() + assignment.first[expert] + begin;
            own.operand.take<T>(rows, weight, [&](int64_t r) { return at(places[r]); });
            const int64_t panel = piece * each;
            use(expert, Panels{panel, std::min(each, panels - panel)}, places, own);
        }
    });
}

}  // namespace vlm
