// Planning of attention, and its kernels' dispatch; see attention.h.
#include "attention/attention.h"

#include "attention/few_queries.h"
#include "attention/many_queries.h"
#include "calls.h"

namespace vlm {

void AttentionPlan::make(const Attention& job) {
    int64_t tiles = 0, parts = 0;
    for (int64_t i = 0; i < job.sequences; ++i) {
        const int64_t own = query_tiles(job, i) * job.kv_heads;
        tiles += own;
        parts += own * ((keys_of(job, i) + PART_KEYS - 1) / PART_KEYS);
    }
    // Split tiles into parts only where tiles alone would leave threads idle.
    by_parts = tiles < 4 * job.threads;
    const int64_t most = by_parts ? parts : tiles;
    if (most > item_capacity) {
        item_capacity = 0;
        items.reset(new AttentionItem[most]);
        merges.reset(new AttentionItem[most]);
        item_capacity = most;
    }
    count = merge_count = 0;
    int64_t partial_count = 0;
    for (int64_t i = 0; i < job.sequences; ++i) {
        const int64_t shared = job.heads / job.kv_heads;
        // The last tiles see most keys: start them first, so that threads finish together.
        for (int64_t tile = query_tiles(job, i) - 1; tile >= 0; --tile) {
            const int64_t rows = (job.offsets[i + 1] - job.offsets[i]) * shared;
            const int64_t last = (std::min((tile + 1) * QUERIES, rows) - 1) / shared;
            const int64_t keys = visible_to(job, i, last);
            const int64_t own = (keys + PART_KEYS - 1) / PART_KEYS;
            for (int64_t head = 0; head < job.kv_heads; ++head) {
                AttentionItem item{(int32_t)i, (int32_t)head, (int32_t)tile, -1, 0};
                if (!by_parts || own == 1) {
                    items[count++] = item;
                    continue;
                }
                item.part = (int32_t)own;
                item.partial = partial_count;
                merges[merge_count++] = item;
                for (int64_t part = 0; part < own; ++part) {
                    item.part = (int32_t)part;
                    item.partial = partial_count++;
                    items[count++] = item;
                }
            }
        }
    }
    partials.get(partial_count * partial_size(job.head_dim));
}

// The layout is that of FlashAttention's constructor.
int64_t attention_scratch_floats(int64_t head_dim) {
    return 3 * head_dim * QUERIES + TILE_KEYS * QUERIES + 2 * TILE_KEYS * head_dim;
}

ScratchBuffer& attention_scratch() {
    static thread_local ScratchBuffer own;
    return own;
}

template <typename T, typename P>
void attend_over(const Attention& job, AttentionPlan& plan, LoopScheduler& scheduler) {
    float* scratch = attention_scratch().get(attention_scratch_floats(job.head_dim));
    float* partials = plan.partials.get(0);
    FewQueries<T, P> few(job, scratch);
    ManyQueries<T, P> many(job, scratch);
    const auto run = [&](int64_t i) {
        const AttentionItem& item = plan.items[i];
        few.takes(item) ? few.run(item, partials) : many.run(item, partials);
    };
    // Consecutive parts of a thread prefetch each other's keys, so give each thread a contiguous
    // range.
    plan.by_parts ? scheduler.for_each(plan.count, run)
                  : scheduler.for_each_interleaved(plan.count, run);
    if (plan.merge_count == 0) return;
    scheduler.for_each_interleaved(plan.merge_count, [&](int64_t i) {
        const AttentionItem& item = plan.merges[i];
        few.takes(item) ? few.merge(item, partials) : many.merge(item, partials);
    });
}

template <typename T>
void attend(const Attention& job, AttentionPlan& plan, LoopScheduler& scheduler) {
    constexpr bool wide = sizeof(T) == 4;
    switch (job.pages.form) {
        case KV_FLOAT8:
            return attend_over<T, float8>(job, plan, scheduler);
        case KV_INT8:
            return attend_over<T, code8>(job, plan, scheduler);
        case KV_BFLOAT16:
            return attend_over<T, bf16>(job, plan, scheduler);
        // bfloat16 operands cannot represent float16 exactly.
        case KV_FLOAT16:
            return attend_over<T, std::conditional_t<wide, f16, bf16>>(job, plan, scheduler);
        default:
            return attend_over<T, T>(job, plan, scheduler);
    }
}

template void attend<float>(const Attention&, AttentionPlan&, LoopScheduler&);
template void attend<bf16>(const Attention&, AttentionPlan&, LoopScheduler&);

template <typename T>
void attend_all(const Attention& job) {
    static thread_local AttentionPlan plan;
    plan.make(job);
    AttentionPlan& make_vec = plan;
    on_all_threads(
        job.threads, [&] { attention_scratch().get(attention_scratch_floats(job.head_dim)); },
        [&](LoopScheduler& scheduler) { attend<T>(job, make_vec, scheduler); });
}

}  // namespace vlm

extern "C" int64_t vlm_attention(const vlm::Attention* job, int64_t bits) {
    return vlm::guarded(
        [=] { bits == 32 ? vlm::attend_all<float>(*job) : vlm::attend_all<vlm::bf16>(*job); });
}
