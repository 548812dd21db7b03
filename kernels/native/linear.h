// Products of a few rows with a packed weight, read once at memory speed.
//
// A packed weight is oneDNN's layout for AVX-512: blocks of 64 columns (rows of the `[N, K]`
// weight), and in a block for every k the 64 columns next to each other; in bfloat16 for every pair
// of k the 64 pairs. Both are padded with zeros. A row's result depends on the row alone: its sum
// runs over ascending k whatever other rows there are.
#pragma once

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "vectors.h"

namespace vlm {

constexpr int BLOCK = 64;            // columns of a block
constexpr int VECS = BLOCK / LANES;  // vectors of a block
constexpr int64_t MOST_PRODUCT_ROWS = 64;
constexpr int MOST_ROWS = 6;    // rows whose sums stay in registers: 24 of 32 vectors
constexpr int AHEAD = 4096;     // bytes between what is used and what is asked for
constexpr int64_t SLAB = 1024;  // depth of a weight's part that stays in the L1/L2 cache

struct Weight {
    const void* packed;
    const float* bias;  // may be null
    int64_t columns;    // N
    int64_t depth;      // K as padded
};

inline int64_t blocks_of(const Weight& weight) { return (weight.columns + BLOCK - 1) / BLOCK; }

// sums[r][64] += x[r][begin:end] . block[begin:end]
template <int ROWS>
inline void accumulate(const float* block, const float* const* x, int64_t begin, int64_t end,
                       float* sums) {
    Vec total[ROWS][VECS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECS; ++v) total[r][v] = load(sums + r * BLOCK + v * LANES);
    for (int64_t k = begin; k < end; ++k) {
        const float* row = block + k * BLOCK;
        for (int v = 0; v < VECS; ++v) __builtin_prefetch(row + AHEAD / 4 + v * LANES);
        Vec w[VECS];
        for (int v = 0; v < VECS; ++v) w[v] = load(row + v * LANES);
        for (int r = 0; r < ROWS; ++r) {
            Vec factor = all(x[r][k]);
            for (int v = 0; v < VECS; ++v) total[r][v] += factor * w[v];
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECS; ++v) store(sums + r * BLOCK + v * LANES, total[r][v]);
}

#if defined(__AVX512BF16__)
template <int ROWS>
inline void accumulate(const bf16* block, const bf16* const* x, int64_t begin, int64_t end,
                       float* sums) {
    __m512 total[ROWS][VECS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECS; ++v) total[r][v] = (__m512)load(sums + r * BLOCK + v * LANES);
    for (int64_t k = begin; k < end; k += 2) {
        const bf16* row = block + k * BLOCK;
        for (int v = 0; v < VECS; ++v) __builtin_prefetch(row + AHEAD / 2 + 2 * v * LANES);
        __m512bh w[VECS];
        for (int v = 0; v < VECS; ++v)
            w[v] = (__m512bh)_mm512_loadu_si512((const void*)(row + 2 * v * LANES));
        for (int r = 0; r < ROWS; ++r) {
            int32_t pair;
            std::memcpy(&pair, x[r] + k, sizeof pair);
            __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
            for (int v = 0; v < VECS; ++v)
                total[r][v] = _mm512_dpbf16_ps(total[r][v], factor, w[v]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECS; ++v) store(sums + r * BLOCK + v * LANES, (Vec)total[r][v]);
}
#else
template <int ROWS>
inline void accumulate(const bf16* block, const bf16* const* x, int64_t begin, int64_t end,
                       float* sums) {
    Vec total[ROWS][VECS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECS; ++v) total[r][v] = load(sums + r * BLOCK + v * LANES);
    for (int64_t k = begin; k < end; k += 2) {
        const bf16* row = block + k * BLOCK;
        for (int v = 0; v < VECS; ++v) {
            Bits pairs;
            std::memcpy(&pairs, row + 2 * v * LANES, sizeof pairs);
            Vec even = (Vec)(pairs << 16), odd = (Vec)(pairs & 0xffff0000u);
            for (int r = 0; r < ROWS; ++r)
                total[r][v] += even * load_one(x[r] + k) + odd * load_one(x[r] + k + 1);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECS; ++v) store(sums + r * BLOCK + v * LANES, total[r][v]);
}
#endif

// The same for any number of rows, in groups of equal size: 8 rows are 4 and 4, not 6 and 2.
template <typename T>
inline void accumulate_rows(const T* block, const T* const* x, int64_t rows, int64_t begin,
                            int64_t end, float* sums) {
    const int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t group = 0, first = 0; group < groups; ++group) {
        const int64_t count = (rows - first + groups - group - 1) / (groups - group);
        float* own = sums + first * BLOCK;
        switch (count) {
            case 1:
                accumulate<1>(block, x + first, begin, end, own);
                break;
            case 2:
                accumulate<2>(block, x + first, begin, end, own);
                break;
            case 3:
                accumulate<3>(block, x + first, begin, end, own);
                break;
            case 4:
                accumulate<4>(block, x + first, begin, end, own);
                break;
            case 5:
                accumulate<5>(block, x + first, begin, end, own);
                break;
            default:
                accumulate<6>(block, x + first, begin, end, own);
                break;
        }
        first += count;
    }
}

// sums[r][64] = x[r] . block + bias, for at most MOST_PRODUCT_ROWS rows. Slabs are summed on their
// own first, as oneDNN does: results have the bits that it gives the same rows among thousands.
template <typename T>
inline void block_product(const Weight& weight, int64_t index, const T* const* x, int64_t rows,
                          float* sums) {
    const T* block = (const T*)weight.packed + index * BLOCK * weight.depth;
    for (int64_t r = 0; r < rows; ++r)
        for (int c = 0; c < BLOCK; ++c) {
            int64_t column = index * BLOCK + c;
            bool biased = weight.bias && column < weight.columns;
            sums[r * BLOCK + c] = biased ? weight.bias[column] : 0.0f;
        }
    float part[MOST_PRODUCT_ROWS * BLOCK];
    for (int64_t begin = 0; begin < weight.depth; begin += SLAB) {
        const int64_t end = begin + SLAB < weight.depth ? begin + SLAB : weight.depth;
        std::memset(part, 0, rows * BLOCK * sizeof(float));
        accumulate_rows(block, x, rows, begin, end, part);
        for (int64_t i = 0; i < rows * BLOCK; i += LANES)
            store(sums + i, load(sums + i) + load(part + i));
    }
}

}  // namespace vlm
