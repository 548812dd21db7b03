// A forward in one parallel region. The work of every operation is shared among the threads
// (loop_scheduler.h) and ends with a barrier.
#include <omp.h>

#include <atomic>

#include "ops_experts.h"
#include "ops_mixers.h"
#include "ops_patches.h"
#include "ops_rows.h"
#include "scan.h"
#include "short_conv.h"

namespace vlm {

template <typename T>
void perform(Run& run, const Op& op) {
    switch (op.kind) {
        case NORM:
            return perform<T>(run, *(const Norm*)op.args);
        case ROTATIONS:
            return perform<T>(run, *(const Rotations*)op.args);
        case PRODUCT:
            return perform<T>(run, *(const Product*)op.args);
        case GATED:
            return perform<T>(run, *(const Gated*)op.args);
        case DELTA_NET:
            return perform<T>(run, *(const DeltaNet*)op.args);
        case HEADS:
            return perform<T>(run, *(const Heads*)op.args);
        case ATTEND:
            return perform<T>(run, *(const Attend*)op.args);
        case SIGMOID:
            return perform<T>(run, *(const Sigmoid*)op.args);
        case KEEP:
            return perform<T>(run, *(const Keep*)op.args);
        case EXPERTS:
            return perform<T>(run, *(const Experts*)op.args);
        case FEATURES:
            return perform<T>(run, *(const Features*)op.args);
        case HIDDEN:
            return perform<T>(run, *(const Hidden*)op.args);
        case REDUCE:
            return perform<T>(run, *(const Reduce*)op.args);
        case LAYER_NORM:
            return perform<T>(run, *(const LayerNorm*)op.args);
        case TURN:
            return perform<T>(run, *(const Turn*)op.args);
        case SEE_ALL:
            return perform<T>(run, *(const SeeAll*)op.args);
        case NARROW:
            return perform<T>(run, *(const Narrow*)op.args);
        case SQUARES:
            return perform<T>(run, *(const Squares*)op.args);
        case SHORT_CONV:
            return perform<T>(run, *(const ShortConv*)op.args);
        case SCAN:
            return perform<T>(run, *(const Scan*)op.args);
        case GATE_NORM:
            return perform<T>(run, *(const GateNorm*)op.args);
    }
}

// Floats of scratch memory per thread.
struct ScratchSizes {
    int64_t attention = 0, delta = 0;
};

// Allocates the memory that threads share, and returns how much each of them needs.
template <typename T>
ScratchSizes prepare(Run& run) {
    const Program& program = run.program;
    if (program.ranks &&
        run.step.tokens * program.hidden * (int64_t)sizeof(float) > program.ranks->slot_bytes)
        throw std::length_error("more tokens than a slot has scratch for");
    run.memory.make(program, run.step, sizeof(T));
    run.group_rows([](int64_t r) { return r; });
    run.memory.scheduler.begin(run.step.threads);
    run.memory.plans.begin();
    ScratchSizes sizes;
    for_kind<Attend>(program, ATTEND, [&](const Attend& op) {
        run.memory.plans.make(attention_job<T>(run, op));
        sizes.attention = std::max(sizes.attention, attention_scratch_floats(op.head_dim));
    });
    for_kind<SeeAll>(program, SEE_ALL, [&](const SeeAll& op) {
        run.memory.plans.make(attention_job<T>(run, op));
        sizes.attention = std::max(sizes.attention, attention_scratch_floats(op.padded_dim));
    });
    for_kind<DeltaNet>(program, DELTA_NET, [&](const DeltaNet& op) {
        sizes.delta = std::max(sizes.delta, delta_heads_scratch_floats(op));
    });
    for_kind<Scan>(program, SCAN, [&](const Scan& op) {
        sizes.delta = std::max(sizes.delta, delta_scratch_floats(op.state_dim, op.head_dim, 1));
    });
    for_kind<GateNorm>(program, GATE_NORM,
                       [&](const GateNorm& op) { sizes.delta = std::max(sizes.delta, op.width); });
    return sizes;
}

// Allocates the memory of one thread.
void reserve(const Program& program, const ScratchSizes& sizes, const Step& step) {
    thread_workspace().reserve(program.deepest);
    attention_scratch().get(sizes.attention);
    delta_scratch().get(sizes.delta);
    for (int64_t which = 0; which < 2; ++which) own_low_rank(which).get(MAX_OWN_ROWS * step.widest);
}

template <typename T>
void run_all(const Program& program, const Step& step) {
    static thread_local Memory memory;
    Run run{program, step, memory, step.tokens};
    check_tokens(program, step);
    const ScratchSizes sizes = prepare<T>(run);
    std::atomic<int64_t> failed{0};
#pragma omp parallel num_threads((int)step.threads)
    {
        failed += guarded([&] { reserve(program, sizes, step); });
        widen<T>(run);  // after its barrier all threads know if one of them failed
        for (int64_t i = 0; i < program.count && !failed && !run.abandoned; ++i)
            perform<T>(run, program.ops[i]);
        if (step.best && !failed && !run.abandoned) find_argmax(step, program.vocab);
    }
    for_kind<SeeAll>(program, SEE_ALL,
                     [&](const SeeAll&) { memory.arena.shrink_to(MAX_KEPT_TOWER_BYTES); });
    if (failed) throw std::bad_alloc();
    if (run.abandoned) throw StepAbandoned();
}

}  // namespace vlm

extern "C" int64_t vlm_step(const vlm::Program* program, const vlm::Step* step, int64_t bits) {
    return vlm::guarded([=] {
        bits == 32 ? vlm::run_all<float>(*program, *step)
                   : vlm::run_all<vlm::bf16>(*program, *step);
    });
}
