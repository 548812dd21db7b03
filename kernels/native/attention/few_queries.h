// Attention of a tile of few queries, such as a decoded token. The lanes of vectors are keys first,
// and then dims of values, so that no lane is idle. Every sum is the same chain as in
// many_queries.h.
#pragma once

#include "attention/flash_attention.h"
#include "transpose.h"

namespace vlm {

// scores[query][key] = key . query, for COUNT contiguous queries of `words` words each.
template <bool PAIRS, int COUNT, typename P>
void score_few(const float* const* keys, const float* queries, int64_t words, float* scores,
               KeyPrefetcher<P>& prefetcher) {
    for (int64_t j = 0; j < TILE_KEYS; j += WIDTH) {
        Floats acc[COUNT] = {};
        for (int64_t w = 0; w < words; w += WIDTH) {
            Words square[WIDTH];
            prefetcher.step();
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i) square[i] = read<Words>(keys[j + i] + w);
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i)
#pragma GCC unroll 8
                for (int r = 0; r < COUNT; ++r)
                    acc[r] = fma_broadcast<PAIRS>(queries + r * words + w + i, (Floats)square[i],
                                                  acc[r]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; ++r)
            std::memcpy(scores + r * TILE_KEYS + j, &acc[r], sizeof acc[r]);
    }
}

// output[query][dim] += sum over keys (or pairs of them) of value[key][dim] * weight[query][key].
template <bool PAIRS, int COUNT>
void add_values_few(const float* const* values, const float* weights, int64_t dim, float* output) {
    constexpr int N = 2, KEYS = PAIRS ? 2 : 1;
    for (int64_t d = 0; d < dim; d += N * WIDTH) {
        Floats acc[COUNT][N];
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 2
            for (int i = 0; i < N; ++i) acc[r][i] = read<Floats>(output + r * dim + d + i * WIDTH);
        for (int64_t j = 0; j < TILE_KEYS / KEYS; ++j) {
            Floats value[N];
            if constexpr (PAIRS) {
                const Interleaved both((const bf16*)values[2 * j] + d,
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
                    acc[r][i] =
                        fma_broadcast<PAIRS>(weights + r * TILE_KEYS + j, value[i], acc[r][i]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 2
            for (int i = 0; i < N; ++i)
                std::memcpy(output + r * dim + d + i * WIDTH, &acc[r][i], sizeof(Floats));
    }
}

template <typename T, typename P>
class FewQueries : public FlashAttention<FewQueries<T, P>, T, P> {
    using Base = FlashAttention<FewQueries<T, P>, T, P>;
    using Base::dim_, Base::rows_, Base::min_visible_, Base::visible_, Base::queries_,
        Base::scores_;
    using Base::part_, Base::running_, Base::words, Base::PAIRS, Base::SCALED, Base::in_tiles_,
        Base::prefetcher_;
    static constexpr int MAX_QUERIES = 8;

  public:
    using Base::Base;

    // Tells whether an item has few queries, of whole vectors.
    bool takes(const AttentionItem& item) const {
        return Base::rows_of(item) <= MAX_QUERIES && dim_ % (2 * WIDTH) == 0;
    }

    int64_t count() const { return dim_ * MAX_QUERIES; }
    bool interleaved() const { return in_tiles_; }
    int64_t tile_rows() const { return rows_ <= MAX_QUERIES / 2 ? MAX_QUERIES / 2 : MAX_QUERIES; }

    void clear() { std::memset(queries_, 0, words() * MAX_QUERIES * sizeof(float)); }

    void set_query(const T* q, int64_t r) {
        float* to = queries_ + r * words();
        if constexpr (PAIRS)
            std::memcpy(to, q, dim_ * sizeof(T));
        else
            for (int64_t d = 0; d < dim_; d += LANES) store(to + d, load(q + d));
    }

    void score(const float* const* keys) {
        prefetcher_.spread_over(TILE_KEYS / WIDTH * words() / WIDTH);
        if (in_tiles_)
            score_few_amx(keys, queries_, dim_, scores_, prefetcher_);
        else
            dispatch_count([&](auto count) {
                score_few<PAIRS, count>(keys, queries_, words(), scores_, prefetcher_);
            });
        for (int64_t j = 0; j < rows_ * TILE_KEYS && SCALED; j += LANES)
            store(scores_ + j, load(scores_ + j) * load(Base::key_scales_.scale + j % TILE_KEYS));
    }

    void softmax(int64_t first) {
        const float scale = Base::base_2_scale();
        float most[LANES], totals[LANES] = {}, weights[MAX_QUERIES][TILE_KEYS];
        store(most, all(-INFINITY));
        for (int64_t r = 0; r < rows_; ++r) {
            float* own = scores_ + r * TILE_KEYS;
            if (first + TILE_KEYS > min_visible_) mask(own, visible_[r] - (float)first);
            Vec highest = load(own);
            for (int64_t j = LANES; j < TILE_KEYS; j += LANES)
                highest = maximum(load(own + j), highest);
            most[r] = reduce_max(highest);
        }
        const Vec top = maximum(load(most) * scale, part_.max_score[0]),
                  base = OnlineSoftmax::finite(top);
        float bases[LANES], rescales[LANES];
        store(bases, base);
        for (int64_t r = 0; r < rows_; ++r) {
            float* own = scores_ + r * TILE_KEYS;
            for (int64_t j = 0; j < TILE_KEYS; j += LANES) {
                const Vec weight = exp2_nonpositive(fma(load(own + j), scale, all(-bases[r])));
                store(weights[r] + j, weight);
                const Vec kept = SCALED ? weight * load(Base::value_scales_.scale + j) : weight;
                store((typename Base::Operand*)own + j, kept);
            }
        }
        dispatch_count([&](auto count) { sum_weights<count>(weights, totals); });
        store(rescales, part_.update(0, top, base, load(totals)));
        for (int64_t r = 0; r < rows_; ++r)
            if (rescales[r] != 1.0f) scale_row(part_.output + r * dim_, rescales[r]);
    }

    void add_values(const float* const* values) {
        if (in_tiles_) return add_values_few_amx(values[0], scores_, dim_, part_.output);
        dispatch_count(
            [&](auto count) { add_values_few<PAIRS, count>(values, scores_, dim_, part_.output); });
    }

    void merge_part() {
        running_.template merge<1>(part_, [&](const Vec* mine, const Vec* its) {
            float own[LANES], others[LANES];
            store(own, *mine), store(others, *its);
            for (int64_t r = 0; r < rows_; ++r) {
                float* to = running_.output + r * dim_;
                const float* from = part_.output + r * dim_;
                for (int64_t d = 0; d < dim_; d += LANES)
                    store(to + d, fma(load(from + d), others[r], load(to + d) * own[r]));
            }
        });
    }

    void normalise() {
        float totals[LANES];
        store(totals, running_.weight_sum[0]);
        for (int64_t r = 0; r < rows_; ++r) {
            float* own = running_.output + r * dim_;
            for (int64_t d = 0; d < dim_; d += LANES)
                store(own + d, load(own + d) / all(totals[r]));
        }
    }

    void get_result(int64_t r, T* out) const {
        for (int64_t d = 0; d < dim_; d += LANES)
            store(out + d, load(running_.output + r * dim_ + d));
    }

  private:
    // Calls `work` with the number of queries rounded up to a compile-time constant.
    template <typename Work>
    void dispatch_count(const Work& work) const {
        if (rows_ <= MAX_QUERIES / 2)
            work(std::integral_constant<int, MAX_QUERIES / 2>());
        else
            work(std::integral_constant<int, MAX_QUERIES>());
    }

    // Sets the scores of a tile's keys from number `visible` on to -infinity.
    static void mask(float* scores, float visible) {
        float numbers[LANES];
        for (int i = 0; i < LANES; ++i) numbers[i] = (float)i;
        for (int64_t j = 0; j < TILE_KEYS; j += LANES)
            store(scores + j, where_less(load(numbers) + all((float)j), all(visible),
                                         load(scores + j), all(-INFINITY)));
    }

    // Sums a tile's weights in the order of keys.
    template <int COUNT>
    static void sum_weights(const float (*weights)[TILE_KEYS], float* totals) {
        float acc[COUNT] = {};
        for (int64_t j = 0; j < TILE_KEYS; ++j)
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; ++r) acc[r] += weights[r][j];
        std::memcpy(totals, acc, sizeof acc);
    }

    void scale_row(float* row, float factor) const {
        for (int64_t d = 0; d < dim_; d += LANES) store(row + d, load(row + d) * factor);
    }
};

}  // namespace vlm
