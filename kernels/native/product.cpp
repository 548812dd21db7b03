// The kernels of product.h: a tile of rows times a panel, sums in registers.
#include "product.h"

#include "grouped.h"
#include "singles.h"

namespace vlm {

namespace {

constexpr int64_t AHEAD = 4096;  // bytes between what is used and what is asked for, of one group

// What a tile asks the memory for while it computes: `step` bytes in every step, up to 128.
struct Next {
    const char* at;
    int64_t step;
};

inline Words spread_word(const float* word) {
    uint32_t bits;
    std::memcpy(&bits, word, sizeof bits);
    return bits - Words{};
}

// What a panel holds: how many bytes of a step (a k or a pair of k), and how such a step is added
// to the sums of ROWS rows. `x` are the step's values, next to each other.
struct HalfSingles {
    static constexpr int64_t BYTES = 2 * PANEL, STEP = 1;
    template <int ROWS>
    static inline void add(const char* step, const float* x, Floats (*total)[REGISTERS]) {
#pragma GCC unroll 8
        for (int j = 0; j < REGISTERS; ++j) {
            const Floats w = from_float16(step + 2 * j * WIDTH);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) total[r][j] = fused(spread(x[r]), w, total[r][j]);
        }
    }
};

// Pairs of bfloat16, each value widened where it stands.
struct WidenedPairs {
    static constexpr int64_t BYTES = 4 * PANEL, STEP = 2;
    template <int ROWS>
    static inline void add(const char* step, const float* x, Floats (*total)[REGISTERS]) {
#pragma GCC unroll 8
        for (int j = 0; j < REGISTERS; ++j) {
            const Words pairs = read<Words>(step + j * sizeof(Words));
            const Floats even = (Floats)(pairs << 16), odd = (Floats)(pairs & 0xffff0000u);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) {
                total[r][j] = fused(spread(x[r]), even, total[r][j]);
                total[r][j] = fused(spread(x[ROWS + r]), odd, total[r][j]);
            }
        }
    }
};

struct Pairs {
    static constexpr int64_t BYTES = 4 * PANEL, STEP = 1;
    template <int ROWS>
    static inline void add(const char* step, const float* x, Floats (*total)[REGISTERS]) {
        Words w[REGISTERS];
#pragma GCC unroll 8
        for (int j = 0; j < REGISTERS; ++j) w[j] = read<Words>(step + j * sizeof(Words));
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const Words factor = spread_word(x + r);
#pragma GCC unroll 8
            for (int j = 0; j < REGISTERS; ++j)
                total[r][j] = fused_pairs(factor, w[j], total[r][j]);
        }
    }
};

template <typename Kind, int ROWS>
void tile(const char* panel, const float* x, int64_t steps, Next next, bool fresh, float* sums) {
    Floats total[ROWS][REGISTERS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < REGISTERS; ++j)
            total[r][j] = fresh ? Floats{} : read<Floats>(sums + r * PANEL + j * WIDTH);
    for (int64_t s = 0; s < steps; ++s) {
        __builtin_prefetch(next.at);
        __builtin_prefetch(next.at + 64);
        next.at += next.step;
        Kind::template add<ROWS>(panel, x, total);
        panel += Kind::BYTES;
        x += Kind::STEP * ROWS;
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < REGISTERS; ++j)
            std::memcpy(sums + r * PANEL + j * WIDTH, &total[r][j], sizeof total[r][j]);
}

typedef void (*Tile)(const char*, const float*, int64_t, Next, bool, float*);

template <typename Kind>
Tile tile_of(int64_t rows) {
    if constexpr (MOST_ROWS == 3) {
        constexpr Tile tiles[] = {tile<Kind, 1>, tile<Kind, 2>, tile<Kind, 3>};
        return tiles[rows - 1];
    } else {
        constexpr Tile tiles[] = {tile<Kind, 1>, tile<Kind, 2>,  tile<Kind, 3>,  tile<Kind, 4>,
                                  tile<Kind, 5>, tile<Kind, 6>,  tile<Kind, 7>,  tile<Kind, 8>,
                                  tile<Kind, 9>, tile<Kind, 10>, tile<Kind, 11>, tile<Kind, 12>};
        return tiles[rows - 1];
    }
}

// 16-bit values of a part of a panel as float32, `[k, PANEL]`.
void widen(const char* panel, int64_t type, int64_t count, float* to) {
    if (type == FLOAT16) {
        for (int64_t i = 0; i < count * PANEL; i += LANES)
            store(to + i, load((const f16*)panel + i));
        return;
    }
    for (int64_t k = 0; k < count; k += 2, to += 2 * PANEL, panel += 4 * PANEL) {
        for (int j = 0; j < PANEL; j += WIDTH) {
            const Words pairs = read<Words>(panel + 4 * j);
            const Words even = pairs << 16, odd = pairs & 0xffff0000u;
            std::memcpy(to + j, &even, sizeof even);
            std::memcpy(to + PANEL + j, &odd, sizeof odd);
        }
    }
}

template <typename Kind>
void all_groups(const char* panel, const Operand& x, int64_t begin, int64_t steps, Next next,
                float* sums) {
    next.step = (next.step + x.groups() - 1) / x.groups();  // Every group asks for its share.
    for (int64_t group = 0; group < x.groups(); ++group) {
        const int64_t size = x.size(group);
        tile_of<Kind>(size)(panel, x.group(group) + begin * size, steps, next, begin == 0,
                            sums + x.first(group) * PANEL);
        next.at += steps * next.step;
    }
}

}  // namespace

void accumulate(const void* panel, int64_t type, const Operand& x, int64_t begin, int64_t end,
                float* sums) {
    const char* part = (const char*)panel + begin * PANEL * bytes_of(type);
    const int64_t count = padded(end, type) - begin;
    const bool once = x.groups() == 1;
    // Several groups work on a part from the cache, while the next one comes.
    const Next next{part + (once ? AHEAD : count * PANEL * bytes_of(type)),
                    type == FLOAT16 ? 2 * PANEL : 4 * PANEL};
    if (x.pairs()) return all_groups<Pairs>(part, x, begin / 2, count / 2, next, sums);
    if (type == FLOAT32) return all_groups<Singles>(part, x, begin, count, next, sums);
    if (once && type == BFLOAT16)
        return all_groups<WidenedPairs>(part, x, begin, count / 2, next, sums);
    if (once) return all_groups<HalfSingles>(part, x, begin, count, next, sums);
    alignas(64) float wide[DEPTH * PANEL];
    for (int64_t k = begin; k < end; k += DEPTH) {
        const int64_t own = std::min(DEPTH, begin + count - k);
        widen(part, type, own, wide);
        part += own * PANEL * 2;
        all_groups<Singles>((const char*)wide, x, k, own, {part, 2 * PANEL}, sums);
    }
}

namespace {

void multiply_dense(const Weight& weight, int64_t index, const Operand& x, float* sums) {
    const char* panel = (const char*)weight.packed + index * panel_bytes(weight.depth, weight.type);
    const int64_t size = x.groups() == 1 ? weight.depth : x.pairs() ? 2 * DEPTH : DEPTH;
    for (int64_t begin = 0; begin < weight.depth; begin += size)
        accumulate(panel, weight.type, x, begin, std::min(begin + size, weight.depth), sums);
}

}  // namespace

void multiply(const Weight& weight, int64_t index, const Operand& x, float* sums) {
    if (is_codes(weight.type))
        multiply_codes(weight, index, x, sums);
    else
        multiply_dense(weight, index, x, sums);
    if (!weight.bias) return;
    const int64_t column = index * PANEL, count = std::min<int64_t>(PANEL, weight.columns - column);
    float bias[PANEL] = {};
    std::memcpy(bias, weight.bias + column, count * sizeof(float));
    for (int64_t r = 0; r < x.rows(); ++r)
        for (int j = 0; j < PANEL; j += LANES)
            store(sums + r * PANEL + j, load(sums + r * PANEL + j) + load(bias + j));
}

Workplace& own_workplace() {
    static thread_local Workplace own;
    return own;
}

}  // namespace vlm
