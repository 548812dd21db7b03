// Routed experts of a few tokens: which they are, and which tokens each of them serves.
#pragma once

#include <algorithm>
#include <vector>

#include "program.h"

namespace vlm {

// Softmax over all experts, the top_k of them in descending order, weights that sum to 1.
// `scores` is [experts] and is used up.
inline void choose(float* scores, int64_t experts, int64_t top_k, int64_t* ids, float* weights) {
    float most = scores[0];
    for (int64_t e = 1; e < experts; ++e) most = scores[e] > most ? scores[e] : most;
    for (int64_t e = 0; e < experts; ++e) scores[e] = std::exp(scores[e] - most);
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

// The experts that a step uses, each with its places `token * top_k + j`.
struct Assignment {
    std::vector<int64_t> experts, first, places;

    void make(const int64_t* ids, int64_t count) {
        places.resize(count);
        for (int64_t i = 0; i < count; ++i) places[i] = i;
        std::stable_sort(places.begin(), places.end(),
                         [ids](int64_t a, int64_t b) { return ids[a] < ids[b]; });
        experts.clear();
        first.clear();
        for (int64_t i = 0; i < count; ++i)
            if (i == 0 || ids[places[i]] != experts.back()) {
                experts.push_back(ids[places[i]]);
                first.push_back(i);
            }
        first.push_back(count);
    }
};

}  // namespace vlm
