// What attention over a tile of keys is made of, whatever the lanes of vectors are.
#pragma once

#include "attention/attention.h"

namespace vlm {

// Where the keys of a tile lie: the last key instead of those from `end` on.
struct Places {
    int64_t at[TILE_KEYS], scale_at[TILE_KEYS];

    void find(const Pages& pages, int64_t first_key, const int32_t* blocks, int64_t first,
              int64_t end) {
        const int32_t* block = blocks + (first_key + first) / pages.block_size;
        int64_t token = (first_key + first) % pages.block_size;
        for (int64_t j = 0; j < TILE_KEYS; ++j) {
            at[j] = *block * pages.block_stride + token * pages.token_stride;
            scale_at[j] = *block * pages.scale_block_stride + token * pages.scale_token_stride;
            if (first + j + 1 < end && ++token == pages.block_size) token = 0, ++block;
        }
    }
};

// Asks for a tile's keys and values while the tile before it is computed: into the second cache,
// since two tiles are more than the first one holds, and a few lines at a time, since processors
// leave requests out that come all at once. (The rows of a head are short pieces, which no
// processor foresees.)
template <typename P>
class Ahead {
  public:
    // Nothing if there is no tile.
    void of(const P* keys, const P* values, const Places* tile, int64_t dim) {
        keys_ = keys, values_ = values, tile_ = tile, dim_ = dim;
    }

    // `ask` will be called that many times, or more often.
    void in(int64_t turns) {
        const int64_t lines = 2 * TILE_KEYS * ((dim_ + LINE - 1) / LINE);
        each_ = tile_ ? (lines + turns - 1) / turns : 0;
        next_ = 0;
        at_ = dim_;
    }

    VLM_INLINE void ask() {
        for (int64_t i = 0; i < each_; ++i, at_ += LINE) {
            if (at_ >= dim_) {
                if (next_ == 2 * TILE_KEYS) return;
                row_ = (next_ < TILE_KEYS ? keys_ : values_) + tile_->at[next_ % TILE_KEYS];
                ++next_, at_ = 0;
            }
            __builtin_prefetch(row_ + at_, 0, L2_CACHE);
        }
    }

  private:
    static constexpr int64_t LINE = 64 / (int64_t)sizeof(P);

    const P *keys_ = nullptr, *values_ = nullptr, *row_ = nullptr;
    const Places* tile_ = nullptr;
    int64_t dim_ = 0, each_ = 0, next_ = 0, at_ = 0;
};

// What scores of keys, and weights of values, are multiplied with, and what comes off their codes.
struct Scales {
    float scale[TILE_KEYS], zero[TILE_KEYS];

    void find(const Places& places, const void* scales, const void* zeros, int64_t head) {
        take(places, (const f16*)scales + head, scale);
        take(places, (const f16*)zeros + head, zero);
    }

  private:
    static void take(const Places& places, const f16* from, float* to) {
        f16 halves[TILE_KEYS];
        for (int64_t j = 0; j < TILE_KEYS; ++j) halves[j] = from[places.scale_at[j]];
        for (int64_t j = 0; j < TILE_KEYS; j += LANES) store(to + j, load(halves + j));
    }
};

// What queries have seen so far; `mixed` is [dim, QUERIES], of few queries [queries, dim].
struct Running {
    Vec peak[QUERY_VECS], total[QUERY_VECS];
    float* mixed;

    void begin(int64_t count) {
        for (int c = 0; c < QUERY_VECS; ++c) peak[c] = all(-INFINITY), total[c] = zero();
        std::memset(mixed, 0, count * sizeof(float));
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

    // Adds what was seen in the next part: `mix(mine, its)` does so for what was mixed.
    template <int C, typename Mix>
    void join(const Running& part, const Mix& mix) {
        Vec mine[C], its[C];
        for (int c = 0; c < C; ++c) {
            const Vec top = larger(part.peak[c], peak[c]), base = finite(top);
            mine[c] = power_of_2(peak[c] - base);
            its[c] = power_of_2(part.peak[c] - base);
            peak[c] = top;
            total[c] = fma(part.total[c], its[c], total[c] * mine[c]);
        }
        mix(mine, its);
    }

    // The peak rises to `top`, and `its` is what a tile adds; `base` is the finite `top`. Returns
    // what becomes of all that was mixed before.
    Vec rise(int c, const Vec& top, const Vec& base, const Vec& its) {
        const Vec fade = power_of_2(peak[c] - base);
        total[c] = fma(total[c], fade, its);
        peak[c] = top;
        return fade;
    }

    // A query that has seen no key has weights of 0, not 2^(inf - inf).
    static Vec finite(const Vec& peak) { return where_less(all(-INFINITY), peak, peak, zero()); }
};

// How values of T meet in products: as float32, or as pairs of bfloat16.
template <typename T>
constexpr bool PAIRED = PAIR_PRODUCTS && sizeof(T) == 2;

// 2 * WIDTH values of two keys, as pairs.
struct Zipped {
    Floats lower, upper;

    VLM_INLINE Zipped(const bf16* even, const bf16* odd) {
        typedef uint16_t Whole __attribute__((vector_size(4 * WIDTH)));
        struct First {
            static constexpr int of(int lane) { return lane / 2 + lane % 2 * 2 * WIDTH; }
        };
        struct Second {
            static constexpr int of(int lane) { return First::of(lane) + WIDTH; }
        };
        const Whole low = read<Whole>(even), high = read<Whole>(odd);
        lower = (Floats)shuffled<First>(low, high);
        upper = (Floats)shuffled<Second>(low, high);
    }
};

}  // namespace vlm
