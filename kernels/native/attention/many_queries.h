// Attention of a tile of many queries, which are the lanes of vectors.
#pragma once

#include "attention/flash_attention.h"

namespace vlm {

// Register blocking: keys (or dims) at a time, enough accumulators to keep the multipliers busy.
constexpr int KERNEL_ROWS = WIDTH == 16 ? 8 : 4;

// scores[key][query] = key . query, for KERNEL_ROWS keys of `words` words each.
template <bool PAIRS, int N>
void score(const float* const* keys, const float* queries, int64_t words, float* scores) {
    Floats acc[KERNEL_ROWS][N];
#pragma GCC unroll 8
    for (int r = 0; r < KERNEL_ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) acc[r][i] = Floats{};
    const float* key[KERNEL_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < KERNEL_ROWS; ++r) key[r] = keys[r];
    for (int64_t w = 0; w < words; ++w) {
        Floats lanes[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) lanes[i] = read<Floats>(queries + w * QUERIES + i * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < KERNEL_ROWS; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i)
                acc[r][i] = fma_broadcast<PAIRS>(key[r] + w, lanes[i], acc[r][i]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < KERNEL_ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i)
            std::memcpy(scores + r * QUERIES + i * WIDTH, &acc[r][i], sizeof acc[r][i]);
}

// output[dim][query] += sum over keys (or pairs of them) of value[key][dim] * weight[key][query],
// for KERNEL_ROWS dims.
template <bool PAIRS, int N>
void add_values(const float* const* values, int64_t first, const float* weights, int64_t steps,
                float* output) {
    Floats acc[KERNEL_ROWS][N];
#pragma GCC unroll 8
    for (int r = 0; r < KERNEL_ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) acc[r][i] = read<Floats>(output + r * QUERIES + i * WIDTH);
    for (int64_t j = 0; j < steps; ++j) {
        const float* value = values[j] + first;
        Floats lanes[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) lanes[i] = read<Floats>(weights + j * QUERIES + i * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < KERNEL_ROWS; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i)
                acc[r][i] = fma_broadcast<PAIRS>(value + r, lanes[i], acc[r][i]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < KERNEL_ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i)
            std::memcpy(output + r * QUERIES + i * WIDTH, &acc[r][i], sizeof acc[r][i]);
}

template <typename T, typename P>
class ManyQueries : public FlashAttention<ManyQueries<T, P>, T, P> {
    using Base = FlashAttention<ManyQueries<T, P>, T, P>;
    using Base::dim_, Base::rows_, Base::min_visible_, Base::visible_, Base::queries_,
        Base::scores_;
    using Base::part_, Base::running_, Base::words, Base::PAIRS, Base::SCALED;
    using Base::prefetcher_, Base::in_tiles_, Base::operands_;

  public:
    using Base::Base;

    int64_t count() const { return dim_ * QUERIES; }
    int64_t tile_rows() const { return TILE_ROWS; }
    bool interleaved() const { return PAIRS; }

    void clear() { std::memset(queries_, 0, words() * QUERIES * sizeof(float)); }

    void set_query(const T* q, int64_t r) {
        float* lane = queries_ + r;
        if constexpr (PAIRS)
            for (int64_t w = 0; w < dim_ / 2; ++w) std::memcpy(lane + w * QUERIES, q + 2 * w, 4);
        else
            for (int64_t d = 0; d < dim_; ++d) lane[d * QUERIES] = load_one(q + d);
    }

    void score(const float* const* keys) {
        prefetcher_.spread_over(TILE_KEYS / (in_tiles_ ? TILE_ROWS : KERNEL_ROWS));
        dispatch_width([&](auto vecs) {
            if (in_tiles_)
                score_amx<vecs>(keys, queries_, dim_, (char*)operands_, scores_, prefetcher_);
            for (int64_t j = 0; j < TILE_KEYS && !in_tiles_; j += KERNEL_ROWS) {
                prefetcher_.step();
                vlm::score<PAIRS, vecs * VLM_REGISTERS_PER_VEC>(keys + j, queries_, words(),
                                                                scores_ + j * QUERIES);
            }
            for (int64_t j = 0; j < TILE_KEYS && SCALED; ++j)
                for (int c = 0; c < vecs; ++c) {
                    float* at = scores_ + j * QUERIES + c * LANES;
                    store(at, load(at) * Base::key_scales_.scale[j]);
                }
        });
    }

    // Turns the scores of a tile into weights, and rescales the output where the maximum rises.
    void softmax(int64_t first) {
        dispatch_width([&](auto vecs) { softmax<vecs>(first); });
    }

    void add_values(const float* const* values) {
        dispatch_width([&](auto vecs) {
            if (in_tiles_)
                return add_values_amx<vecs>(values[0], scores_, dim_, Base::pair_scratch(),
                                            part_.output);
            for (int64_t d = 0; d < dim_; d += KERNEL_ROWS)
                vlm::add_values<PAIRS, vecs * VLM_REGISTERS_PER_VEC>(
                    values, d, scores_, PAIRS ? TILE_KEYS / 2 : TILE_KEYS,
                    part_.output + d * QUERIES);
        });
    }

    void merge_part() {
        dispatch_width([&](auto vecs) {
            running_.template merge<vecs>(part_, [&](const Vec* mine, const Vec* its) {
                for_each_output<vecs>([&](int64_t at, int c) {
                    float* own = running_.output + at;
                    store(own, fma(load(part_.output + at), its[c], load(own) * mine[c]));
                });
            });
        });
    }

    void normalise() {
        dispatch_width([&](auto vecs) {
            for_each_output<vecs>([&](int64_t at, int c) {
                float* own = running_.output + at;
                store(own, load(own) / running_.weight_sum[c]);
            });
        });
    }

    void get_result(int64_t r, T* out) const {
        for (int64_t d = 0; d < dim_; ++d) store_one(out + d, running_.output[d * QUERIES + r]);
    }

  private:
    // Calls `work` with the number of vectors of queries as a compile-time constant.
    template <typename Work>
    void dispatch_width(const Work& work) {
        if (rows_ <= LANES)
            work(std::integral_constant<int, 1>());
        else
            work(std::integral_constant<int, QUERY_VECS>());
    }

    template <int C, typename Do>
    void for_each_output(const Do& what) const {
        for (int64_t d = 0; d < dim_; ++d)
            for (int c = 0; c < C; ++c) what(d * QUERIES + c * LANES, c);
    }

    template <int C>
    void softmax(int64_t first) {
        const float scale = Base::base_2_scale();
        Vec rescale[C];
        bool rescales = false;
        for (int c = 0; c < C; ++c) {
            float* own = scores_ + c * LANES;
            const Vec visible = load(visible_ + c * LANES);
            if (first + TILE_KEYS > min_visible_)
                for (int64_t j = 0; j < TILE_KEYS; ++j) {
                    float* at = own + j * QUERIES;
                    store(at,
                          where_less(all((float)(first + j)), visible, load(at), all(-INFINITY)));
                }
            Vec most = load(own);
            for (int64_t j = 1; j < TILE_KEYS; ++j) most = maximum(load(own + j * QUERIES), most);
            const Vec top = maximum(most * scale, part_.max_score[c]),
                      base = OnlineSoftmax::finite(top);
            Vec acc = zero();
            for (int64_t j = 0; j < TILE_KEYS; ++j) {
                const Vec weight = exp2_nonpositive(fma(load(own + j * QUERIES), scale, -base));
                acc = acc + weight;
                store_weight(own, j, SCALED ? weight * Base::value_scales_.scale[j] : weight);
            }
            rescales |= std::memcmp(&top, &part_.max_score[c], sizeof top) != 0;
            rescale[c] = part_.update(c, top, base, acc);
        }
        if (rescales)
            for_each_output<C>([&](int64_t at, int c) {
                store(part_.output + at, load(part_.output + at) * rescale[c]);
            });
    }

    // Stores the weights of a key's values. With pairs, an even key is kept in the low half until
    // the odd one follows.
    static void store_weight(float* own, int64_t j, const Vec& weight) {
        if constexpr (PAIRS) {
            float* at = own + j / 2 * QUERIES;
            for_each_register(
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
