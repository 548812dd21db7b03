// What attention over a tile of keys is made of, whatever the lanes of vectors are.
#pragma once

#include "attention.h"

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

}  // namespace vlm
