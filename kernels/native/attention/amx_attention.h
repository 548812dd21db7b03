// Products of attention in AMX tiles, for many and for few queries. Sums are as in amx_products.h,
// whichever factor provides the rows. The caller configures TileRegisters: 16 rows (keys or dims)
// for many queries, one row per query for few.
#pragma once

#include "attention/key_tile.h"
#include "products/amx_registers.h"
#include "transpose.h"

namespace vlm {

// Tells whether heads of this many dims are multiplied in tiles, as pairs of bfloat16.
inline bool attention_uses_amx(int64_t dim) { return HAS_AMX && dim % TILE_DEPTH == 0; }

#if VLM_AMX

// Returns the stride of 16 rows in bytes, or 0 if they have no common one.
inline int64_t common_stride(const float* const* rows) {
    const int64_t stride = (const char*)rows[1] - (const char*)rows[0];
    bool same = true;
    for (int i = 2; i < TILE_ROWS; ++i)
        same &= (const char*)rows[i] - (const char*)rows[i - 1] == stride;
    return same ? stride : 0;
}

// scores[key][query] = key . query for queries `[dim / 2, QUERIES]`; `scratch` holds TILE_KEYS
// keys.
template <int VECS, typename P>
void score_amx(const float* const* keys, const float* queries, int64_t dim, char* scratch,
               float* scores, KeyPrefetcher<P>& prefetcher) {
    constexpr int64_t WIDE = QUERIES * sizeof(float);
    for (int64_t j = 0; j < TILE_KEYS; j += TILE_ROWS, scores += TILE_ROWS * QUERIES) {
        const char* rows = (const char*)keys[j];
        int64_t stride = common_stride(keys + j);
        if (!stride) {
            rows = scratch, stride = 2 * dim;
            for (int64_t i = 0; i < TILE_ROWS; ++i)
                std::memcpy(scratch + i * stride, keys[j + i], stride);
            scratch += TILE_ROWS * stride;
        }
        prefetcher.step();
        TileRegisters::compiler_fence();
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

// output[dim][query] += value . weight for pairs of keys: values `[TILE_KEYS / 2, dim]`, weights
// `[TILE_KEYS / 2, QUERIES]`. `scratch` holds as many values.
template <int VECS>
void add_values_amx(const float* values, const float* weights, int64_t dim, float* scratch,
                    float* output) {
    constexpr int64_t WIDE = QUERIES * sizeof(float), PAIRS = TILE_KEYS / 2;
    for (int64_t d = 0; d < dim; d += TILE_ROWS, output += TILE_ROWS * QUERIES) {
        for (int64_t j = 0; j < PAIRS; j += WIDTH) {
            Words square[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i) square[i] = read<Words>(values + (j + i) * dim + d);
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i)
                std::memcpy(scratch + i * PAIRS + j, &square[i], sizeof square[i]);
        }
        TileRegisters::compiler_fence();
        _tile_loadd(0, output, WIDE);
        if (VECS > 1) _tile_loadd(1, output + LANES, WIDE);
        for (int64_t j = 0; j < PAIRS; j += WIDTH) {
            _tile_loadd(4, scratch + j, PAIRS * sizeof(float));
            _tile_loadd(6, weights + j * QUERIES, WIDE);
            _tile_dpbf16ps(0, 4, 6);
            if (VECS == 1) continue;
            _tile_loadd(7, weights + j * QUERIES + LANES, WIDE);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, output, WIDE);
        if (VECS > 1) _tile_stored(1, output + LANES, WIDE);
        scratch += TILE_ROWS * PAIRS;
    }
}

// scores[query][key] for queries `[rows, dim]`, with as many rows as the tiles are configured for.
template <typename P>
void score_few_amx(const float* const* keys, const float* queries, int64_t dim, float* scores,
                   KeyPrefetcher<P>& prefetcher) {
    alignas(64) Words squares[2][WIDTH];
    for (int64_t j = 0; j < TILE_KEYS; j += WIDTH) {
        _tile_zero(0);
        for (int64_t w = 0; w < dim / 2; w += WIDTH) {
            Words* square = squares[w / WIDTH % 2];
            prefetcher.step();
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i) square[i] = read<Words>(keys[j + i] + w);
            transpose(square);
            TileRegisters::compiler_fence();
            _tile_loadd(4, queries + w, 2 * dim);
            _tile_loadd(6, square, 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, scores + j, TILE_KEYS * sizeof(float));
    }
}

// output[query][dim] += weight . value for weights `[rows, TILE_KEYS]`; the first half of each row
// holds pairs of keys.
inline void add_values_few_amx(const float* values, const float* weights, int64_t dim,
                               float* output) {
    constexpr int64_t WIDE = TILE_KEYS * sizeof(float);
    const int64_t stride = dim * sizeof(float);
    TileRegisters::compiler_fence();
    for (int64_t d = 0; d < dim; d += 2 * LANES) {
        _tile_loadd(0, output + d, stride);
        _tile_loadd(1, output + d + LANES, stride);
        for (int64_t j = 0; j < TILE_KEYS / 2; j += WIDTH) {
            _tile_loadd(4, weights + j, WIDE);
            _tile_loadd(6, values + j * dim + d, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, values + j * dim + d + LANES, stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, output + d, stride);
        _tile_stored(1, output + d + LANES, stride);
    }
}

#else

struct TileRegisters {
    TileRegisters(int64_t, int64_t) {}
};
template <int VECS, typename P>
void score_amx(const float* const*, const float*, int64_t, char*, float*, KeyPrefetcher<P>&) {}
template <int VECS>
void add_values_amx(const float*, const float*, int64_t, float*, float*) {}
template <typename P>
void score_few_amx(const float* const*, const float*, int64_t, float*, KeyPrefetcher<P>&) {}
inline void add_values_few_amx(const float*, const float*, int64_t, float*) {}

#endif

}  // namespace vlm
