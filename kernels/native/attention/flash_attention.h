// A tile of queries on its way over the keys of its sequence; see attention.h.
#pragma once

#include <optional>
#include <type_traits>

#include "attention/amx_attention.h"
#include "attention/key_tile.h"

namespace vlm {

// The last tiles of queries are begun first and ask for their keys; the others find them in a
// cache.
constexpr int64_t ASKING_TILES = 8;

// A tile of queries of T on its way over keys in pages of P, in the memory of a thread. Own says
// what the lanes of vectors are: many_queries.h, few_queries.h. It has
//   count()           floats that are mixed,
//   clear(), put(r)   for the queries, the address of each,
//   score(keys)       of a tile, which asks `ahead_` for the next one; then weigh(first), then
//   mix(values),      in pairs of keys if they are `zipped()`,
//   add_part()        to what was seen before,
//   divide(), get(r)  for the results,
//   tile_rows()       that its products have if they are of tiles.
template <typename Own, typename T, typename P>
class QueryTile {
  public:
    static constexpr bool PAIRS = PAIRED<T>;
    // Keys are read where they lie.
    static constexpr bool DIRECT = std::is_same_v<T, P> && (sizeof(T) == 4 || PAIRS);
    static constexpr bool SCALED = std::is_same_v<P, code8>;
    using Operand = std::conditional_t<PAIRS, bf16, float>;

    QueryTile(const Attention& job, float* memory)
        : job_(job),
          dim_(job.head_dim),
          shared_(job.heads / job.kv_heads),
          in_tiles_(PAIRS && attends_in_tiles(dim_)) {
        queries_ = memory;
        scores_ = queries_ + dim_ * QUERIES;
        wide_ = scores_ + TILE_KEYS * QUERIES;
        running_.mixed = wide_ + 2 * TILE_KEYS * dim_;
        part_.mixed = running_.mixed + dim_ * QUERIES;
    }

    void run(const AttentionItem& item, float* partials) {
        take(item);
        if (item.part >= 0) {
            float* partial = partials + item.partial * partial_size(dim_);
            float* mixed = part_.mixed;
            part_.mixed = partial + 2 * QUERIES;
            pass(item.part * PART_KEYS);
            part_.save(partial);
            part_.mixed = mixed;
            return;
        }
        running_.begin(own().count());
        for (int64_t first = 0; first < most_; first += PART_KEYS) {
            pass(first);
            own().add_part();
        }
        finish(item);
    }

    // The parts of a tile, each computed before.
    void join(const AttentionItem& item, float* partials) {
        take(item);
        running_.begin(own().count());
        float* mixed = part_.mixed;
        for (int64_t part = 0; part < item.part; ++part) {
            float* partial = partials + (item.partial + part) * partial_size(dim_);
            part_.read(partial);
            part_.mixed = partial + 2 * QUERIES;
            own().add_part();
        }
        part_.mixed = mixed;
        finish(item);
    }

  protected:
    int64_t words() const { return PAIRS ? dim_ / 2 : dim_; }

    int64_t rows_of(const AttentionItem& item) const {
        const int64_t* offsets = job_.offsets + item.sequence;
        return std::min(QUERIES, (offsets[1] - offsets[0]) * shared_ - item.tile * QUERIES);
    }

    // 2^x of e^x.
    float base_2_scale() const { return (float)(job_.scale * 1.4426950408889634); }

    const Attention& job_;
    int64_t dim_, shared_, rows_ = 0, least_ = 0;
    bool in_tiles_;
    float visible_[QUERIES];  // how many keys each query sees
    Scales key_scales_, value_scales_;
    Ahead<P> ahead_;
    float *queries_, *scores_, *wide_;  // keys as products take them, then values
    Running running_, part_;

    // Room for as many pairs of values as a tile has, behind those themselves.
    float* more_values() const { return wide_ + TILE_KEYS * dim_ + TILE_KEYS / 2 * dim_; }

  private:
    Own& own() { return *(Own*)this; }

    void take(const AttentionItem& item) {
        const int64_t begin = job_.offsets[item.sequence];
        first_ = item.tile * QUERIES;
        rows_ = rows_of(item);
        blocks_ = job_.tables[item.sequence];
        head_ = item.kv_head;
        keys_ = (const P*)job_.pages.k + head_ * job_.pages.head_stride;
        values_ = (const P*)job_.pages.v + head_ * job_.pages.head_stride;
        own().clear();
        std::memset(visible_, 0, sizeof visible_);
        for (int64_t r = 0; r < rows_; ++r) {
            const int64_t token = (first_ + r) / shared_, head = (first_ + r) % shared_;
            own().put((const T*)job_.q + (begin + token) * job_.q_stride +
                          (item.kv_head * shared_ + head) * job_.q_head,
                      r);
            visible_[r] = (float)visible_to(job_, item.sequence, token);
        }
        asks_ = in_tiles_ || item.tile + ASKING_TILES >= query_tiles(job_, item.sequence);
        least_ = (int64_t)visible_[0];
        most_ = (int64_t)visible_[rows_ - 1];
    }

    // The keys of the part that begins with `first`.
    void pass(int64_t first) {
        part_.begin(own().count());
        std::optional<TileRegisters> registers;
        if (in_tiles_) registers.emplace(own().tile_rows(), 64);
        const int64_t end = std::min(first + PART_KEYS, most_);
        Places places[2];
        places[0].find(job_.pages, job_.first_key, blocks_, first, most_);
        for (int turn = 0; first < end; first += TILE_KEYS, turn ^= 1) {
            Places* next = first + TILE_KEYS < most_ ? &places[turn ^ 1] : nullptr;
            if (next) next->find(job_.pages, job_.first_key, blocks_, first + TILE_KEYS, most_);
            tile(places[turn], next, first);
        }
    }

    // Values that are zipped or expanded are made so before the scores: right before they are mixed
    // they are waited for.
    void tile(const Places& places, const Places* next, int64_t first) {
        const float *keys[TILE_KEYS], *values[TILE_KEYS];
        if constexpr (SCALED) {
            const Pages& pages = job_.pages;
            const int64_t head = head_ * pages.scale_head_stride;
            key_scales_.find(places, pages.k_scales, pages.k_zeros, head);
            value_scales_.find(places, pages.v_scales, pages.v_zeros, head);
        }
        ahead_.of(keys_, values_, asks_ ? next : nullptr, dim_);
        point_to_keys(places, keys);
        point_to_values(places, values);
        own().score(keys);
        own().weigh(first);
        own().mix(values);
    }

    // Where products find keys: in their pages, or expanded.
    void point_to_keys(const Places& places, const float** keys) const {
        for (int64_t j = 0; j < TILE_KEYS; ++j) {
            Operand* room = (Operand*)(wide_ + j * dim_);
            keys[j] = (const float*)expanded(keys_ + places.at[j], key_scales_.zero + j, room);
        }
    }

    // Likewise values, zipped or not.
    void point_to_values(const Places& places, const float** values) {
        float* room = wide_ + TILE_KEYS * dim_;
        const auto value = [&](int64_t j, Operand* to) {
            return expanded(values_ + places.at[j], value_scales_.zero + j, to);
        };
        if (own().zipped()) {
            Operand* pair = (Operand*)(room + TILE_KEYS / 2 * dim_);
            for (int64_t j = 0; j < TILE_KEYS; j += 2, room += dim_) {
                zip((const bf16*)value(j, pair), (const bf16*)value(j + 1, pair + dim_), room);
                values[j / 2] = room;
            }
        } else {
            for (int64_t j = 0; j < TILE_KEYS; ++j, room += dim_)
                values[j] = (const float*)value(j, (Operand*)room);
        }
    }

    // A row of a page as products take it: itself, or in `room`.
    const Operand* expanded(const P* row, const float* zero_point, Operand* room) const {
        if constexpr (DIRECT)
            return row;
        else if constexpr (std::is_same_v<P, float8> && PAIRS)
            widen_row(row, dim_, room);
        else
            for (int64_t d = 0; d < dim_; d += LANES) {
                Vec values = load(row + d);
                if constexpr (SCALED) values = values - all(*zero_point);
                store_exact(room + d, values);
            }
        return room;
    }

    // Both rows dim by dim.
    void zip(const bf16* even, const bf16* odd, float* to) const {
        int64_t d = 0;
        for (; d + 2 * WIDTH <= dim_; d += 2 * WIDTH) {
            const Zipped both(even + d, odd + d);
            std::memcpy(to + d, &both.lower, sizeof both.lower);
            std::memcpy(to + d + WIDTH, &both.upper, sizeof both.upper);
        }
        for (; d < dim_; ++d) {
            const uint32_t both = even[d].bits | (uint32_t)odd[d].bits << 16;
            std::memcpy(to + d, &both, sizeof both);
        }
    }

    void finish(const AttentionItem& item) {
        own().divide();
        const int64_t begin = job_.offsets[item.sequence];
        for (int64_t r = 0; r < rows_; ++r) {
            const int64_t token = (first_ + r) / shared_, head = (first_ + r) % shared_;
            own().get(r, (T*)job_.out +
                             ((begin + token) * job_.heads + item.kv_head * shared_ + head) * dim_);
        }
    }

    bool asks_ = false;
    int64_t head_ = 0, first_ = 0, most_ = 0;
    const int32_t* blocks_ = nullptr;
    const P *keys_ = nullptr, *values_ = nullptr;
};

}  // namespace vlm
