// Attention over paged keys and values, the same for one query and for thousands: those of
// one key head pass over its keys in tiles with a running softmax. Many are the lanes of vectors;
// where they are few, keys and then dims are.
//
// A query takes the keys from position 0 on in tiles of 64 and the tiles in parts of 512; what it
// does not see adds nothing, and the parts are joined in their order. So its bits depend on its
// sequence alone: not on its slice, the queries beside it, or on whether threads share its parts.
// `first_key` slots of a sequence's table come before its first key, and count nowhere. If a job
// is `whole`, every query sees all keys of its sequence.
#pragma once

#include <algorithm>

#include "attention/kv_pages.h"
#include "functions.h"
#include "guard.h"
#include "room.h"

namespace vlm {

constexpr int64_t TILE_KEYS = 64;
constexpr int64_t PART_KEYS = 512;
constexpr int QUERY_VECS = WIDTH == 16 ? 2 : 1;  // vectors of a tile of queries
constexpr int64_t QUERIES = QUERY_VECS * LANES;

struct Attention {
    int64_t sequences, threads, heads, kv_heads, head_dim, q_stride, q_head;
    Pages pages;
    int64_t first_key, whole;
    double scale;
    const int64_t *offsets, *starts;
    const int32_t** tables;  // [sequences], a sequence's blocks in their order
    const void* q;
    void* out;  // [N, heads, head_dim], contiguous
};

// The keys that the last query of a sequence sees.
inline int64_t keys_of(const Attention& job, int64_t sequence) {
    return job.starts[sequence] + job.offsets[sequence + 1] - job.offsets[sequence];
}

// How many of them the query of its token number `token` sees.
inline int64_t visible_to(const Attention& job, int64_t sequence, int64_t token) {
    return job.whole ? keys_of(job, sequence) : job.starts[sequence] + token + 1;
}

inline int64_t query_tiles(const Attention& job, int64_t sequence) {
    const int64_t shared = job.heads / job.kv_heads;
    const int64_t rows = (job.offsets[sequence + 1] - job.offsets[sequence]) * shared;
    return (rows + QUERIES - 1) / QUERIES;
}

// One piece of work: a tile of queries of one key head, over all its keys or, if `part` >= 0, over
// one part of them, whose result waits in the partial of that number.
struct AttentionItem {
    int32_t sequence, kv_head, tile, part;
    int64_t partial;
};

// What an attention needs: pieces of work, and room for partial results. Made by one thread before
// a parallel region; kept from layer to layer, since it depends on the sequences alone.
struct AttentionPlan {
    std::unique_ptr<AttentionItem[]> items;
    std::unique_ptr<AttentionItem[]> joins;  // tiles of several parts: `partial` is the first one
    Room partials;
    int64_t count = 0, join_count = 0, item_room = 0;
    bool by_parts = false;

    // Throws std::bad_alloc.
    void make(const Attention& job);
};

// Floats of a partial result: the peaks, the totals, and for every dim the values of the queries.
inline int64_t partial_size(int64_t head_dim) { return (head_dim + 2) * QUERIES; }

// Floats that a thread needs.
int64_t attention_room(int64_t head_dim);

Room& own_attention_room();

// Inside a parallel region whose threads have their room: attention of all queries, shared out.
template <typename T>
void attend(const Attention& job, AttentionPlan& plan, Sharing& sharing);

}  // namespace vlm
