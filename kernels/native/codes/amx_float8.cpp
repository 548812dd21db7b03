// The kernels of grouped.h for rows of bfloat16 and codes that bfloat16 holds exactly, e4m3: the
// sums of their groups are computed by tiles (AMX).
#include "codes/grouped.h"
#include "products/amx_products.h"
#include "products/amx_registers.h"

namespace vlm {

#if VLM_TILES

namespace {

constexpr int64_t FLOAT8_AHEAD = 8192;  // bytes between what is used and what is asked for
constexpr int64_t FLOAT8_K = 128;       // of a panel's part that stays in the L1 cache, about
constexpr int64_t PAIRS_BYTES = PANEL * 4, FLOAT8_BLOCK_BYTES = TILE_DEPTH / 2 * PAIRS_BYTES;

// Some k of a panel as a tile has them: `[k / 2, 32]` pairs.
void widen_float8(const char* words, int64_t count, char* to) {
    for (int64_t k = 0; k < count; k += 4, to += 2 * PAIRS_BYTES)
        for (int64_t at = 0; at < PAIRS_BYTES; at += 64, words += 64) {
            ask_for_line(words + FLOAT8_AHEAD);
            const Words codes = read<Words>(words);
            const Words first = pair_of_float8<false>(codes), last = pair_of_float8<true>(codes);
            std::memcpy(to + at, &first, sizeof first);
            std::memcpy(to + at + PAIRS_BYTES, &last, sizeof last);
        }
}

// Adds what one or two tiles of rows that lie `apart` bytes from each other give with a block.
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

// total = group's sum * scale + total
VLM_INLINE void fold_group(const float* whole, int64_t rows, const GroupScales& of, bool fresh,
                           float* sums) {
    for (const float* end = whole + rows * PANEL; whole < end; whole += PANEL, sums += PANEL)
#pragma GCC unroll 2
        for (int j = 0; j < REGISTERS; ++j) {
            const Floats before = fresh ? Floats{} : read<Floats>(sums + j * WIDTH);
            const Floats total = fused(read<Floats>(whole + j * WIDTH), of.scale[j], before);
            std::memcpy(sums + j * WIDTH, &total, sizeof total);
        }
}

// What is done with the sums of a group when those of the next one are under way: it takes as long
// until they can be read.
class LateFolding {
  public:
    explicit LateFolding(int64_t rows) : rows_(rows) {}

    // Where the sums of the next group go.
    float* place() { return whole_[next_]; }

    void add(const GroupScales& of, bool fresh, float* sums) {
        end();
        of_ = of, fresh_ = fresh, sums_ = sums;
        next_ = !next_;
    }

    void end() {
        if (sums_) fold_group(whole_[!next_], rows_, of_, fresh_, sums_);
        sums_ = nullptr;
    }

  private:
    int64_t rows_;
    GroupScales of_;
    float* sums_ = nullptr;
    bool fresh_ = false, next_ = false;
    alignas(64) float whole_[2][2 * TILE_ROWS * PANEL];
};

// Up to two tiles of rows meet a block while those behind it are widened.
template <bool TWO>
void few_float8_rows(const Weight& weight, const Panels& panels, const Operand& x, float* sums) {
    constexpr int64_t LEAD = 2, KEPT = 4;
    const int64_t groups = weight.depth / weight.group, blocks = weight.group / TILE_DEPTH;
    const int64_t row_bytes = rows_of_tile(x) * 64, all = panels.count * groups * blocks;
    const char* words = panel_at(weight, panels.first);
    alignas(64) char kept[KEPT][FLOAT8_BLOCK_BYTES];
    int64_t wide = 0, used = 0;
    auto widen = [&]() __attribute__((always_inline)) {
        if (wide < all) widen_float8(words, TILE_DEPTH, kept[wide % KEPT]);
        words += TILE_DEPTH * PANEL;
        ++wide;
        TileRegisters::written();
    };
    for (int64_t i = 0; i < LEAD; ++i) widen();
    LateFolding late(x.rows());
    for (int64_t p = 0; p < panels.count; ++p, sums += x.rows() * PANEL) {
        const PanelScales scales(weight, panels.first + p);
        const char* rows = (const char*)x.tile(0);
        for (int64_t group = 0; group < groups; ++group) {
            TileSums<TWO>::clear();
            for (int64_t block = 0; block < blocks; ++block, rows += row_bytes) {
                widen();
                add_block<TWO>(rows, x.tile_bytes(), kept[used++ % KEPT]);
            }
            TileSums<TWO>::store(late.place());
            TileRegisters::written();
            late.add(scales.of(group), group == 0, sums);
        }
    }
    late.end();
}

// Some groups of a panel for up to two tiles of rows.
template <bool TWO>
void add_float8_groups(const char* rows, int64_t row_bytes, int64_t apart, const char* columns,
                       int64_t blocks, const GroupScales* scales, int64_t groups, int64_t count,
                       bool fresh, float* sums) {
    LateFolding late(count);
    for (int64_t group = 0; group < groups; ++group) {
        TileSums<TWO>::clear();
        for (int64_t block = 0; block < blocks; ++block) {
            add_block<TWO>(rows, apart, columns);
            rows += row_bytes;
            columns += FLOAT8_BLOCK_BYTES;
        }
        TileSums<TWO>::store(late.place());
        TileRegisters::written();
        late.add(scales[group], fresh && group == 0, sums);
    }
    late.end();
}

void multiply_float8_panel(const Weight& weight, int64_t index, const Operand& x, float* sums) {
    const char* words = panel_at(weight, index);
    const PanelScales all(weight, index);
    const int64_t size = weight.group, groups = weight.depth / size, some = FLOAT8_K / size;
    const int64_t row_bytes = rows_of_tile(x) * 64, blocks = size / TILE_DEPTH;
    alignas(64) char columns[FLOAT8_K * PANEL * 2];
    GroupScales scales[FLOAT8_K / TILE_DEPTH];
    for (int64_t begin = 0; begin < groups; begin += some) {
        const int64_t part = std::min(some, groups - begin);
        widen_float8(words + begin * size * PANEL, part * size, columns);
        for (int64_t group = 0; group < part; ++group) scales[group] = all.of(begin + group);
        TileRegisters::written();
        for (int64_t tile = 0; tile < x.tiles(); tile += 2) {
            const int64_t first = tile * TILE_ROWS;
            const auto add =
                tile + 1 < x.tiles() ? add_float8_groups<true> : add_float8_groups<false>;
            add((const char*)x.tile(tile) + begin * blocks * row_bytes, row_bytes, x.tile_bytes(),
                columns, blocks, scales, part, std::min(2 * TILE_ROWS, x.rows() - first),
                begin == 0, sums + first * PANEL);
        }
    }
}

}  // namespace

void multiply_float8_tiles(const Weight& weight, const Panels& panels, const Operand& x,
                           float* sums) {
    const TileRegisters registers(rows_of_tile(x), 64);
    if (x.tiles() <= 2)
        return (x.tiles() == 2 ? few_float8_rows<true> : few_float8_rows<false>)(weight, panels, x,
                                                                                 sums);
    for (int64_t p = 0; p < panels.count; ++p, sums += x.rows() * PANEL)
        multiply_float8_panel(weight, panels.first + p, x, sums);
}

#else

void multiply_float8_tiles(const Weight&, const Panels&, const Operand&, float*) {}

#endif

}  // namespace vlm
