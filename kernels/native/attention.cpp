// Attention as attention.h describes it.
#include "attention.h"

#include "layout.h"

namespace vlm {

void AttentionPlan::make(const Attention& job) {
    int64_t tiles = 0, parts = 0;
    for (int64_t i = 0; i < job.sequences; ++i) {
        const int64_t own = query_tiles(job, i) * job.kv_heads;
        tiles += own;
        parts += own * ((keys_of(job, i) + PART_KEYS - 1) / PART_KEYS);
    }
    // Parts are shared out only where tiles alone would leave threads without work.
    const bool by_parts = tiles < 4 * job.threads;
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
            const int64_t keys = job.starts[i] + last + 1;
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

namespace {

// Where the keys of a tile lie: the last key instead of those from `end` on.
struct Places {
    int64_t at[TILE_KEYS];

    void find(const Attention& job, const int32_t* blocks, int64_t first, int64_t end) {
        for (int64_t j = 0; j < TILE_KEYS; ++j) {
            const int64_t key = std::min(first + j, end - 1);
            at[j] = blocks[key / job.block_size] * job.kv_block_stride +
                    key % job.block_size * job.kv_token_stride;
        }
    }
};

// What queries have seen so far; `mixed` is [dim, QUERIES].
struct Running {
    Vec peak[QUERY_VECS], total[QUERY_VECS];
    float* mixed;

    void begin(int64_t dim) {
        for (int c = 0; c < QUERY_VECS; ++c) peak[c] = all(-INFINITY), total[c] = zero();
        std::memset(mixed, 0, dim * QUERIES * sizeof(float));
    }

    void save(float* partial) const {
        for (int c = 0; c < QUERY_VECS; ++c) {
            store(partial + c * LANES, peak[c]);
            store(partial + QUERIES + c * LANES, total[c]);
        }
    }

    void read(const float* partial) {
        for (int c = 0; c < QUERY_VECS; ++c) {
            peak[c] = load(partial + c * LANES);
            total[c] = load(partial + QUERIES + c * LANES);
        }
    }

    // Adds what was seen in the next part.
    template <int C>
    void join(const Running& part, int64_t dim) {
        Vec mine[C], its[C];
        for (int c = 0; c < C; ++c) {
            const Vec top = larger(part.peak[c], peak[c]), base = finite(top);
            mine[c] = power_of_2(peak[c] - base);
            its[c] = power_of_2(part.peak[c] - base);
            peak[c] = top;
            total[c] = fma(part.total[c], its[c], total[c] * mine[c]);
        }
        for (int64_t d = 0; d < dim; ++d)
            for (int c = 0; c < C; ++c) {
                float* at = mixed + d * QUERIES + c * LANES;
                store(at,
                      fma(load(part.mixed + d * QUERIES + c * LANES), its[c], load(at) * mine[c]));
            }
    }

    // A query that has seen no key has weights of 0, not 2^(inf - inf).
    static Vec finite(const Vec& peak) { return where_less(all(-INFINITY), peak, peak, zero()); }
};

// How values of T meet in products: as float32, or as pairs of bfloat16.
template <typename T>
constexpr bool PAIRED = PAIR_PRODUCTS && sizeof(T) == 2;

// ROWS keys at a time: enough sums to keep the multipliers busy.
constexpr int ROWS = WIDTH == 16 ? 8 : 4;

template <bool PAIRS>
inline Floats step(const float* value, Floats lanes, Floats total) {
    if constexpr (PAIRS) {
        uint32_t word;
        std::memcpy(&word, value, sizeof word);
        return fused_pairs(word - Words{}, (Words)lanes, total);
    } else {
        return fused(*value - Floats{}, lanes, total);
    }
}

// scores[key][query] = key . query, for ROWS keys of `words` words each.
template <bool PAIRS, int N>
void score(const float* const* keys, const float* queries, int64_t words, float* scores) {
    Floats total[ROWS][N];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) total[r][i] = Floats{};
    const float* key[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) key[r] = keys[r];
    for (int64_t w = 0; w < words; ++w) {
        Floats lanes[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) lanes[i] = read<Floats>(queries + w * QUERIES + i * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i)
                total[r][i] = step<PAIRS>(key[r] + w, lanes[i], total[r][i]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i)
            std::memcpy(scores + r * QUERIES + i * WIDTH, &total[r][i], sizeof total[r][i]);
}

// mixed[dim][query] += sum over keys (or pairs of them) of value[key][dim] * weight[key][query],
// for ROWS dims.
template <bool PAIRS, int N>
void mix(const float* const* values, int64_t first, const float* weights, int64_t steps,
         float* mixed) {
    Floats total[ROWS][N];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) total[r][i] = read<Floats>(mixed + r * QUERIES + i * WIDTH);
    for (int64_t j = 0; j < steps; ++j) {
        const float* value = values[j] + first;
        Floats lanes[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) lanes[i] = read<Floats>(weights + j * QUERIES + i * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) total[r][i] = step<PAIRS>(value + r, lanes[i], total[r][i]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i)
            std::memcpy(mixed + r * QUERIES + i * WIDTH, &total[r][i], sizeof total[r][i]);
}

// Asks for what comes next: keys and values of one head lie in short pieces, which the processor
// does not foresee.
template <typename T>
inline void fetch(const T* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + d, 0, 2);
}

// A tile of queries on its way over the keys, in the memory of a thread.
template <typename T>
class QueryTile {
  public:
    static constexpr bool PAIRS = PAIRED<T>;
    static constexpr bool DIRECT = sizeof(T) == 4 || PAIRS;  // keys are read where they lie

    QueryTile(const Attention& job, float* memory)
        : job_(job), dim_(job.head_dim), shared_(job.heads / job.kv_heads) {
        queries_ = memory;
        scores_ = queries_ + dim_ * QUERIES;
        wide_ = scores_ + TILE_KEYS * QUERIES;
        running_.mixed = wide_ + 2 * TILE_KEYS * dim_;
        part_.mixed = running_.mixed + dim_ * QUERIES;
    }

    static int64_t room(int64_t dim) {
        return 3 * dim * QUERIES + TILE_KEYS * QUERIES + 2 * TILE_KEYS * dim;
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
        blocks_ = job_.blocks + job_.first_block[item.sequence];
        keys_ = (const T*)job_.k + item.kv_head * job_.kv_head_stride;
        values_ = (const T*)job_.v + item.kv_head * job_.kv_head_stride;
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
        places[0].find(job_, blocks_, first, most_);
        for (int turn = 0; first < end; first += TILE_KEYS, turn ^= 1) {
            const int64_t next = first + TILE_KEYS;
            if (next < end) places[turn ^ 1].find(job_, blocks_, next, most_);
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
        point(places, keys, values);
        for (int64_t j = 0; j < TILE_KEYS; j += ROWS)
            score<PAIRS, C * VLM_PARTS>(keys + j, queries_, words(), scores_ + j * QUERIES);
        weigh<C>(first);
        for (int64_t d = 0; d < dim_; d += ROWS)
            mix<PAIRS, C * VLM_PARTS>(values, d, scores_, PAIRS ? TILE_KEYS / 2 : TILE_KEYS,
                                      part_.mixed + d * QUERIES);
    }

    // Where the products find keys and values: in their pages, or widened; values in pairs of keys
    // where products are.
    void point(const Places& places, const float** keys, const float** values) {
        float *wide = wide_, *wide_values = wide_ + TILE_KEYS * dim_;
        for (int64_t j = 0; j < TILE_KEYS; ++j) {
            const T *k = keys_ + places.at[j], *v = values_ + places.at[j];
            if constexpr (DIRECT) {
                keys[j] = (const float*)k;
            } else {
                for (int64_t d = 0; d < dim_; d += LANES) store(wide + j * dim_ + d, load(k + d));
                keys[j] = wide + j * dim_;
            }
            if constexpr (PAIRS) {
                if (j % 2) continue;
                zip(v, values_ + places.at[j + 1], wide_values + j / 2 * dim_);
                values[j / 2] = wide_values + j / 2 * dim_;
            } else if constexpr (DIRECT) {
                values[j] = (const float*)v;
            } else {
                for (int64_t d = 0; d < dim_; d += LANES)
                    store(wide_values + j * dim_ + d, load(v + d));
                values[j] = wide_values + j * dim_;
            }
        }
    }

    void zip(const T* even, const T* odd, float* to) const {
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
                keep(own, j, weight);
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

    // A key's weights; in pairs, an even key waits in the low half for the odd one.
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
    int64_t dim_, shared_, first_ = 0, rows_ = 0, least_ = 0, most_ = 0;
    const int32_t* blocks_ = nullptr;
    const T *keys_ = nullptr, *values_ = nullptr;
    float *queries_, *scores_, *wide_;
    Vec visible_[QUERY_VECS];
    Running running_, part_;
};

}  // namespace

int64_t attention_room(int64_t head_dim) { return QueryTile<float>::room(head_dim); }

Room& own_attention_room() {
    static thread_local Room own;
    return own;
}

template <typename T>
void attend(const Attention& job, AttentionPlan& plan) {
    QueryTile<T> tile(job, own_attention_room().of(attention_room(job.head_dim)));
    float* partials = plan.partials.of(0);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan.count; ++i) tile.run(plan.items[i], partials);
    if (plan.join_count == 0) return;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan.join_count; ++i) tile.join(plan.joins[i], partials);
}

template void attend<float>(const Attention&, AttentionPlan&);
template void attend<bf16>(const Attention&, AttentionPlan&);

template <typename T>
void attend_all(const Attention& job) {
    static thread_local AttentionPlan plan;
    plan.make(job);
    on_all_threads(job.threads, [&] { own_attention_room().of(attention_room(job.head_dim)); });
    AttentionPlan& made = plan;
#pragma omp parallel num_threads((int)job.threads)
    attend<T>(job, made);
}

VLM_STRUCT(Attention, sequences, threads, heads, kv_heads, head_dim, q_stride, q_head, block_size,
           kv_block_stride, kv_token_stride, kv_head_stride, scale, offsets, starts, first_block,
           blocks, q, k, v, out);

}  // namespace vlm

// `bits` is 32 for float32 inputs, 16 for bfloat16. Arguments are checked by the caller. Returns
// what `guarded` does.
extern "C" int64_t vlm_attention(const vlm::Attention* job, int64_t bits) {
    return vlm::guarded(
        [=] { bits == 32 ? vlm::attend_all<float>(*job) : vlm::attend_all<vlm::bf16>(*job); });
}
