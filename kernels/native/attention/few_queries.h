// Attention of a tile of few queries, as of a decoded token: keys are the lanes of vectors, and
// then the dims of values, so that no lane is left empty. Every sum is the same chain as in
// many_queries.h.
#pragma once

#include "attention/flash_attention.h"
#include "transpose.h"

namespace vlm {

// scores[query][key] = key . query, for COUNT queries of `words` words each, one after the other.
template <bool PAIRS, int COUNT, typename P>
void score_few(const float* const* keys, const float* queries, int64_t words, float* scores,
               Ahead<P>& ahead) {
    for (int64_t j = 0; j < TILE_KEYS; j += WIDTH) {
        Floats total[COUNT] = {};
        for (int64_t w = 0; w < words; w += WIDTH) {
            Words square[WIDTH];
            ahead.ask();
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i) square[i] = read<Words>(keys[j + i] + w);
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i)
#pragma GCC unroll 8
                for (int r = 0; r < COUNT; ++r)
                    total[r] =
                        fused_at<PAIRS>(queries + r * words + w + i, (Floats)square[i], total[r]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; ++r)
            std::memcpy(scores + r * TILE_KEYS + j, &total[r], sizeof total[r]);
    }
}

// mixed[query][dim] += sum over keys (or pairs of them) of value[key][dim] * weight[query][key].
template <bool PAIRS, int COUNT>
void mix_few(const float* const* values, const float* weights, int64_t dim, float* mixed) {
    constexpr int N = 2, KEYS = PAIRS ? 2 : 1;
    for (int64_t d = 0; d < dim; d += N * WIDTH) {
        Floats total[COUNT][N];
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 2
            for (int i = 0; i < N; ++i) total[r][i] = read<Floats>(mixed + r * dim + d + i * WIDTH);
        for (int64_t j = 0; j < TILE_KEYS / KEYS; ++j) {
            Floats value[N];
            if constexpr (PAIRS) {
                const Zipped both((const bf16*)values[2 * j] + d,
                                  (const bf16*)values[2 * j + 1] + d);
                value[0] = both.lower, value[1] = both.upper;
            } else {
#pragma GCC unroll 2
                for (int i = 0; i < N; ++i) value[i] = read<Floats>(values[j] + d + i * WIDTH);
            }
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 2
                for (int i = 0; i < N; ++i)
                    total[r][i] =
                        fused_at<PAIRS>(weights + r * TILE_KEYS + j, value[i], total[r][i]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 2
            for (int i = 0; i < N; ++i)
                std::memcpy(mixed + r * dim + d + i * WIDTH, &total[r][i], sizeof(Floats));
    }
}

template <typename T, typename P>
class FewQueries : public QueryTile<FewQueries<T, P>, T, P> {
    using Base = QueryTile<FewQueries<T, P>, T, P>;
    using Base::dim_, Base::rows_, Base::least_, Base::visible_, Base::queries_, Base::scores_;
    using Base::part_, Base::running_, Base::words, Base::PAIRS, Base::SCALED, Base::in_tiles_,
        Base::ahead_;
    static constexpr int MOST = 8;

  public:
    using Base::Base;

    // Whether these are few, of whole vectors.
    bool takes(const AttentionItem& item) const {
        return Base::rows_of(item) <= MOST && dim_ % (2 * WIDTH) == 0;
    }

    int64_t count() const { return dim_ * MOST; }
    bool zipped() const { return in_tiles_; }
    int64_t tile_rows() const { return rows_ <= MOST / 2 ? MOST / 2 : MOST; }

    void clear() { std::memset(queries_, 0, words() * MOST * sizeof(float)); }

    void put(const T* q, int64_t r) {
        float* to = queries_ + r * words();
        if constexpr (PAIRS)
            std::memcpy(to, q, dim_ * sizeof(T));
        else
            for (int64_t d = 0; d < dim_; d += LANES) store(to + d, load(q + d));
    }

    void score(const float* const* keys) {
        ahead_.in(TILE_KEYS / WIDTH * words() / WIDTH);
        if (in_tiles_)
            score_few_tiles(keys, queries_, dim_, scores_, ahead_);
        else
            by_count([&](auto count) {
                score_few<PAIRS, count>(keys, queries_, words(), scores_, ahead_);
            });
        for (int64_t j = 0; j < rows_ * TILE_KEYS && SCALED; j += LANES)
            store(scores_ + j, load(scores_ + j) * load(Base::key_scales_.scale + j % TILE_KEYS));
    }

    void weigh(int64_t first) {
        const float scale = Base::base_2_scale();
        float most[LANES], totals[LANES] = {}, weights[MOST][TILE_KEYS];
        store(most, all(-INFINITY));
        for (int64_t r = 0; r < rows_; ++r) {
            float* own = scores_ + r * TILE_KEYS;
            if (first + TILE_KEYS > least_) hide(own, visible_[r] - (float)first);
            Vec highest = load(own);
            for (int64_t j = LANES; j < TILE_KEYS; j += LANES)
                highest = larger(load(own + j), highest);
            most[r] = largest(highest);
        }
        const Vec top = larger(load(most) * scale, part_.peak[0]), base = Running::finite(top);
        float bases[LANES], fades[LANES];
        store(bases, base);
        for (int64_t r = 0; r < rows_; ++r) {
            float* own = scores_ + r * TILE_KEYS;
            for (int64_t j = 0; j < TILE_KEYS; j += LANES) {
                const Vec weight = power_of_2(fma(load(own + j), scale, all(-bases[r])));
                store(weights[r] + j, weight);
                const Vec kept = SCALED ? weight * load(Base::value_scales_.scale + j) : weight;
                store((typename Base::Operand*)own + j, kept);
            }
        }
        by_count([&](auto count) { add_up<count>(weights, totals); });
        store(fades, part_.rise(0, top, base, load(totals)));
        for (int64_t r = 0; r < rows_; ++r)
            if (fades[r] != 1.0f) times(part_.mixed + r * dim_, fades[r]);
    }

    void mix(const float* const* values) {
        if (in_tiles_) return mix_few_tiles(values[0], scores_, dim_, part_.mixed);
        by_count([&](auto count) { mix_few<PAIRS, count>(values, scores_, dim_, part_.mixed); });
    }

    void add_part() {
        running_.template join<1>(part_, [&](const Vec* mine, const Vec* its) {
            float own[LANES], others[LANES];
            store(own, *mine), store(others, *its);
            for (int64_t r = 0; r < rows_; ++r) {
                float* to = running_.mixed + r * dim_;
                const float* from = part_.mixed + r * dim_;
                for (int64_t d = 0; d < dim_; d += LANES)
                    store(to + d, fma(load(from + d), others[r], load(to + d) * own[r]));
            }
        });
    }

    void divide() {
        float totals[LANES];
        store(totals, running_.total[0]);
        for (int64_t r = 0; r < rows_; ++r) {
            float* own = running_.mixed + r * dim_;
            for (int64_t d = 0; d < dim_; d += LANES)
                store(own + d, load(own + d) / all(totals[r]));
        }
    }

    void get(int64_t r, T* out) const {
        for (int64_t d = 0; d < dim_; d += LANES)
            store(out + d, load(running_.mixed + r * dim_ + d));
    }

  private:
    // `work` with a number of queries as a constant, those that are missing among them.
    template <typename Work>
    void by_count(const Work& work) const {
        if (rows_ <= MOST / 2)
            work(std::integral_constant<int, MOST / 2>());
        else
            work(std::integral_constant<int, MOST>());
    }

    // Scores of a tile's keys from the one of that number on become -infinity.
    static void hide(float* scores, float visible) {
        float numbers[LANES];
        for (int i = 0; i < LANES; ++i) numbers[i] = (float)i;
        for (int64_t j = 0; j < TILE_KEYS; j += LANES)
            store(scores + j, where_less(load(numbers) + all((float)j), all(visible),
                                         load(scores + j), all(-INFINITY)));
    }

    // The sums of a tile's weights, key by key.
    template <int COUNT>
    static void add_up(const float (*weights)[TILE_KEYS], float* totals) {
        float total[COUNT] = {};
        for (int64_t j = 0; j < TILE_KEYS; ++j)
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; ++r) total[r] += weights[r][j];
        std::memcpy(totals, total, sizeof total);
    }

    void times(float* row, float factor) const {
        for (int64_t d = 0; d < dim_; d += LANES) store(row + d, load(row + d) * factor);
    }
};

}  // namespace vlm
