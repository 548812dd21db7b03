// Packed rows, as the micro-kernels read them.
#pragma once

#include "products/weight.h"
#include "scratch.h"
#include "vectors.h"

namespace vlm {

// Rows in groups of equal size (or one row more). In a group the values of one k, or of one pair of
// k, are contiguous. A thread reuses its operand from product to product.
//
// For codes (grouped.h) the values of each k carry a factor, a power of two. With zero points, the
// sums of the groups of k follow the values. Quantised rows are words of four k, `[K / 4, rows]`,
// followed by scales and sums, `[K / row_group, rows]` each.
class Operand {
  public:
    // Packs rows of T; `at(r)` is the address of row r. A single row of float32 is used in place if
    // possible.
    template <typename T, typename At>
    void pack(int64_t rows, const Weight& weight, const At& at) {
        const int64_t depth = weight.depth, type = weight.type;
        rows_ = rows;
        pairs_ = in_pairs<T>(weight);
        in_tiles_ = vlm::in_tiles<T>(weight) && (pairs_ || rows > FULL_WIDTH_ROWS);
        if (in_tiles_ && pairs_) return pack_tiles(rows, depth, at);
        if (in_tiles_) return pack_byte_tiles<T>(rows, weight, at);
        const int64_t most = max_kernel_rows(rows, weight);
        groups_ = (rows + most - 1) / most;
        least_ = rows / groups_, smaller_ = groups_ - rows % groups_;
        const int64_t group = weight.dynamic ? row_group(weight) : weight.group;
        const int64_t sums = is_codes(type) ? depth / group : 0;
        const int64_t values = pairs_ ? (depth + 1) / 2 : padded(depth, type);
        words_ = weight.dynamic ? depth / 4 + 2 * sums : values + (weight.zeros ? sums : 0);
        if (rows == 1 && sizeof(T) == 4 && words_ == depth && !is_codes(type)) {
            place_ = (const float*)at(0);
            return;
        }
        float* to = scratch_.get(rows * words_ + LANES);
        place_ = to;
        for (int64_t i = 0; i < groups_; ++i) {
            const T* from[MAX_ROWS];
            const int64_t own = size(i);
            for (int64_t r = 0; r < own; ++r) from[r] = at(first(i) + r);
            if (weight.dynamic)
                quantise(from, own, own, false, weight, to);
            else
                pack_group(from, own, depth, values, type, to);
            if (weight.zeros && !weight.dynamic) sum_groups(from, own, weight, to + depth * own);
            to += own * words_;
        }
    }

    // Allocates enough for `max_operand_rows` rows, so that `pack` never allocates.
    void reserve(int64_t depth) {
        scratch_.get(max_operand_rows(depth, false) * (depth + depth / MIN_GROUP + 1) + LANES);
        if (HAS_AMX)
            scratch_.get(max_operand_rows(depth, true) * tile_steps(depth) * TILE_DEPTH / 2);
    }

    int64_t rows() const { return rows_; }
    int64_t groups() const { return groups_; }
    bool pairs() const { return pairs_; }
    int64_t first(int64_t group) const {
        return group * least_ + std::max<int64_t>(0, group - smaller_);
    }
    int64_t size(int64_t group) const { return least_ + (group >= smaller_); }
    const float* group(int64_t index) const { return place_ + first(index) * words_; }

    // Tells whether the rows lie in tiles of 16, of which the last may be partial. Pairs are `[K /
    // 32, 16, 32]`, or `[K / 32, rows, 32]` for fewer than 16 rows, padded with zeros in K.
    // Quantised rows are `[K / row_group, 16, row_group]` bytes, followed by scales and sums, `[K /
    // row_group, 16]` each.
    bool in_tiles() const { return in_tiles_; }
    int64_t tiles() const { return (rows_ + TILE_ROWS - 1) / TILE_ROWS; }
    const float* tile(int64_t index) const { return place_ + index * TILE_ROWS * words_; }
    // Bytes from one tile to the next.
    int64_t tile_bytes() const { return TILE_ROWS * words_ * sizeof(float); }

  private:
    template <typename At>
    void pack_tiles(int64_t rows, int64_t depth, const At& at) {
        words_ = tile_steps(depth) * TILE_DEPTH / 2;
        char* to = (char*)scratch_.get((rows > TILE_ROWS ? tiles() * TILE_ROWS : rows) * words_);
        place_ = (const float*)to;
        const int64_t wide = std::min(rows, TILE_ROWS) * 64;
        for (int64_t r = 0; r < rows; ++r)
            pack_tile_row((const bf16*)at(r), depth, wide,
                          to + r / TILE_ROWS * tile_bytes() + r % TILE_ROWS * 64);
    }

    template <typename T, typename At>
    void pack_byte_tiles(int64_t rows, const Weight& weight, const At& at) {
        words_ = weight.depth / 4 + 2 * (weight.depth / row_group(weight));
        float* to = scratch_.get(tiles() * TILE_ROWS * words_);
        place_ = to;
        for (int64_t first = 0; first < rows; first += TILE_ROWS, to += TILE_ROWS * words_) {
            const T* from[TILE_ROWS];
            const int64_t own = std::min(rows - first, TILE_ROWS);
            for (int64_t r = 0; r < own; ++r) from[r] = at(first + r);
            quantise(from, own, TILE_ROWS, true, weight, to);
        }
    }

    // Packs one row; its blocks are `step` bytes apart.
    static void pack_tile_row(const bf16* from, int64_t depth, int64_t step, char* to);

    template <typename T>
    void pack_group(const T* const* from, int64_t rows, int64_t depth, int64_t padded, int64_t type,
                    float* to) const;
    // Quantises `rows` of a layout with `among` rows. The words of a group are contiguous per row
    // if `by_rows`, else per k.
    template <typename T>
    void quantise(const T* const* from, int64_t rows, int64_t among, bool by_rows,
                  const Weight& weight, float* to) const;
    template <typename T>
    void sum_groups(const T* const* from, int64_t rows, const Weight& weight, float* to) const;

    ScratchBuffer scratch_;
    const float* place_ = nullptr;
    int64_t rows_ = 0, groups_ = 1, words_ = 0;
    int64_t least_ = 0, smaller_ = 0;  // rows of a small group, and how many groups are small;
                                       // others have one row more
    bool pairs_ = false, in_tiles_ = false;
};

}  // namespace vlm
