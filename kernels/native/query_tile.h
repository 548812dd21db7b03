// A tile of queries on its way over the keys of its sequence; see attention.h.
#pragma once

#include <type_traits>

#include "attention_tiles.h"

namespace vlm {

// A tile of queries of T on its way over keys in pages of P, in the memory of a thread.
template <typename T, typename P>
class QueryTile {
  public:
    static constexpr bool PAIRS = PAIRED<T>;
    // Keys are read where they lie.
    static constexpr bool DIRECT = std::is_same_v<T, P> && (sizeof(T) == 4 || PAIRS);
    static constexpr bool SCALED = std::is_same_v<P, code8>;
    using Operand = std::conditional_t<PAIRS, bf16, float>;

    QueryTile(const Attention& job, float* memory)
        : job_(job), dim_(job.head_dim), shared_(job.heads / job.kv_heads) {
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
            float* own = part_.mixed;
            part_.mixed = partial + 2 * QUERIES;
            pass(item.part * PART_KEYS);
            part_.save(partial);
            part_.mixed = own;
            return;
        }
        running_.begin(dim_);
        for (int64_t first = 0; first < most_; first += PART_KEYS) {
            pass(first);
            add_part();
        }
        finish(item);
    }

    // The parts of a tile, each computed before.
    void join(const AttentionItem& item, float* partials) {
        take(item);
        running_.begin(dim_);
        float* own = part_.mixed;
        for (int64_t part = 0; part < item.part; ++part) {
            float* partial = partials + (item.partial + part) * partial_size(dim_);
            part_.read(partial);
            part_.mixed = partial + 2 * QUERIES;
            add_part();
        }
        part_.mixed = own;
        finish(item);
    }

  private:
    void add_part() {
        narrow() ? running_.join<1>(part_, dim_) : running_.join<QUERY_VECS>(part_, dim_);
    }

    bool narrow() const { return rows_ <= LANES; }

    // The queries' values in lanes, and how many keys each of them sees.
    void take(const AttentionItem& item) {
        const int64_t begin = job_.offsets[item.sequence];
        const int64_t all_rows = (job_.offsets[item.sequence + 1] - begin) * shared_;
        first_ = item.tile * QUERIES;
        rows_ = std::min(QUERIES, all_rows - first_);
        blocks_ = job_.tables[item.sequence];
        head_ = item.kv_head;
        keys_ = (const P*)job_.pages.k + head_ * job_.pages.head_stride;
        values_ = (const P*)job_.pages.v + head_ * job_.pages.head_stride;
        std::memset(queries_, 0, words() * QUERIES * sizeof(float));
        float visible[QUERIES] = {};
        for (int64_t r = 0; r < rows_; ++r) {
            const int64_t token = (first_ + r) / shared_, head = (first_ + r) % shared_;
            const T* q = (const T*)job_.q + (begin + token) * job_.q_stride +
                         (item.kv_head * shared_ + head) * job_.q_head;
            put(q, queries_ + r);
            visible[r] = (float)(job_.starts[item.sequence] + token + 1);
        }
        least_ = (int64_t)visible[0];
        most_ = (int64_t)visible[rows_ - 1];
        for (int c = 0; c < QUERY_VECS; ++c) visible_[c] = load(visible + c * LANES);
    }

    int64_t words() const { return PAIRS ? dim_ / 2 : dim_; }

    void put(const T* q, float* lane) const {
        if constexpr (PAIRS)
            for (int64_t w = 0; w < dim_ / 2; ++w) std::memcpy(lane + w * QUERIES, q + 2 * w, 4);
        else
            for (int64_t d = 0; d < dim_; ++d) lane[d * QUERIES] = load_one(q + d);
    }

    // The keys of the part that begins with `first`.
    void pass(int64_t first) {
        part_.begin(dim_);
        const int64_t end = std::min(first + PART_KEYS, most_);
        Places places[2];
        places[0].find(job_.pages, job_.first_key, blocks_, first, most_);
        for (int turn = 0; first < end; first += TILE_KEYS, turn ^= 1) {
            const int64_t next = first + TILE_KEYS;
            if (next < end) places[turn ^ 1].find(job_.pages, job_.first_key, blocks_, next, most_);
            for (int64_t j = 0; j < TILE_KEYS && next < end; ++j) {
                fetch(keys_ + places[turn ^ 1].at[j], dim_);
                fetch(values_ + places[turn ^ 1].at[j], dim_);
            }
            narrow() ? tile<1>(places[turn], first) : tile<QUERY_VECS>(places[turn], first);
        }
    }

    template <int C>
    void tile(const Places& places, int64_t first) {
        const float *keys[TILE_KEYS], *values[TILE_KEYS];
        if constexpr (SCALED) {
            const Pages& pages = job_.pages;
            const int64_t head = head_ * pages.scale_head_stride;
            key_scales_.find(places, pages.k_scales, pages.k_zeros, head);
            value_scales_.find(places, pages.v_scales, pages.v_zeros, head);
        }
        point(places, keys, values);
        for (int64_t j = 0; j < TILE_KEYS; j += ROWS)
            score<PAIRS, C * VLM_PARTS>(keys + j, queries_, words(), scores_ + j * QUERIES);
        if constexpr (SCALED)
            for (int64_t j = 0; j < TILE_KEYS; ++j)
                for (int c = 0; c < C; ++c) {
                    float* at = scores_ + j * QUERIES + c * LANES;
                    store(at, load(at) * key_scales_.scale[j]);
                }
        weigh<C>(first);
        for (int64_t d = 0; d < dim_; d += ROWS)
            mix<PAIRS, C * VLM_PARTS>(values, d, scores_, PAIRS ? TILE_KEYS / 2 : TILE_KEYS,
                                      part_.mixed + d * QUERIES);
    }

    // Where the products find keys and values: in their pages, or expanded; values in pairs of keys
    // where products are.
    void point(const Places& places, const float** keys, const float** values) {
        float *wide = wide_, *wide_values = wide_ + TILE_KEYS * dim_;
        Operand* pair = (Operand*)(wide_values + TILE_KEYS / 2 * dim_);
        for (int64_t j = 0; j < TILE_KEYS; ++j) {
            Operand* own = (Operand*)(wide + j * dim_);
            keys[j] = (const float*)expanded(keys_ + places.at[j], key_scales_.zero + j, own);
            if constexpr (PAIRS) {
                if (j % 2) continue;
                const float* zeros = value_scales_.zero + j;
                zip(expanded(values_ + places.at[j], zeros, pair),
                    expanded(values_ + places.at[j + 1], zeros + 1, pair + dim_),
                    wide_values + j / 2 * dim_);
                values[j / 2] = wide_values + j / 2 * dim_;
            } else {
                float* to = wide_values + j * dim_;
                values[j] = expanded(values_ + places.at[j], value_scales_.zero + j, to);
            }
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

    static void store_exact(float* to, const Vec& values) { store(to, values); }

    // Numbers that bfloat16 has.
    static void store_exact(bf16* to, const Vec& values) {
        use_each(values, [=](int lane, Floats x) {
            const Halves halves = __builtin_convertvector((Words)x >> 16, Halves);
            std::memcpy(to + lane, &halves, sizeof halves);
        });
    }

    void zip(const bf16* even, const bf16* odd, float* to) const {
        typedef uint16_t Whole __attribute__((vector_size(4 * WIDTH)));
        Whole first, second;
        for (int i = 0; i < 2 * WIDTH; ++i) {
            first[i] = i / 2 + i % 2 * 2 * WIDTH;
            second[i] = first[i] + WIDTH;
        }
        int64_t d = 0;
        for (; d + 2 * WIDTH <= dim_; d += 2 * WIDTH) {
            const Whole low = read<Whole>(even + d), high = read<Whole>(odd + d);
            const Whole lower = __builtin_shuffle(low, high, first);
            const Whole upper = __builtin_shuffle(low, high, second);
            std::memcpy(to + d, &lower, sizeof lower);
            std::memcpy(to + d + WIDTH, &upper, sizeof upper);
        }
        for (; d < dim_; ++d) {
            const uint32_t both = even[d].bits | (uint32_t)odd[d].bits << 16;
            std::memcpy(to + d, &both, sizeof both);
        }
    }

    // Scores of a tile into weights; what was mixed before fades as the peak rises.
    template <int C>
    void weigh(int64_t first) {
        const float scale = (float)(job_.scale * 1.4426950408889634);  // 2^x of e^x
        Vec fade[C];
        bool fades = false;
        for (int c = 0; c < C; ++c) {
            float* own = scores_ + c * LANES;
            if (first + TILE_KEYS > least_)
                for (int64_t j = 0; j < TILE_KEYS; ++j) {
                    float* at = own + j * QUERIES;
                    store(at, where_less(all((float)(first + j)), visible_[c], load(at),
                                         all(-INFINITY)));
                }
            Vec most = load(own);
            for (int64_t j = 1; j < TILE_KEYS; ++j) most = larger(load(own + j * QUERIES), most);
            const Vec top = larger(most * scale, part_.peak[c]), base = Running::finite(top);
            Vec total = zero();
            for (int64_t j = 0; j < TILE_KEYS; ++j) {
                const Vec weight = power_of_2(fma(load(own + j * QUERIES), scale, -base));
                total = total + weight;
                keep(own, j, SCALED ? weight * value_scales_.scale[j] : weight);
            }
            fade[c] = power_of_2(part_.peak[c] - base);
            part_.total[c] = fma(part_.total[c], fade[c], total);
            fades |= differs(top, part_.peak[c]);
            part_.peak[c] = top;
        }
        if (!fades) return;
        for (int64_t d = 0; d < dim_; ++d)
            for (int c = 0; c < C; ++c) {
                float* at = part_.mixed + d * QUERIES + c * LANES;
                store(at, load(at) * fade[c]);
            }
    }

    static bool differs(const Vec& a, const Vec& b) { return std::memcmp(&a, &b, sizeof a) != 0; }

    // The weights of a key's values; in pairs, an even key waits in the low half for the odd one.
    static void keep(float* own, int64_t j, const Vec& weight) {
        if constexpr (PAIRS) {
            float* at = own + j / 2 * QUERIES;
            use_each(weight, [=](int lane, Floats x) {
                Words words = rounded_bits(x);
                words = j % 2 ? read<Words>(at + lane) | (words & 0xffff0000u) : words >> 16;
                std::memcpy(at + lane, &words, sizeof words);
            });
        } else {
            store(own + j * QUERIES, weight);
        }
    }

    void finish(const AttentionItem& item) {
        for (int c = 0; c < QUERY_VECS; ++c) {
            float* own = running_.mixed + c * LANES;
            for (int64_t d = 0; d < dim_; ++d)
                store(own + d * QUERIES, load(own + d * QUERIES) / running_.total[c]);
        }
        const int64_t begin = job_.offsets[item.sequence];
        for (int64_t r = 0; r < rows_; ++r) {
            const int64_t token = (first_ + r) / shared_, head = (first_ + r) % shared_;
            T* out = (T*)job_.out +
                     ((begin + token) * job_.heads + item.kv_head * shared_ + head) * dim_;
            for (int64_t d = 0; d < dim_; ++d) store_one(out + d, running_.mixed[d * QUERIES + r]);
        }
    }

    const Attention& job_;
    int64_t dim_, shared_, head_ = 0, first_ = 0, rows_ = 0, least_ = 0, most_ = 0;
    const int32_t* blocks_ = nullptr;
    const P *keys_ = nullptr, *values_ = nullptr;
    Scales key_scales_, value_scales_;
    float *queries_, *scores_, *wide_;
    Vec visible_[QUERY_VECS];
    Running running_, part_;
};

}  // namespace vlm
