// What attention multiplies in tiles (AMX), for many queries and for few: sums as amx_products.h
// describes them, whichever of both factors are the rows. TileRegisters are set, with a row for
// each of 16 keys or dims beside many queries, or for each of few queries.
#pragma once

#include "attention/key_tile.h"
#include "products/amx_registers.h"
#include "transpose.h"

namespace vlm {

// Whether heads of so many dims, in pairs, are multiplied in tiles.
inline bool attends_in_tiles(int64_t dim) { return TILE_PRODUCTS && dim % TILE_DEPTH == 0; }

#if VLM_TILES

// The stride of 16 rows, in bytes, and 0 if it is not one.
inline int64_t stride_of(const float* const* rows) {
    const int64_t stride = (const char*)rows[1] - (const char*)rows[0];
    bool same = true;
    for (int i = 2; i < TILE_ROWS; ++i)
        same &= (const char*)rows[i] - (const char*)rows[i - 1] == stride;
    return same ? stride : 0;
}

// scores[key][query] = key . query for queries `[dim / 2, QUERIES]`; `room` is for TILE_KEYS keys.
template <int VECS, typename P>
void score_tiles(const float* const* keys, const float* queries, int64_t dim, char* room,
                 float* scores, Ahead<P>& ahead) {
    constexpr int64_t WIDE = QUERIES * sizeof(float);
    for (int64_t j = 0; j < TILE_KEYS; j += TILE_ROWS, scores += TILE_ROWS * QUERIES) {
        const char* rows = (const char*)keys[j];
        int64_t stride = stride_of(keys + j);
        if (!stride) {
            rows = room, stride = 2 * dim;
            for (int64_t i = 0; i < TILE_ROWS; ++i)
                std::memcpy(room + i * stride, keys[j + i], stride);
            room += TILE_ROWS * stride;
        }
        ahead.ask();
        TileRegisters::written();
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t d = 0; d < dim; d += TILE_DEPTH) {
            const float* own = queries + d / 2 * QUERIES;
            _tile_loadd(4, rows + 2 * d, stride);
            _tile_loadd(6, own, WIDE);
            _tile_dpbf16ps(0, 4, 6);
            if (VECS == 1) continue;
            _tile_loadd(7, own + LANES, WIDE);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, scores, WIDE);
        if (VECS > 1) _tile_stored(1, scores + LANES, WIDE);
    }
}

// mixed[dim][query] += value . weight for pairs of keys: values `[TILE_KEYS / 2, dim]`, weights
// `[TILE_KEYS / 2, QUERIES]`. `room` is for as many values.
template <int VECS>
void mix_tiles(const float* values, const float* weights, int64_t dim, float* room, float* mixed) {
    constexpr int64_t WIDE = QUERIES * sizeof(float), PAIRS = TILE_KEYS / 2;
    for (int64_t d = 0; d < dim; d += TILE_ROWS, mixed += TILE_ROWS * QUERIES) {
        for (int64_t j = 0; j < PAIRS; j += WIDTH) {
            Words square[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i) square[i] = read<Words>(values + (j + i) * dim + d);
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i)
                std::memcpy(room + i * PAIRS + j, &square[i], sizeof square[i]);
        }
        TileRegisters::written();
        _tile_loadd(0, mixed, WIDE);
        if (VECS > 1) _tile_loadd(1, mixed + LANES, WIDE);
        for (int64_t j = 0; j < PAIRS; j += WIDTH) {
            _tile_loadd(4, room + j, PAIRS * sizeof(float));
            _tile_loadd(6, weights + j * QUERIES, WIDE);
            _tile_dpbf16ps(0, 4, 6);
            if (VECS == 1) continue;
            _tile_loadd(7, weights + j * QUERIES + LANES, WIDE);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, mixed, WIDE);
        if (VECS > 1) _tile_stored(1, mixed + LANES, WIDE);
        room += TILE_ROWS * PAIRS;
    }
}

// scores[query][key] for queries `[rows, dim]`, as many as tiles have rows.
template <typename P>
void score_few_tiles(const float* const* keys, const float* queries, int64_t dim, float* scores,
                     Ahead<P>& ahead) {
    alignas(64) Words squares[2][WIDTH];
    for (int64_t j = 0; j < TILE_KEYS; j += WIDTH) {
        _tile_zero(0);
        for (int64_t w = 0; w < dim / 2; w += WIDTH) {
            Words* square = squares[w / WIDTH % 2];
            ahead.ask();
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i) square[i] = read<Words>(keys[j + i] + w);
            transpose(square);
            TileRegisters::written();
            _tile_loadd(4, queries + w, 2 * dim);
            _tile_loadd(6, square, 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, scores + j, TILE_KEYS * sizeof(float));
    }
}

// mixed[query][dim] += weight . value for weights `[rows, TILE_KEYS]` of which the first half are
// pairs of keys.
inline void mix_few_tiles(const float* values, const float* weights, int64_t dim, float* mixed) {
    constexpr int64_t WIDE = TILE_KEYS * sizeof(float);
    const int64_t stride = dim * sizeof(float);
    TileRegisters::written();
    for (int64_t d = 0; d < dim; d += 2 * LANES) {
        _tile_loadd(0, mixed + d, stride);
        _tile_loadd(1, mixed + d + LANES, stride);
        for (int64_t j = 0; j < TILE_KEYS / 2; j += WIDTH) {
            _tile_loadd(4, weights + j, WIDE);
            _tile_loadd(6, values + j * dim + d, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, values + j * dim + d + LANES, stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, mixed + d, stride);
        _tile_stored(1, mixed + d + LANES, stride);
    }
}

#else

struct TileRegisters {
    TileRegisters(int64_t, int64_t) {}
};
template <int VECS, typename P>
void score_tiles(const float* const*, const float*, int64_t, char*, float*, Ahead<P>&) {}
template <int VECS>
void mix_tiles(const float*, const float*, int64_t, float*, float*) {}
template <typename P>
void score_few_tiles(const float* const*, const float*, int64_t, float*, Ahead<P>&) {}
inline void mix_few_tiles(const float*, const float*, int64_t, float*) {}

#endif

}  // namespace vlm
