// Causal attention of a prefill over paged keys and values, one key head at a time: its keys and
// values are packed like weights, then tiles of queries pass over them with a running softmax.
//
// A query's keys are taken in blocks of 64 from position 0 on, whatever slice it is in, and what it
// does not see adds nothing: its bits depend on its sequence alone.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "attention.h"

namespace vlm {

constexpr int64_t QUERY_ROWS = 96;  // of a tile, all query heads of its tokens: 16 groups of 6

struct PrefillAttention {
    int64_t sequences, threads, heads, kv_heads, head_dim, q_stride, q_head;
    int64_t block_size, kv_block_stride, kv_token_stride, kv_head_stride;
    double scale;
    const int64_t *offsets, *starts, *first_block;
    const int32_t* blocks;
    const void *q, *k, *v;
    void* out;  // [N, heads, head_dim], contiguous
};

// One sequence's keys and values of one head. Keys: for every block of 64 what `accumulate` takes
// for a weight of 64 columns and depth `dim`; values: for every block and 64 dims the same with the
// keys as depth. Both are zero where there is no key or dim.
template <typename T>
struct PackedHead {
    int64_t keys, dim, dim_blocks;
    T *packed_keys, *packed_values;

    static int64_t size(int64_t keys, int64_t dim) {
        const int64_t blocks = (keys + BLOCK - 1) / BLOCK;
        return blocks * BLOCK * (dim + (dim + BLOCK - 1) / BLOCK * BLOCK);
    }

    PackedHead(int64_t count, int64_t head_dim, T* memory)
        : keys(count), dim(head_dim), dim_blocks((head_dim + BLOCK - 1) / BLOCK) {
        packed_keys = memory;
        packed_values = memory + (count + BLOCK - 1) / BLOCK * BLOCK * head_dim;
    }

    const T* keys_of(int64_t block) const { return packed_keys + block * BLOCK * dim; }

    T* values_of(int64_t block, int64_t dims) const {
        return packed_values + (block * dim_blocks + dims) * BLOCK * BLOCK;
    }

    void pack(const Pages<T>& pages, int64_t block) {
        const int64_t first = block * BLOCK, count = std::min<int64_t>(BLOCK, keys - first);
        int64_t places[BLOCK];
        pages.find(first, keys, places);
        pack_keys(pages, places, count, (uint32_t*)keys_of(block));
        for (int64_t b = 0; b < dim_blocks; ++b) {
            T* values = values_of(block, b);
            std::memset(values, 0, BLOCK * BLOCK * sizeof(T));
            const int64_t width = std::min<int64_t>(BLOCK, dim - b * BLOCK);
            pack_values(pages.v + b * BLOCK, places, count, width, values);
        }
    }

  private:
    // In words of 32 bits, which are one float32 or two bfloat16 of a key.
    void pack_keys(const Pages<T>& pages, const int64_t* places, int64_t count,
                   uint32_t* to) const {
        const int64_t words = dim * sizeof(T) / sizeof(uint32_t);
        for (int64_t j = 0; j < BLOCK; j += LANES)
            for (int64_t w = 0; w < words; w += LANES) {
                const int64_t wide = std::min<int64_t>(LANES, words - w);
                Bits rows[LANES] = {};
                for (int64_t i = 0; i < LANES && j + i < count; ++i)
                    std::memcpy(&rows[i], (const uint32_t*)(pages.k + places[j + i]) + w,
                                wide * sizeof(uint32_t));
                transpose(rows);
                for (int64_t i = 0; i < wide; ++i)
                    std::memcpy(to + (w + i) * BLOCK + j, &rows[i], sizeof rows[i]);
            }
    }

    static void pack_values(const float* v, const int64_t* places, int64_t count, int64_t width,
                            float* to) {
        for (int64_t j = 0; j < count; ++j)
            std::memcpy(to + j * BLOCK, v + places[j], width * sizeof(float));
    }

    // Two keys next to each other in every word.
    static void pack_values(const bf16* v, const int64_t* places, int64_t count, int64_t width,
                            bf16* to) {
        for (int64_t j = 0; j < count; j += 2)
            for (int64_t d = 0; d < width; d += LANES) {
                Halves low, high{};
                std::memcpy(&low, v + places[j] + d, sizeof low);
                if (j + 1 < count) std::memcpy(&high, v + places[j + 1] + d, sizeof high);
                Bits both = __builtin_convertvector(low, Bits) | __builtin_convertvector(high, Bits)
                                                                     << 16;
                std::memcpy(to + j * BLOCK + 2 * d, &both, sizeof both);
            }
    }
};

// A tile of queries on its way over the keys.
template <typename T>
class QueryTile {
  public:
    explicit QueryTile(int64_t dim)
        : dim_(dim),
          dim_blocks_((dim + BLOCK - 1) / BLOCK),
          queries_(QUERY_ROWS * dim),
          weights_(QUERY_ROWS * BLOCK),
          scores_(QUERY_ROWS * BLOCK),
          mixed_(QUERY_ROWS * dim_blocks_ * BLOCK) {
        for (int64_t r = 0; r < QUERY_ROWS; ++r) {
            query_rows_[r] = queries_.data() + r * dim;
            weight_rows_[r] = weights_.data() + r * BLOCK;
        }
    }

    T* query(int64_t row) { return queries_.data() + row * dim_; }

    // Row r sees keys before visible[r], which does not decrease with r; `scale` has the log2(e) in
    // it that makes 2^x of e^x.
    void attend(const PackedHead<T>& head, int64_t rows, const int64_t* visible, float scale) {
        std::fill(mixed_.begin(), mixed_.end(), 0.0f);
        std::fill(peaks_, peaks_ + rows, -INFINITY);
        std::fill(totals_, totals_ + rows, 0.0f);
        for (int64_t first = 0; first < visible[rows - 1]; first += BLOCK) {
            std::fill(scores_.begin(), scores_.begin() + rows * BLOCK, 0.0f);
            accumulate_rows(head.keys_of(first / BLOCK), query_rows_, rows, 0, dim_,
                            scores_.data());
            for (int64_t r = 0; r < rows; ++r) weigh(r, rows, visible[r] - first, scale);
            for (int64_t b = 0; b < dim_blocks_; ++b)
                accumulate_rows(head.values_of(first / BLOCK, b), weight_rows_, rows, 0, BLOCK,
                                mixed_.data() + b * rows * BLOCK);
        }
    }

    void result(int64_t row, int64_t rows, T* out) const {
        for (int64_t d = 0; d < dim_; d += LANES)
            store(out + d, load(mixed_.data() + place(row, rows, d)) / totals_[row]);
    }

  private:
    int64_t place(int64_t row, int64_t rows, int64_t d) const {
        return (d / BLOCK * rows + row) * BLOCK + d % BLOCK;
    }

    // One row's scores of a block into weights; what was mixed before fades as the peak rises.
    void weigh(int64_t r, int64_t rows, int64_t seen, float scale) {
        float* own = scores_.data() + r * BLOCK;
        T* weights = weights_.data() + r * BLOCK;
        if (seen <= 0) {
            std::memset(weights, 0, BLOCK * sizeof(T));
            return;
        }
        for (int64_t j = seen; j < BLOCK; ++j) own[j] = -INFINITY;
        Vec most = load(own);
        for (int j = LANES; j < BLOCK; j += LANES) most = larger(load(own + j), most);
        const float peak = std::max(largest(most) * scale, peaks_[r]);
        Vec total{};
        for (int j = 0; j < BLOCK; j += LANES) {
            Vec weight = power_of_2(load(own + j) * scale - peak);
            total += weight;
            store(weights + j, weight);
        }
        const float fade = std::exp2(peaks_[r] - peak);
        totals_[r] = totals_[r] * fade + sum(total);
        if (peak != peaks_[r])
            for (int64_t d = 0; d < dim_; d += LANES) {
                float* at = mixed_.data() + place(r, rows, d);
                store(at, load(at) * fade);
            }
        peaks_[r] = peak;
    }

    int64_t dim_, dim_blocks_;
    std::vector<T> queries_, weights_;
    std::vector<float> scores_, mixed_;
    const T *query_rows_[QUERY_ROWS], *weight_rows_[QUERY_ROWS];
    float peaks_[QUERY_ROWS], totals_[QUERY_ROWS];
};

template <typename T>
void attend_tile(const PrefillAttention& job, const PackedHead<T>& head, int64_t sequence,
                 int64_t kv_head, int64_t begin, int64_t end, QueryTile<T>& tile) {
    const int64_t shared = job.heads / job.kv_heads, dim = job.head_dim;
    int64_t visible[QUERY_ROWS], row = 0;
    for (int64_t t = begin; t < end; ++t)
        for (int64_t own = 0; own < shared; ++own, ++row) {
            const int64_t place = t * job.q_stride + (kv_head * shared + own) * job.q_head;
            std::memcpy(tile.query(row), (const T*)job.q + place, dim * sizeof(T));
            visible[row] = job.starts[sequence] + t - job.offsets[sequence] + 1;
        }
    tile.attend(head, row, visible, (float)(job.scale * 1.4426950408889634));
    for (int64_t r = 0; r < row; ++r) {
        const int64_t place = (begin + r / shared) * job.heads + kv_head * shared + r % shared;
        tile.result(r, row, (T*)job.out + place * dim);
    }
}

inline int64_t keys_of(const PrefillAttention& job, int64_t sequence) {
    return job.starts[sequence] + job.offsets[sequence + 1] - job.offsets[sequence];
}

// All queries of one sequence and key head, inside of a parallel region; `memory` holds the packed
// head, `pages` are those of the sequence.
template <typename T>
void attend_head(const PrefillAttention& job, Pages<T> pages, int64_t sequence, int64_t kv_head,
                 T* memory, QueryTile<T>& tile) {
    const int64_t tokens = QUERY_ROWS / (job.heads / job.kv_heads);
    const int64_t first = job.offsets[sequence], last = job.offsets[sequence + 1];
    PackedHead<T> head(keys_of(job, sequence), job.head_dim, memory);
    pages.k += kv_head * job.kv_head_stride;
    pages.v += kv_head * job.kv_head_stride;
#pragma omp for schedule(dynamic, 4)
    for (int64_t block = 0; block < (head.keys + BLOCK - 1) / BLOCK; ++block)
        head.pack(pages, block);
    const int64_t tiles = (last - first + tokens - 1) / tokens;
#pragma omp for schedule(dynamic, 1)
    for (int64_t at = 0; at < tiles; ++at) {
        // The last ones see most keys: they come first, so that threads end together.
        const int64_t begin = first + (tiles - 1 - at) * tokens;
        attend_tile(job, head, sequence, kv_head, begin, std::min(begin + tokens, last), tile);
    }
}

template <typename T>
void attend_packed(const PrefillAttention& job) {
    int64_t longest = 0;
    for (int64_t i = 0; i < job.sequences; ++i) longest = std::max(longest, keys_of(job, i));
    std::unique_ptr<T[]> memory(new T[PackedHead<T>::size(longest, job.head_dim)]);
#pragma omp parallel num_threads((int)job.threads)
    {
        QueryTile<T> tile(job.head_dim);
        for (int64_t i = 0; i < job.sequences * job.kv_heads; ++i) {
            Pages<T> pages{(const T*)job.k,
                           (const T*)job.v,
                           job.blocks + job.first_block[i / job.kv_heads],
                           job.block_size,
                           job.kv_block_stride,
                           job.kv_token_stride};
            attend_head(job, pages, i / job.kv_heads, i % job.kv_heads, memory.get(), tile);
        }
    }
}

}  // namespace vlm
