// The pass of a tile of queries over the keys of its sequence; see attention.h.
#pragma once

#include <optional>
#include <type_traits>

#include "attention/amx_attention.h"
#include "attention/key_tile.h"

namespace vlm {

// Only this many last tiles of queries, which start first, prefetch keys; the others find them in
// the cache.
constexpr int64_t PREFETCHING_TILES = 8;

// The pass of a tile of queries of T over keys in pages of P, in a thread's scratch memory. Derived
// (many_queries.h, few_queries.h) defines what the lanes of vectors are. It has
// count(): floats of the output;
// clear(), set_query(q, r): fill in the queries;
// score(keys): scores of a tile, which also prefetches the next tile;
// softmax(first): weights of the tile whose first key that is;
// add_values(values): in pairs of keys if `interleaved()`;
// merge_part(): adds a part to the parts before;
// normalise(), get_result(r, out): results;
// tile_rows(): rows to configure AMX tiles with.
template <typename Derived, typename T, typename P>
class FlashAttention {
  public:
    static constexpr bool PAIRS = PAIRED<T>;
    // Keys are read in place.
    static constexpr bool DIRECT = std::is_same_v<T, P> && (sizeof(T) == 4 || PAIRS);
    static constexpr bool SCALED = std::is_same_v<P, code8>;
    using Operand = std::conditional_t<PAIRS, bf16, float>;

    FlashAttention(const Attention& job, float* memory)
        : job_(job),
          dim_(job.head_dim),
          queries_per_head_(job.heads / job.kv_heads),
          in_tiles_(PAIRS && attention_uses_amx(dim_)) {
        queries_ = memory;
        scores_ = queries_ + dim_ * QUERIES;
        operands_ = scores_ + TILE_KEYS * QUERIES;
        running_.output = operands_ + 2 * TILE_KEYS * dim_;
        part_.output = running_.output + dim_ * QUERIES;
    }

    void run(const AttentionItem& item, float* partials) {
        begin_item(item);
        if (item.part >= 0) {
            float* partial = partials + item.partial * partial_size(dim_);
            float* output = part_.output;
            part_.output = partial + 2 * QUERIES;
            pass_part(item.part * PART_KEYS);
            part_.save(partial);
            part_.output = output;
            return;
        }
        running_.begin(derived().count());
        for (int64_t first = 0; first < max_visible_; first += PART_KEYS) {
            pass_part(first);
            derived().merge_part();
        }
        finish(item);
    }

    // Merges the parts of a tile, computed before.
    void merge(const AttentionItem& item, float* partials) {
        begin_item(item);
        running_.begin(derived().count());
        float* output = part_.output;
        for (int64_t part = 0; part < item.part; ++part) {
            float* partial = partials + (item.partial + part) * partial_size(dim_);
            part_.read(partial);
            part_.output = partial + 2 * QUERIES;
            derived().merge_part();
        }
        part_.output = output;
        finish(item);
    }

  protected:
    int64_t words() const { return PAIRS ? dim_ / 2 : dim_; }

    int64_t rows_of(const AttentionItem& item) const {
        const int64_t* offsets = job_.offsets + item.sequence;
        return std::min(QUERIES,
                        (offsets[1] - offsets[0]) * queries_per_head_ - item.tile * QUERIES);
    }

    // Scale of scores for 2^x in place of e^x.
    float base_2_scale() const { return (float)(job_.scale * 1.4426950408889634); }

    const Attention& job_;
    int64_t dim_, queries_per_head_, rows_ = 0, min_visible_ = 0;
    bool in_tiles_;
    float visible_[QUERIES];  // keys that each query sees
    CodeScales key_scales_, value_scales_;
    KeyPrefetcher<P> prefetcher_;
    float *queries_, *scores_, *operands_;  // keys, then values, in the operands' form
    OnlineSoftmax running_, part_;

    // Space for as many pairs of values as a tile has, behind the values.
    float* pair_scratch() const { return operands_ + TILE_KEYS * dim_ + TILE_KEYS / 2 * dim_; }

  private:
    Derived& derived() { return *(Derived*)this; }

    void begin_item(const AttentionItem& item) {
        const int64_t begin = job_.offsets[item.sequence];
        first_ = item.tile * QUERIES;
        rows_ = rows_of(item);
        blocks_ = job_.tables[item.sequence];
        head_ = item.kv_head;
        keys_ = (const P*)job_.pages.k + head_ * job_.pages.head_stride;
        values_ = (const P*)job_.pages.v + head_ * job_.pages.head_stride;
        derived().clear();
        std::memset(visible_, 0, sizeof visible_);
        for (int64_t r = 0; r < rows_; ++r) {
            const int64_t token = (first_ + r) / queries_per_head_,
                          head = (first_ + r) % queries_per_head_;
            derived().set_query((const T*)job_.q + (begin + token) * job_.q_stride +
                                    (item.kv_head * queries_per_head_ + head) * job_.q_head,
                                r);
            visible_[r] = (float)visible_to(job_, item.sequence, token);
        }
        prefetches_ =
            in_tiles_ || item.tile + PREFETCHING_TILES >= query_tiles(job_, item.sequence);
        min_visible_ = (int64_t)visible_[0];
        max_visible_ = (int64_t)visible_[rows_ - 1];
    }

    // Processes the keys of the part that starts at `first`.
    void pass_part(int64_t first) {
        part_.begin(derived().count());
        std::optional<TileRegisters> registers;
        if (in_tiles_) registers.emplace(derived().tile_rows(), 64);
        const int64_t end = std::min(first + PART_KEYS, max_visible_);
        KeyOffsets offsets[2];
        offsets[0].find(job_.pages, job_.first_key, blocks_, first, max_visible_);
        for (int turn = 0; first < end; first += TILE_KEYS, turn ^= 1) {
            KeyOffsets* next = first + TILE_KEYS < max_visible_ ? &offsets[turn ^ 1] : nullptr;
            if (next)
                next->find(job_.pages, job_.first_key, blocks_, first + TILE_KEYS, max_visible_);
            process_tile(offsets[turn], next, first);
        }
    }

    // Values that have to be interleaved or converted are prepared before the scores. Right before
    // their use, the stores would stall the loads.
    void process_tile(const KeyOffsets& offsets, const KeyOffsets* next, int64_t first) {
        const float *keys[TILE_KEYS], *values[TILE_KEYS];
        if constexpr (SCALED) {
            const Pages& pages = job_.pages;
            const int64_t head = head_ * pages.scale_head_stride;
            key_scales_.find(offsets, pages.k_scales, pages.k_zeros, head);
            value_scales_.find(offsets, pages.v_scales, pages.v_zeros, head);
        }
        prefetcher_.start(keys_, values_, prefetches_ ? next : nullptr, dim_);
        point_to_keys(offsets, keys);
        point_to_values(offsets, values);
        derived().score(keys);
        derived().softmax(first);
        derived().add_values(values);
    }

    // Points at keys as operands: in their pages, or converted.
    void point_to_keys(const KeyOffsets& offsets, const float** keys) const {
        for (int64_t j = 0; j < TILE_KEYS; ++j) {
            Operand* scratch = (Operand*)(operands_ + j * dim_);
            keys[j] =
                (const float*)as_operand(keys_ + offsets.at[j], key_scales_.zero + j, scratch);
        }
    }

    // The same for values, interleaved or not.
    void point_to_values(const KeyOffsets& offsets, const float** values) {
        float* scratch = operands_ + TILE_KEYS * dim_;
        const auto value = [&](int64_t j, Operand* to) {
            return as_operand(values_ + offsets.at[j], value_scales_.zero + j, to);
        };
        if (derived().interleaved()) {
            Operand* pair = (Operand*)(scratch + TILE_KEYS / 2 * dim_);
            for (int64_t j = 0; j < TILE_KEYS; j += 2, scratch += dim_) {
                interleave((const bf16*)value(j, pair), (const bf16*)value(j + 1, pair + dim_),
                           scratch);
                values[j / 2] = scratch;
            }
        } else {
            for (int64_t j = 0; j < TILE_KEYS; ++j, scratch += dim_)
                values[j] = (const float*)value(j, (Operand*)scratch);
        }
    }

    // Returns a row of a page as an operand: itself, or converted into `scratch`.
    const Operand* as_operand(const P* row, const float* zero_point, Operand* scratch) const {
        if constexpr (DIRECT)
            return row;
        else if constexpr (std::is_same_v<P, float8> && PAIRS)
            widen_row(row, dim_, scratch);
        else
            for (int64_t d = 0; d < dim_; d += LANES) {
                Vec values = load(row + d);
                if constexpr (SCALED) values = values - all(*zero_point);
                store_exact(scratch + d, values);
            }
        return scratch;
    }

    // Interleaves both rows, dim by dim.
    void interleave(const bf16* even, const bf16* odd, float* to) const {
        int64_t d = 0;
        for (; d + 2 * WIDTH <= dim_; d += 2 * WIDTH) {
            const Interleaved both(even + d, odd + d);
            std::memcpy(to + d, &both.lower, sizeof both.lower);
            std::memcpy(to + d + WIDTH, &both.upper, sizeof both.upper);
        }
        for (; d < dim_; ++d) {
            const uint32_t both = even[d].bits | (uint32_t)odd[d].bits << 16;
            std::memcpy(to + d, &both, sizeof both);
        }
    }

    void finish(const AttentionItem& item) {
        derived().normalise();
        const int64_t begin = job_.offsets[item.sequence];
        for (int64_t r = 0; r < rows_; ++r) {
            const int64_t token = (first_ + r) / queries_per_head_,
                          head = (first_ + r) % queries_per_head_;
            derived().get_result(r, (T*)job_.out + ((begin + token) * job_.heads +
                                                    item.kv_head * queries_per_head_ + head) *
                                                       dim_);
        }
    }

    bool prefetches_ = false;
    int64_t head_ = 0, first_ = 0, max_visible_ = 0;
    const int32_t* blocks_ = nullptr;
    const P *keys_ = nullptr, *values_ = nullptr;
};

}  // namespace vlm
