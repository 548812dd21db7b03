// Kernels of grouped.h for quantised activations and many rows: dot products of bytes in AMX tiles.
// Their sums are integers, so the order of additions does not matter.
#include "codes/grouped.h"
#include "products/amx_registers.h"

namespace vlm {

#if VLM_AMX

namespace {

constexpr int64_t BYTES_PREFETCH_DISTANCE = 4096;  // prefetch distance in bytes
constexpr int64_t BYTES_L1_DEPTH = 256;  // about the k of a panel's part that stays in the L1 cache
constexpr int64_t COLUMN_BYTES = PANEL * 4;

typedef uint8_t Bytes __attribute__((vector_size(64)));  // wraps around

// Unpacks a panel's codes to bytes, `[K / 4, 32]` words. Without zero points it subtracts the
// middle.
template <typename Kind>
void widen(const char* words, int64_t count, Bytes middle, char* to) {
    for (int64_t k = 0; k < count; k += 4 * Kind::PARTS) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j, words += 64, to += 64) {
#pragma GCC unroll 3
            for (int word = 0; word < Kind::WORDS_PER_STEP; ++word)
                __builtin_prefetch(words + word * COLUMN_BYTES + BYTES_PREFETCH_DISTANCE);
#pragma GCC unroll 4
            for (int part = 0; part < Kind::PARTS; ++part) {
                const Bytes codes = (Bytes)Kind::part(words, part) - middle;
                std::memcpy(to + part * COLUMN_BYTES, &codes, sizeof codes);
            }
        }
        words += (Kind::WORDS_PER_STEP - 1) * COLUMN_BYTES;
        to += (Kind::PARTS - 1) * COLUMN_BYTES;
    }
}

// Scales and zero points of a part's groups, shared by all rows.
struct PartScales {
    Floats scale[PANEL_REGISTERS][BYTES_L1_DEPTH / MIN_GROUP],
        zero[PANEL_REGISTERS][BYTES_L1_DEPTH / MIN_GROUP];

    PartScales(const PanelScales& all, int64_t begin, int64_t end, int64_t shared) {
        GroupScales of;
        for (int64_t group = begin; group < end; ++group) {
            if (group == begin || group % shared == 0) of = all.of(group / shared);
            for (int j = 0; j < PANEL_REGISTERS; ++j) {
                scale[j][group - begin] = of.scale[j];
                zero[j][group - begin] = of.zero[j];
            }
        }
    }
};

// Multiplies some groups of a tile of rows by the first or last 16 columns of a panel, with
// accumulators in registers. A tile's integers are read LAG groups after they were stored: the
// store takes that long.
template <bool ZEROS>
void byte_part(const char* rows, int64_t size, const float* scales, const float* x_sums,
               const char* columns, const Floats* scale, const Floats* zero, bool minima,
               int64_t groups, bool fresh, float* results) {
    constexpr int64_t LAG = 2, RING = 4;
    alignas(64) int32_t ring[RING][TILE_ROWS * LANES];
    Floats acc[TILE_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; ++r)
        acc[r] = fresh ? Floats{} : read<Floats>(results + r * PANEL);
    for (int64_t group = 0; group < groups + LAG; ++group) {
        if (group < groups) {
            _tile_zero(0);
            _tile_loadd(4, rows, size);
            _tile_loadd(6, columns, COLUMN_BYTES);
            if (ZEROS)
                _tile_dpbsud(0, 4, 6);
            else
                _tile_dpbssd(0, 4, 6);
            _tile_stored(0, ring[group % RING], 64);
            rows += TILE_ROWS * size;
            columns += PANEL * size;
        }
        if (group < LAG) continue;
        const int32_t* from = ring[(group - LAG) % RING];
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; ++r) {
            Floats own = __builtin_convertvector(read<Signed>(from + r * LANES), Floats);
            if (ZEROS && !minima) own = fma(-*zero, broadcast(x_sums[r]), own);
            acc[r] = fma(own, *scale * broadcast(scales[r]), acc[r]);
            if (ZEROS && minima)
                acc[r] = fma(-*zero * broadcast(scales[r]), broadcast(x_sums[r]), acc[r]);
        }
        ++scale, ++zero;
        scales += TILE_ROWS;
        x_sums += TILE_ROWS;
    }
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; ++r) std::memcpy(results + r * PANEL, &acc[r], sizeof acc[r]);
}

template <bool ZEROS>
void multiply_parts(const Weight& weight, int64_t index, const Operand& x, float* results) {
    const char* words = panel_at(weight, index);
    const PanelScales scales(weight, index);
    const int64_t size = row_group(weight), count = weight.depth / size,
                  some = BYTES_L1_DEPTH / size;
    const Bytes middle = Bytes{} + (uint8_t)(ZEROS ? 0 : (int)middle_of(weight.type));
    alignas(64) char columns[BYTES_L1_DEPTH * PANEL];
    const auto widen_part = weight.type == INT8   ? widen<Int8Bytes>
                            : weight.type == INT6 ? widen<Int6Bytes>
                            : weight.type == INT4 ? widen<Int4Bytes>
                                                  : widen<Float4Bytes>;
    const TileRegisters registers(TILE_ROWS, size);
    for (int64_t begin = 0; begin < count; begin += some) {
        const int64_t end = std::min(begin + some, count);
        widen_part(words + begin * size * panel_step(weight.type), (end - begin) * size, middle,
                   columns);
        TileRegisters::compiler_fence();
        const PartScales part(scales, begin, end, weight.group / size);
        for (int64_t tile = 0; tile < x.tiles(); ++tile) {
            const char* rows = (const char*)x.tile(tile);
            const float* own = (const float*)(rows + TILE_ROWS * weight.depth) + begin * TILE_ROWS;
            for (int j = 0; j < PANEL_REGISTERS; ++j)
                byte_part<ZEROS>(rows + begin * TILE_ROWS * size, size, own,
                                 own + count * TILE_ROWS, columns + 64 * j, part.scale[j],
                                 part.zero[j], weight.floors, end - begin, begin == 0,
                                 results + tile * TILE_ROWS * PANEL + j * LANES);
        }
    }
}

}  // namespace

void multiply_byte_tiles(const Weight& weight, int64_t index, const Operand& x, float* results) {
    (weight.zeros ? multiply_parts<true> : multiply_parts<false>)(weight, index, x, results);
}

#else

void multiply_byte_tiles(const Weight&, int64_t, const Operand&, float*) {}

#endif

}  // namespace vlm
