// Flash attention over paged keys and values, from one query to thousands. The queries that share a
// key head pass over its keys in tiles, with an online softmax. Many queries are the lanes of
// vectors; with few queries, keys and then dims are.
//
// A query visits the keys from position 0 in tiles of 64, and tiles in parts of 512. Masked keys
// add nothing, and parts are merged in order. So a query's bits depend on its sequence alone: not
// on its slice, on the queries beside it, or on whether threads share its parts.
//
// `first_key` slots of a sequence's table come before its first key and do not count. In a `whole`
// job every query sees all keys of its sequence; else attention is causal.
#pragma once

#include <algorithm>

#include "attention/kv_pages.h"
#include "functions.h"
#include "guard.h"
#include "scratch.h"

namespace vlm {

constexpr int64_t TILE_KEYS = 64;
constexpr int64_t PART_KEYS = 512;
constexpr int QUERY_VECS = WIDTH == 16 ? 2 : 1;  // vectors in a tile of queries
constexpr int64_t QUERIES = QUERY_VECS * LANES;

struct Attention {
    int64_t sequences, threads, heads, kv_heads, head_dim, q_stride, q_head;
    Pages pages;
    int64_t first_key, whole;
    double scale;
    const int64_t *offsets, *starts;
    const int32_t** tables;  // [sequences], each a sequence's blocks in order
    const void* q;
    void* out;  // [N, heads, head_dim], contiguous
};

// Returns how many keys the last query of a sequence sees.
inline int64_t keys_of(const Attention& job, int64_t sequence) {
    return job.starts[sequence] + job.offsets[sequence + 1] - job.offsets[sequence];
}

// Returns how many keys the query of token number `token` of a sequence sees.
inline int64_t visible_to(const Attention& job, int64_t sequence, int64_t token) {
    return job.whole ? keys_of(job, sequence) : job.starts[sequence] + token + 1;
}

inline int64_t query_tiles(const Attention& job, int64_t sequence) {
    const int64_t shared = job.heads / job.kv_heads;
    const int64_t rows = (job.offsets[sequence + 1] - job.offsets[sequence]) * shared;
    return (rows + QUERIES - 1) / QUERIES;
}

// A work item: a tile of queries of one key head, over all of its keys, or over one part of them if
// `part` >= 0. The result of a part goes to partial result number `partial`.
struct AttentionItem {
    int32_t sequence, kv_head, tile, part;
    int64_t partial;
};

// Work items of an attention, and space for partial results. One thread makes it before a parallel
// region. It depends on the sequences alone, so all layers of a step share it.
struct AttentionPlan {
    std::unique_ptr<AttentionItem[]> items;
    std::unique_ptr<AttentionItem[]>
        merges;  // tiles of several parts; `partial` is the first of them
    ScratchBuffer partials;
    int64_t count = 0, merge_count = 0, item_capacity = 0;
    bool by_parts = false;

    // Throws std::bad_alloc.
    void make(const Attention& job);
};

// Returns the floats of a partial result: maxima, sums of weights, and the output of every dim.
inline int64_t partial_size(int64_t head_dim) { return (head_dim + 2) * QUERIES; }

// Returns the floats of scratch memory that a thread needs.
int64_t attention_scratch_floats(int64_t head_dim);

ScratchBuffer& attention_scratch();

// Computes attention of all queries, shared among threads. Call inside a parallel region whose
// threads have allocated their scratch.
template <typename T>
void attend(const Attention& job, AttentionPlan& plan, LoopScheduler& scheduler);

}  // namespace vlm
