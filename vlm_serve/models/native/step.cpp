// A forward in one parallel region: the work of every operation is shared out in pieces that
// threads take as they come, and ends with a barrier.
#include <omp.h>

#include "ops_experts.h"
#include "ops_mixers.h"
#include "ops_rows.h"

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
    }
}

// All memory that the parallel region will need.
template <typename T>
void prepare(const Run& run) {
    const Program& program = run.program;
    if (program.ranks &&
        run.step.tokens * program.hidden * (int64_t)sizeof(float) > program.ranks->slot_bytes)
        throw std::length_error("more tokens than a slot has room for");
    run.memory.make(program, run.step, sizeof(T));
    run.memory.plans.begin();
    for_kind<Attend>(program, ATTEND,
                     [&](const Attend& op) { run.memory.plans.make(attention_job<T>(run, op)); });
    on_all_threads(run.step.threads, [&] {
        own_workplace().reserve(program.deepest);
        for_kind<Attend>(program, ATTEND, [](const Attend& op) {
            own_attention_room().of(attention_room(op.head_dim));
        });
        for_kind<DeltaNet>(program, DELTA_NET,
                           [](const DeltaNet& op) { own_delta_room().of(delta_heads_room(op)); });
    });
}

template <typename T>
void run_all(const Program& program, const Step& step) {
    static thread_local Memory memory;
    Run run{program, step, memory, step.tokens};
    prepare<T>(run);
#pragma omp parallel num_threads((int)step.threads)
    {
        widen<T>(run);
        for (int64_t i = 0; i < program.count && !run.apart; ++i) perform<T>(run, program.ops[i]);
    }
    if (run.apart) throw Apart();
}

}  // namespace vlm

// Both arguments checked by the caller. `bits` is 32 for float32 activations, 16 for bfloat16.
// Returns what `guarded` does.
extern "C" int64_t vlm_step(const vlm::Program* program, const vlm::Step* step, int64_t bits) {
    return vlm::guarded([=] {
        bits == 32 ? vlm::run_all<float>(*program, *step)
                   : vlm::run_all<vlm::bf16>(*program, *step);
    });
}
