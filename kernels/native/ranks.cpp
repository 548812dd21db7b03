// Barriers of ranks, for Python; see ranks.h.
#include "ranks.h"

#include "calls.h"
#include "guard.h"

extern "C" {

int64_t vlm_ranks_begin(vlm::Ranks* ranks, int64_t step) {
    ranks->count = step * vlm::MAX_BARRIERS;
    vlm::header(*ranks).arrivals[ranks->rank].count.store(ranks->count);
    return 0;
}

int64_t vlm_ranks_barrier(vlm::Ranks* ranks) {
    return vlm::guarded([=] {
        if (!vlm::barrier(*ranks)) throw vlm::StepAbandoned();
    });
}

int64_t vlm_ranks_give_up(const vlm::Ranks* ranks, int64_t step) {
    vlm::give_up(*ranks, step);
    return 0;
}
}
