// What happens to a tile of keys: scores, the running softmax, and the mix of values. Queries are
// the lanes of vectors.
#pragma once

#include "attention.h"

namespace vlm {

// Where the keys of a tile lie: the last key instead of those from `end` on.
struct Places {
    int64_t at[TILE_KEYS], scale_at[TILE_KEYS];

    void find(const Pages& pages, int64_t first_key, const int32_t* blocks, int64_t first,
              int64_t end) {
        for (int64_t j = 0; j < TILE_KEYS; ++j) {
            const int64_t key = first_key + std::min(first + j, end - 1);
            const int64_t block = blocks[key / pages.block_size], token = key % pages.block_size;
            at[j] = block * pages.block_stride + token * pages.token_stride;
            scale_at[j] = block * pages.scale_block_stride + token * pages.scale_token_stride;
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

}  // namespace vlm
