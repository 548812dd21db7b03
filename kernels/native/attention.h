// Attention of a few queries over paged keys and values: norm and rotation of queries and keys, the
// write of keys and values into their pages, and softmax over parts of the keys that are merged.
// See kernels/rope.py and kernels/paged_attention.py for the mathematics.
#pragma once

#include "program.h"

namespace vlm {

constexpr int64_t TILE_KEYS = 64;    // keys whose scores are made at a time
constexpr int64_t LEAST_PART = 256;  // keys of a part; long sequences have up to MOST_PARTS larger
constexpr int64_t MOST_PARTS = 64;

// The size of a part is a matter of the sequence's length alone, and so are a query's bits.
inline int64_t part_size(int64_t keys) {
    int64_t even = (keys + MOST_PARTS - 1) / MOST_PARTS;
    int64_t size = even > LEAST_PART ? even : LEAST_PART;
    return (size + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS;
}

inline int64_t parts_of(int64_t keys) { return (keys + part_size(keys) - 1) / part_size(keys); }

// Cosine and sine of one token's angles; `positions` are those of the three axes, `stride` apart.
inline void rotations(const int64_t* positions, int64_t stride, const float* inv_freq,
                      const int32_t* axis, int64_t half, float* cos, float* sin) {
    for (int64_t i = 0; i < half; ++i) {
        const float angle = (float)positions[axis[i] * stride] * inv_freq[i];
        cos[i] = std::cos(angle);
        sin[i] = std::sin(angle);
    }
}

// Zero-centred norm over one head, then the rotation of its first 2 * half dims, in place.
inline void norm_and_rotate(float* x, const float* factors, const float* cos, const float* sin,
                            int64_t dim, int64_t half, float eps) {
    const float scale = inverse_rms(x, dim, eps);
    for (int64_t d = 0; d < dim; d += LANES) store(x + d, load(x + d) * scale * load(factors + d));
    for (int64_t i = 0; i < half; ++i) {
        const float low = x[i], high = x[i + half];
        x[i] = low * cos[i] - high * sin[i];
        x[i + half] = high * cos[i] + low * sin[i];
    }
}

template <typename T>
struct Pages {
    const T *k, *v;  // of one layer
    const int32_t* blocks;
    int64_t block_size, block_stride, token_stride;

    // Where the next TILE_KEYS positions lie, the last one instead of those from `end` on.
    void find(int64_t position, int64_t end, int64_t* places) const {
        for (int64_t j = 0; j < TILE_KEYS; ++j) {
            const int64_t at = position + j < end ? position + j : end - 1;
            places[j] = blocks[at / block_size] * block_stride + at % block_size * token_stride;
        }
    }
};

// Softmax so far of one query: the largest score and the sum of weights.
struct Partial {
    float largest, total;
};

constexpr int ROWS = 4;  // queries that share a pass over keys and values
constexpr int64_t MOST_DIM = 256;

// Lane 4 j + r holds q[r] . k[j], for four queries and four keys.
inline Vec dots(const float* const* q, const float* const* k, int64_t dim) {
    Vec total[LANES] = {};
    for (int64_t d = 0; d < dim; d += LANES)
        for (int j = 0; j < 4; ++j) {
            Vec key = load(k[j] + d);
            for (int r = 0; r < ROWS; ++r) total[4 * j + r] += key * load(q[r] + d);
        }
    return sums(total);
}

inline Vec dots(const bf16* const* q, const bf16* const* k, int64_t dim) {
    Vec total[LANES] = {};
    int64_t d = 0;
#if defined(__AVX512BF16__)
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
        for (int j = 0; j < 4; ++j) {
            __m512bh key = (__m512bh)_mm512_loadu_si512((const void*)(k[j] + d));
            for (int r = 0; r < ROWS; ++r) {
                __m512bh query = (__m512bh)_mm512_loadu_si512((const void*)(q[r] + d));
                total[4 * j + r] = (Vec)_mm512_dpbf16_ps((__m512)total[4 * j + r], key, query);
            }
        }
#endif
    for (; d < dim; d += LANES)
        for (int j = 0; j < 4; ++j) {
            Vec key = load(k[j] + d);
            for (int r = 0; r < ROWS; ++r) total[4 * j + r] += key * load(q[r] + d);
        }
    return sums(total);
}

// mixed[r][d:] += sum over keys of weights[key][r] * value[key][d:], WIDTH vectors of d.
template <int WIDTH, typename T>
inline void mix(const T* values, const int64_t* places, int64_t count, const float* weights,
                float* const* mixed, int64_t d) {
    Vec total[ROWS][WIDTH];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < WIDTH; ++v) total[r][v] = load(mixed[r] + d + v * LANES);
    for (int64_t j = 0; j < count; ++j) {
        Vec value[WIDTH];
        for (int v = 0; v < WIDTH; ++v) value[v] = load(values + places[j] + d + v * LANES);
        for (int r = 0; r < ROWS; ++r) {
            Vec weight = all(weights[ROWS * j + r]);
            for (int v = 0; v < WIDTH; ++v) total[r][v] += weight * value[v];
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < WIDTH; ++v) store(mixed[r] + d + v * LANES, total[r][v]);
}

// Keys and values of one head lie in short pieces, which the processor does not foresee.
template <typename T>
inline void fetch(const T* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + d, 0, 2);
}

// What four queries have seen so far. A row's values are in its lane and in those 4, 8 and 12
// further.
struct Seen {
    Vec largest, total;
};

// Up to four queries of one head; row r sees keys before visible[r].
template <typename T>
struct Group {
    const T *q[ROWS], *k, *v;
    float* mixed[ROWS];
    int64_t visible[ROWS], dim;
    float scale;

    // Takes in keys first .. first + count - 1, which lie at `places`; those of `next` come next.
    void add(Seen& seen, const int64_t* places, const int64_t* next, int64_t first, int64_t count,
             bool ahead) const {
        float scores[ROWS * TILE_KEYS];
        for (int64_t j = 0; j < count; j += 4) {
            const T* keys[4];
            for (int64_t i = 0; i < 4; ++i) {
                keys[i] = k + places[j + i];
                if (ahead) fetch(v + places[j + i], dim);
                if (ahead) fetch(k + next[j + i], dim);
            }
            store(scores + ROWS * j, dots(q, keys, dim) * scale);
        }
        for (int64_t r = 0; r < ROWS; ++r) {
            int64_t own = visible[r] - first;
            own = own < 0 ? 0 : own < count ? own : count;
            for (int64_t j = own; j < TILE_KEYS; ++j) scores[ROWS * j + r] = -INFINITY;
        }
        Vec peak = seen.largest;
        for (int64_t i = 0; i < ROWS * TILE_KEYS; i += LANES) peak = larger(load(scores + i), peak);
        peak = larger(turned_8(peak), peak);
        peak = larger(turned_4(peak), peak);
        // A row that has seen no key has weights of 0, not exp(inf - inf).
        const Vec base = peak == all(-INFINITY) ? Vec{} : peak;
        const Vec fade = exponential(seen.largest - base);
        Vec sum{};
        for (int64_t i = 0; i < ROWS * TILE_KEYS; i += LANES) {
            Vec weights = exponential(load(scores + i) - base);
            sum += weights;
            store(scores + i, weights);
        }
        sum += turned_8(sum);
        sum += turned_4(sum);
        seen = {peak, seen.total * fade + sum};
        for (int r = 0; r < ROWS; ++r)
            if (fade[r] != 1.0f)
                for (int64_t d = 0; d < dim; d += LANES)
                    store(mixed[r] + d, load(mixed[r] + d) * fade[r]);
        int64_t d = 0;
        for (; d + 4 * LANES <= dim; d += 4 * LANES) mix<4>(v, places, count, scores, mixed, d);
        for (; d < dim; d += LANES) mix<1>(v, places, count, scores, mixed, d);
    }
};

inline int64_t groups_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }

// Queries q [heads, rows, dim] against keys begin .. end - 1 of as many key heads: a token's keys
// lie next to each other, and all heads take their turn before the next tile of tokens is read.
// `seen` has room for every head's groups. Results to partials [heads, rows] and mixed [heads,
// rows, dim].
template <typename T>
void attend(const Pages<T>& pages, const T* q, int64_t heads, int64_t rows, const int64_t* visible,
            int64_t dim, int64_t begin, int64_t end, Seen* seen, Partial* partials, float* mixed) {
    const int64_t groups = groups_of(rows);
    const float scale = 1.0f / std::sqrt((float)dim);
    float spare[MOST_DIM] = {};  // where rows go that are not there
    std::memset(mixed, 0, heads * rows * dim * sizeof(float));
    for (int64_t i = 0; i < heads * groups; ++i) seen[i] = {all(-INFINITY), Vec{}};
    int64_t tiles[2][TILE_KEYS];
    pages.find(begin, end, tiles[0]);
    for (int64_t first = begin, turn = 0; first < end; first += TILE_KEYS, turn ^= 1) {
        const int64_t count = end - first < TILE_KEYS ? end - first : TILE_KEYS;
        pages.find(first + count < end ? first + count : first, end, tiles[turn ^ 1]);
        for (int64_t i = 0; i < heads * groups; ++i) {
            const int64_t head = i / groups, start = i % groups * ROWS;
            Group<T> group{{}, pages.k + head * dim, pages.v + head * dim, {}, {}, dim, scale};
            for (int64_t r = 0; r < ROWS; ++r) {
                const int64_t row = start + r < rows ? start + r : rows - 1;
                const int64_t place = (head * rows + row) * dim;
                group.q[r] = q + place;
                group.mixed[r] = start + r < rows ? mixed + place : spare;
                group.visible[r] = visible[row];
            }
            group.add(seen[i], tiles[turn], tiles[turn ^ 1], first, count, start == 0);
        }
    }
    for (int64_t head = 0; head < heads; ++head)
        for (int64_t r = 0; r < rows; ++r) {
            const Seen& own = seen[head * groups + r / ROWS];
            partials[head * rows + r] = {own.largest[r % ROWS], own.total[r % ROWS]};
        }
}

// The whole softmax of one query from its parts, each `stride` partials and rows of `mixed` apart.
inline void merge(const Partial* partials, const float* mixed, int64_t parts, int64_t stride,
                  int64_t dim, float* out) {
    float peak = -INFINITY, total = 0.0f;
    for (int64_t p = 0; p < parts; ++p)
        peak = partials[p * stride].largest > peak ? partials[p * stride].largest : peak;
    for (int64_t d = 0; d < dim; d += LANES) store(out + d, Vec{});
    for (int64_t p = 0; p < parts; ++p) {
        const Partial& part = partials[p * stride];
        if (part.largest == -INFINITY) continue;
        const float factor = std::exp(part.largest - peak);
        total += factor * part.total;
        for (int64_t d = 0; d < dim; d += LANES)
            store(out + d, load(out + d) + factor * load(mixed + p * stride * dim + d));
    }
    for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(out + d) / total);
}

}  // namespace vlm
