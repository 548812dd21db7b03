// Attention of a tile of many queries: these are the lanes of vectors.
#pragma once

#include "attention/flash_attention.h"

namespace vlm {

// ROWS keys at a time: enough sums to keep the multipliers busy.
constexpr int ROWS = WIDTH == 16 ? 8 : 4;

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
                total[r][i] = fused_at<PAIRS>(key[r] + w, lanes[i], total[r][i]);
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
            for (int i = 0; i < N; ++i)
                total[r][i] = fused_at<PAIRS>(value + r, lanes[i], total[r][i]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i)
            std::memcpy(mixed + r * QUERIES + i * WIDTH, &total[r][i], sizeof total[r][i]);
}

template <typename T, typename P>
class ManyQueries : public QueryTile<ManyQueries<T, P>, T, P> {
    using Base = QueryTile<ManyQueries<T, P>, T, P>;
    using Base::ahead_, Base::in_tiles_, Base::wide_;
    using Base::dim_, Base::rows_, Base::least_, Base::visible_, Base::queries_, Base::scores_;
    using Base::part_, Base::running_, Base::words, Base::PAIRS, Base::SCALED;

  public:
    using Base::Base;

    int64_t count() const { return dim_ * QUERIES; }
    int64_t tile_rows() const { return TILE_ROWS; }
    bool zipped() const { return PAIRS; }

    void clear() { std::memset(queries_, 0, words() * QUERIES * sizeof(float)); }

    void put(const T* q, int64_t r) {
        float* lane = queries_ + r;
        if constexpr (PAIRS)
            for (int64_t w = 0; w < dim_ / 2; ++w) std::memcpy(lane + w * QUERIES, q + 2 * w, 4);
        else
            for (int64_t d = 0; d < dim_; ++d) lane[d * QUERIES] = load_one(q + d);
    }

    void score(const float* const* keys) {
        ahead_.in(TILE_KEYS / (in_tiles_ ? TILE_ROWS : ROWS));
        by_width([&](auto vecs) {
            if (in_tiles_) score_tiles<vecs>(keys, queries_, dim_, (char*)wide_, scores_, ahead_);
            for (int64_t j = 0; j < TILE_KEYS && !in_tiles_; j += ROWS) {
                ahead_.ask();
                vlm::score<PAIRS, vecs * VLM_PARTS>(keys + j, queries_, words(),
                                                    scores_ + j * QUERIES);
            }
            for (int64_t j = 0; j < TILE_KEYS && SCALED; ++j)
                for (int c = 0; c < vecs; ++c) {
                    float* at = scores_ + j * QUERIES + c * LANES;
                    store(at, load(at) * Base::key_scales_.scale[j]);
                }
        });
    }

    // Scores of a tile into weights; what was mixed before fades as the peak rises.
    void weigh(int64_t first) {
        by_width([&](auto vecs) { weigh<vecs>(first); });
    }

    void mix(const float* const* values) {
        by_width([&](auto vecs) {
            if (in_tiles_)
                return mix_tiles<vecs>(values[0], scores_, dim_, Base::more_values(), part_.mixed);
            for (int64_t d = 0; d < dim_; d += ROWS)
                vlm::mix<PAIRS, vecs * VLM_PARTS>(values, d, scores_,
                                                  PAIRS ? TILE_KEYS / 2 : TILE_KEYS,
                                                  part_.mixed + d * QUERIES);
        });
    }

    void add_part() {
        by_width([&](auto vecs) {
            running_.template join<vecs>(part_, [&](const Vec* mine, const Vec* its) {
                each_sum<vecs>([&](int64_t at, int c) {
                    float* own = running_.mixed + at;
                    store(own, fma(load(part_.mixed + at), its[c], load(own) * mine[c]));
                });
            });
        });
    }

    void divide() {
        by_width([&](auto vecs) {
            each_sum<vecs>([&](int64_t at, int c) {
                float* own = running_.mixed + at;
                store(own, load(own) / running_.total[c]);
            });
        });
    }

    void get(int64_t r, T* out) const {
        for (int64_t d = 0; d < dim_; ++d) store_one(out + d, running_.mixed[d * QUERIES + r]);
    }

  private:
    // `work` with the number of vectors that the queries take, as a constant.
    template <typename Work>
    void by_width(const Work& work) {
        if (rows_ <= LANES)
            work(std::integral_constant<int, 1>());
        else
            work(std::integral_constant<int, QUERY_VECS>());
    }

    template <int C, typename Do>
    void each_sum(const Do& what) const {
        for (int64_t d = 0; d < dim_; ++d)
            for (int c = 0; c < C; ++c) what(d * QUERIES + c * LANES, c);
    }

    template <int C>
    void weigh(int64_t first) {
        const float scale = Base::base_2_scale();
        Vec fade[C];
        bool fades = false;
        for (int c = 0; c < C; ++c) {
            float* own = scores_ + c * LANES;
            const Vec visible = load(visible_ + c * LANES);
            if (first + TILE_KEYS > least_)
                for (int64_t j = 0; j < TILE_KEYS; ++j) {
                    float* at = own + j * QUERIES;
                    store(at,
                          where_less(all((float)(first + j)), visible, load(at), all(-INFINITY)));
                }
            Vec most = load(own);
            for (int64_t j = 1; j < TILE_KEYS; ++j) most = larger(load(own + j * QUERIES), most);
            const Vec top = larger(most * scale, part_.peak[c]), base = Running::finite(top);
            Vec total = zero();
            for (int64_t j = 0; j < TILE_KEYS; ++j) {
                const Vec weight = power_of_2(fma(load(own + j * QUERIES), scale, -base));
                total = total + weight;
                keep(own, j, SCALED ? weight * Base::value_scales_.scale[j] : weight);
            }
            fades |= std::memcmp(&top, &part_.peak[c], sizeof top) != 0;
            fade[c] = part_.rise(c, top, base, total);
        }
        if (fades)
            each_sum<C>([&](int64_t at, int c) {
                store(part_.mixed + at, load(part_.mixed + at) * fade[c]);
            });
    }

    // The weights of a key's values; in pairs, an even key waits in the low half for the odd one.
    static void keep(float* own, int64_t j, const Vec& weight) {
        if constexpr (PAIRS) {
            float* at = own + j / 2 * QUERIES;
            use_each(
                [=](int lane, Floats x) {
                    Words words = rounded_bits(x);
                    words = j % 2 ? read<Words>(at + lane) | (words & 0xffff0000u) : words >> 16;
                    std::memcpy(at + lane, &words, sizeof words);
                },
                weight);
        } else {
            store(own + j * QUERIES, weight);
        }
    }
};

}  // namespace vlm
