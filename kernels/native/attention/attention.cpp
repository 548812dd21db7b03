// Attention as attention.h describes it.
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
    // Parts are shared out only where tiles alone would leave threads without work.
    by_parts = tiles < 4 * job.threads;
    const int64_t most = by_parts ? parts : tiles;
    if (most > item_room) {
        item_room = 0;
        items.reset(new AttentionItem[most]);
        joins.reset(new AttentionItem[most]);
        item_room = most;
    }
    count = join_count = 0;
    int64_t partial_count = 0;
    for (int64_t i = 0; i < job.sequences; ++i) {
        const int64_t shared = job.heads / job.kv_heads;
        // The last tiles see most keys: they come first, so that threads end together.
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
                joins[join_count++] = item;
                for (int64_t part = 0; part < own; ++part) {
                    item.part = (int32_t)part;
                    item.partial = partial_count++;
                    items[count++] = item;
                }
            }
        }
    }
    partials.of(partial_count * partial_size(job.head_dim));
}

// As QueryTile takes it apart.
int64_t attention_room(int64_t head_dim) {
    return 3 * head_dim * QUERIES + TILE_KEYS * QUERIES + 2 * TILE_KEYS * head_dim;
}

Room& own_attention_room() {
    static thread_local Room own;
    return own;
}

template <typename T, typename P>
void attend_over(const Attention& job, AttentionPlan& plan, Sharing& sharing) {
    float* room = own_attention_room().of(attention_room(job.head_dim));
    float* partials = plan.partials.of(0);
    FewQueries<T, P> few(job, room);
    ManyQueries<T, P> many(job, room);
    const auto run = [&](int64_t i) {
        const AttentionItem& item = plan.items[i];
        few.takes(item) ? few.run(item, partials) : many.run(item, partials);
    };
    // Parts that a thread takes one after the other ask for each other's keys.
    plan.by_parts ? sharing.each(plan.count, run) : sharing.in_turn(plan.count, run);
    if (plan.join_count == 0) return;
    sharing.in_turn(plan.join_count, [&](int64_t i) {
        const AttentionItem& item = plan.joins[i];
        few.takes(item) ? few.join(item, partials) : many.join(item, partials);
    });
}

template <typename T>
void attend(const Attention& job, AttentionPlan& plan, Sharing& sharing) {
    constexpr bool wide = sizeof(T) == 4;
    switch (job.pages.form) {
        case KV_FLOAT8:
            return attend_over<T, float8>(job, plan, sharing);
        case KV_INT8:
            return attend_over<T, code8>(job, plan, sharing);
        case KV_BFLOAT16:
            return attend_over<T, bf16>(job, plan, sharing);
        // Products of bfloat16 have no exact place for these.
        case KV_FLOAT16:
            return attend_over<T, std::conditional_t<wide, f16, bf16>>(job, plan, sharing);
        default:
            return attend_over<T, T>(job, plan, sharing);
    }
}

template void attend<float>(const Attention&, AttentionPlan&, Sharing&);
template void attend<bf16>(const Attention&, AttentionPlan&, Sharing&);

template <typename T>
void attend_all(const Attention& job) {
    static thread_local AttentionPlan plan;
    plan.make(job);
    AttentionPlan& made = plan;
    on_all_threads(
        job.threads, [&] { own_attention_room().of(attention_room(job.head_dim)); },
        [&](Sharing& sharing) { attend<T>(job, made, sharing); });
}

}  // namespace vlm

extern "C" int64_t vlm_attention(const vlm::Attention* job, int64_t bits) {
    return vlm::guarded(
        [=] { bits == 32 ? vlm::attend_all<float>(*job) : vlm::attend_all<vlm::bf16>(*job); });
}
