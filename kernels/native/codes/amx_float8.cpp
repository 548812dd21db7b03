// Kernels of grouped.h for rows of bfloat16 and e4m3 codes, which are exact in bfloat16: the sums
// of groups are computed in AMX tiles.
#include "codes/grouped.h"
#include "products/amx_products.h"
#include "products/amx_registers.h"

namespace vlm {

#if VLM_AMX

namespace {

constexpr int64_t FLOAT8_PREFETCH_DISTANCE = 8192;  // prefetch distance in bytes
// About the k of a panel's part that stays in the L1 cache.
constexpr int64_t FLOAT8_L1_DEPTH = 128;
constexpr int64_t PAIRS_BYTES = PANEL * 4, FLOAT8_BLOCK_BYTES = TILE_DEPTH / 2 * PAIRS_BYTES;

// Widens some k of a panel to the layout of a tile: `[k / 2, 32]` pairs.
void widen_float8(const char* words, int64_t count, char* to) {
    for (int64_t k = 0; k < count; k += 4, to += 2 * PAIRS_BYTES)
        for (int64_t at = 0; at < PAIRS_BYTES; at += 64, words += 64) {
            prefetch_line(words + FLOAT8_PREFETCH_DISTANCE);
            const Words codes = read<Words>(words);
            const Words first = pair_of_float8<false>(codes), last = pair_of_float8<true>(codes);
            std::memcpy(to + at, &first, sizeof first);
            std::memcpy(to + at + PAIRS_BYTES, &last, sizeof last);
        }
}

// Adds the products of one or two tiles of rows, `apart` bytes from each other, with a block.
template <bool TWO>
VLM_INLINE void add_block(const char* rows, int64_t apart, const char* columns) {
    _tile_loadd(6, columns, PAIRS_BYTES);
    _tile_loadd(4, rows, 64);
    _tile_loadd(7, columns + 64, PAIRS_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    if (TWO) _tile_loadd(5, rows + apart, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) _tile_dpbf16ps(2, 5, 6);
    if (TWO) _tile_dpbf16ps(3, 5, 7);
}

// results += group's sum * scale
VLM_INLINE void fold_group(const float* whole, int64_t rows, const GroupScales& of, bool fresh,
                           float* results) {
    for (const float* end = whole + rows * PANEL; whole < end; whole += PANEL, results += PANEL)
#pragma GCC unroll 2
        for (int j = 0; j < PANEL_REGISTERS; ++j) {
            const Floats before = fresh ? Floats{} : read<Floats>(results + j * WIDTH);
            const Floats total = fma(read<Floats>(whole + j * WIDTH), of.scale[j], before);
            std::memcpy(results + j * WIDTH, &total, sizeof total);
        }
}

// Folds the sums of a group into the results while the next group is multiplied: the tile store
// takes that long.
class DelayedFold {
  public:
    explicit DelayedFold(int64_t rows) : rows_(rows) {}

    // Returns the buffer for the sums of the next group.
    float* buffer() { return whole_[next_]; }

    void add(const GroupScales& of, bool fresh, float* results) {
        flush();
        of_ = of, fresh_ = fresh, results_ = results;
        next_ = !next_;
    }

    void flush() {
        if (results_) fold_group(whole_[!next_], rows_, of_, fresh_, results_);
        results_ = nullptr;
    }

  private:
    int64_t rows_;
    GroupScales of_;
    float* results_ = nullptr;
    bool fresh_ = false, next_ = false;
    alignas(64) float whole_[2][2 * TILE_ROWS * PANEL];
};

// Multiplies up to two tiles of rows by a block while it widens the blocks behind.
template <bool TWO>
void few_float8_rows(const Weight& weight, const Panels& panels, const Operand& x, float* results) {
    constexpr int64_t LEAD = 2, RING = 4;
    const int64_t groups = weight.depth / weight.group, blocks = weight.group / TILE_DEPTH;
    const int64_t row_bytes = rows_of_tile(x) * 64, all = panels.count * groups * blocks;
    const char* words = panel_at(weight, panels.first);
    alignas(64) char ring[RING][FLOAT8_BLOCK_BYTES];
    int64_t wide = 0, used = 0;
    auto widen = [&]() __attribute__((always_inline)) {
        if (wide < all) widen_float8(words, TILE_DEPTH, ring[wide % RING]);
        words += TILE_DEPTH * PANEL;
        ++wide;
        TileRegisters::compiler_fence();
    };
    for (int64_t i = 0; i < LEAD; ++i) widen();
    DelayedFold fold(x.rows());
    for (int64_t p = 0; p < panels.count; ++p, results += x.rows() * PANEL) {
        const PanelScales scales(weight, panels.first + p);
        const char* rows = (const char*)x.tile(0);
        for (int64_t group = 0; group < groups; ++group) {
            TileAccumulators<TWO>::clear();
            for (int64_t block = 0; block < blocks; ++block, rows += row_bytes) {
                widen();
                add_block<TWO>(rows, x.tile_bytes(), ring[used++ % RING]);
            }
            TileAccumulators<TWO>::store(fold.buffer());
            TileRegisters::compiler_fence();
            fold.add(scales.of(group), group == 0, results);
        }
    }
    fold.flush();
}

// Multiplies up to two tiles of rows by some groups of a panel.
template <bool TWO>
void add_float8_groups(const char* rows, int64_t row_bytes, int64_t apart, const char* columns,
                       int64_t blocks, const GroupScales* scales, int64_t groups, int64_t count,
                       bool fresh, float* results) {
    DelayedFold fold(count);
    for (int64_t group = 0; group < groups; ++group) {
        TileAccumulators<TWO>::clear();
        for (int64_t block = 0; block < blocks; ++block) {
            add_block<TWO>(rows, apart, columns);
            rows += row_bytes;
            columns += FLOAT8_BLOCK_BYTES;
        }
        TileAccumulators<TWO>::store(fold.buffer());
        TileRegisters::compiler_fence();
        fold.add(scales[group], fresh && group == 0, results);
    }
    fold.flush();
}

void multiply_float8_panel(const Weight& weight, int64_t index, const Operand& x, float* results) {
    const char* words = panel_at(weight, index);
    const PanelScales all(weight, index);
    const int64_t size = weight.group, groups = weight.depth / size, some = FLOAT8_L1_DEPTH / size;
    const int64_t row_bytes = rows_of_tile(x) * 64, blocks = size / TILE_DEPTH;
    alignas(64) char columns[FLOAT8_L1_DEPTH * PANEL * 2];
    GroupScales scales[FLOAT8_L1_DEPTH / TILE_DEPTH];
    for (int64_t begin = 0; begin < groups; begin += some) {
        const int64_t part = std::min(some, groups - begin);
        widen_float8(words + begin * size * PANEL, part * size, columns);
        for (int64_t group = 0; group < part; ++group) scales[group] = all.of(begin + group);
        TileRegisters::compiler_fence();
        for (int64_t tile = 0; tile < x.tiles(); tile += 2) {
            const int64_t first = tile * TILE_ROWS;
            const auto add =
                tile + 1 < x.tiles() ? add_float8_groups<true> : add_float8_groups<false>;
            add((const char*)x.tile(tile) + begin * blocks * row_bytes, row_bytes, x.tile_bytes(),
                columns, blocks, scales, part, std::min(2 * TILE_ROWS, x.rows() - first),
                begin == 0, results + first * PANEL);
        }
    }
}

}  // namespace

void multiply_float8_tiles(const Weight& weight, const Panels& panels, const Operand& x,
                           float* results) {
    const TileRegisters registers(rows_of_tile(x), 64);
    if (x.tiles() <= 2)
        return (x.tiles() == 2 ? few_float8_rows<true> : few_float8_rows<false>)(weight, panels, x,
                                                                                 results);
    for (int64_t p = 0; p < panels.count; ++p, results += x.rows() * PANEL)
        multiply_float8_panel(weight, panels.first + p, x, results);
}

#else

void multiply_float8_tiles(const Weight&, const Panels&, const Operand&, float*) {}

#endif

}  // namespace vlm
