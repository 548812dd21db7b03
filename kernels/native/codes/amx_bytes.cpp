// The kernels of grouped.h with quantised activations for many rows, where sums of products of
// bytes are computed by tiles (AMX). They are whole numbers, so that bits do not depend on who adds
// them.
#include "codes/grouped.h"
#include "products/amx_registers.h"

namespace vlm {

#if VLM_TILES

namespace {

constexpr int64_t WORDS_AHEAD = 4096;  // bytes between what is used and what is asked for
constexpr int64_t PART_K = 256;        // of a panel's part that stays in the L1 cache, about
constexpr int64_t COLUMN_BYTES = PANEL * 4;

typedef uint8_t Bytes __attribute__((vector_size(64)));  // whose sums may wrap

// A panel's codes as bytes, less the middle unless there are zero points: `[K / 4, 32]` words.
template <typename Kind>
void widen(const char* words, int64_t count, Bytes middle, char* to) {
    for (int64_t k = 0; k < count; k += 4 * Kind::PARTS) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j, words += 64, to += 64) {
#pragma GCC unroll 3
            for (int word = 0; word < Kind::STORED; ++word)
                __builtin_prefetch(words + word * COLUMN_BYTES + WORDS_AHEAD);
#pragma GCC unroll 4
            for (int part = 0; part < Kind::PARTS; ++part) {
                const Bytes codes = (Bytes)Kind::part(words, part) - middle;
                std::memcpy(to + part * COLUMN_BYTES, &codes, sizeof codes);
            }
        }
        words += (Kind::STORED - 1) * COLUMN_BYTES;
        to += (Kind::PARTS - 1) * COLUMN_BYTES;
    }
}

// What gives the sums of a part's groups their values, for all rows.
struct PartScales {
    Floats scale[REGISTERS][PART_K / LEAST_GROUP], zero[REGISTERS][PART_K / LEAST_GROUP];

    PartScales(const PanelScales& all, int64_t begin, int64_t end, int64_t shared) {
        GroupScales of;
        for (int64_t group = begin; group < end; ++group) {
            if (group == begin || group % shared == 0) of = all.of(group / shared);
            for (int j = 0; j < REGISTERS; ++j) {
                scale[j][group - begin] = of.scale[j];
                zero[j][group - begin] = of.zero[j];
            }
        }
    }
};

// Some groups of a tile of rows times a panel's first or last 16 columns, with sums in registers.
// Whole numbers are read some groups after they have been written, which takes as long.
template <bool ZEROS>
void byte_part(const char* rows, int64_t size, const float* scales, const float* x_sums,
               const char* columns, const Floats* scale, const Floats* zero, int64_t groups,
               bool fresh, float* sums) {
    constexpr int64_t BEHIND = 2, KEPT = 4;
    alignas(64) int32_t whole[KEPT][TILE_ROWS * LANES];
    Floats total[TILE_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; ++r)
        total[r] = fresh ? Floats{} : read<Floats>(sums + r * PANEL);
    for (int64_t group = 0; group < groups + BEHIND; ++group) {
        if (group < groups) {
            _tile_zero(0);
            _tile_loadd(4, rows, size);
            _tile_loadd(6, columns, COLUMN_BYTES);
            if (ZEROS)
                _tile_dpbsud(0, 4, 6);
            else
                _tile_dpbssd(0, 4, 6);
            _tile_stored(0, whole[group % KEPT], 64);
            rows += TILE_ROWS * size;
            columns += PANEL * size;
        }
        if (group < BEHIND) continue;
        const int32_t* from = whole[(group - BEHIND) % KEPT];
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; ++r) {
            Floats own = __builtin_convertvector(read<Signed>(from + r * LANES), Floats);
            if (ZEROS) own = fused(-*zero, spread(x_sums[r]), own);
            total[r] = fused(own, *scale * spread(scales[r]), total[r]);
        }
        ++scale, ++zero;
        scales += TILE_ROWS;
        x_sums += TILE_ROWS;
    }
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; ++r) std::memcpy(sums + r * PANEL, &total[r], sizeof total[r]);
}

template <bool ZEROS>
void multiply_parts(const Weight& weight, int64_t index, const Operand& x, float* sums) {
    const char* words = panel_at(weight, index);
    const PanelScales scales(weight, index);
    const int64_t size = row_group(weight), count = weight.depth / size, some = PART_K / size;
    const Bytes middle = Bytes{} + (uint8_t)(ZEROS ? 0 : (int)middle_of(weight.type));
    alignas(64) char columns[PART_K * PANEL];
    const auto widen_part = weight.type == INT8   ? widen<ByteWords>
                            : weight.type == INT6 ? widen<SixBitWords>
                            : weight.type == INT4 ? widen<HalfByteWords>
                                                  : widen<LookedUpWords>;
    const TileRegisters registers(TILE_ROWS, size);
    for (int64_t begin = 0; begin < count; begin += some) {
        const int64_t end = std::min(begin + some, count);
        widen_part(words + begin * size * panel_step(weight.type), (end - begin) * size, middle,
                   columns);
        TileRegisters::written();
        const PartScales part(scales, begin, end, weight.group / size);
        for (int64_t tile = 0; tile < x.tiles(); ++tile) {
            const char* rows = (const char*)x.tile(tile);
            const float* own = (const float*)(rows + TILE_ROWS * weight.depth) + begin * TILE_ROWS;
            for (int j = 0; j < REGISTERS; ++j)
                byte_part<ZEROS>(rows + begin * TILE_ROWS * size, size, own,
                                 own + count * TILE_ROWS, columns + 64 * j, part.scale[j],
                                 part.zero[j], end - begin, begin == 0,
                                 sums + tile * TILE_ROWS * PANEL + j * LANES);
        }
    }
}

}  // namespace

void multiply_byte_tiles(const Weight& weight, int64_t index, const Operand& x, float* sums) {
    (weight.zeros ? multiply_parts<true> : multiply_parts<false>)(weight, index, x, sums);
}

#else

void multiply_byte_tiles(const Weight&, int64_t, const Operand&, float*) {}

#endif

}  // namespace vlm
