// The kernels of grouped.h with quantised activations: products of bytes, summed by fours.
#include "codes/row_groups.h"

namespace vlm {

namespace {

// Bytes between what is used and what is asked for.
constexpr int64_t INTEGERS_AHEAD = TILE_PRODUCTS ? 5120 : 8192;
// Of a row's loop over less than bytes. Where there are tiles, copies of a load mislead what
// foresees them (see `integer_tile`); elsewhere two have been faster than one.
constexpr int STEPS_AT_ONCE = TILE_PRODUCTS ? 1 : 2;
constexpr int64_t CACHED_K = 512;  // of a panel's part that stays in the L1 cache, about
constexpr int MOST_KEPT =
    WIDTH == 16 ? 8 : 4;                  // sums that stay in registers beside those of a group
constexpr int LINE = 64 / sizeof(Words);  // registers that a line of the memory fills

// Where a panel ends is a matter of numbers alone.
template <typename Kind, int64_t SIZE, bool PLAIN>
void row_of_panels(Weight weight, const Panels& panels, const float* x, float* sums) {
    if constexpr (PLAIN) settle<Kind>(weight, SIZE);
    using Sum = GroupSum<Kind::MOST, SIZE>;
    constexpr int64_t STEPS = SIZE / (4 * Kind::PARTS), BYTES = Kind::STORED * PANEL * 4;
    const int64_t count = weight.depth / SIZE, shared = weight.group / SIZE;
    const bool zeros = weight.zeros;
    const float *scales = x + weight.depth / 4, *x_sums = scales + count;
    const char* words = panel_at(weight, panels.first);
    const PanelScales all(weight, panels.first);
    GroupScales of;
    Floats kept[REGISTERS] = {};
    int64_t group = 0, shares = 0;
    for (int64_t i = 0, end = panels.count * count; i < end; ++i) {
        const float* own = x + group * (SIZE / 4);
        const RowGroup<Sum::OFF> row{zeros, scales + group, x_sums + group};
        Sum total[REGISTERS];
#pragma GCC unroll 8
        for (Sum& each : total) each.begin(row.first());
#pragma GCC unroll STEPS_AT_ONCE
        for (int64_t step = 0; step < STEPS; ++step) {
            Words factors[Kind::PARTS];
#pragma GCC unroll 4
            for (Words& each : factors) each = four_of(own++);
#pragma GCC unroll 8
            for (int j = 0; j < REGISTERS; ++j) {
                const char* codes = words + j * sizeof(Words);
#pragma GCC unroll 3
                for (int word = 0; word < Kind::STORED; ++word)
                    if (j % LINE == 0) ask_for_line(codes + word * PANEL * 4 + INTEGERS_AHEAD);
#pragma GCC unroll 4
                for (int part = 0; part < Kind::PARTS; ++part)
                    total[j].add(Kind::part(codes, part), factors[part]);
            }
            words += BYTES;
        }
        if (PLAIN || i == shares * shared) of = all.of(shares++);
        const bool last = group + 1 == count;
        const uint32_t more = (uint32_t)last - 1;  // all bits, or none
#pragma GCC unroll 8
        for (int j = 0; j < REGISTERS; ++j) {
            const Floats after = row.add(total[j].end(row.first()), of, j, kept[j]);
            std::memcpy(sums + j * WIDTH, &after, sizeof after);
            kept[j] = (Floats)((Words)after & more);
        }
        group = (group + 1) & (int64_t)(int32_t)more;
        sums += PANEL * last;
    }
}

// Groups `begin` to `end` of SIZE k of the rows and a panel for ROWS rows.
template <typename Kind, int ROWS, int64_t SIZE, bool PLAIN>
void integer_tile(Weight weight, int64_t index, const float* rows, int64_t begin, int64_t end,
                  float* sums) {
    if constexpr (PLAIN) settle<Kind>(weight, SIZE);
    const PanelScales all(weight, index);
    using Sum = GroupSum<Kind::MOST, SIZE>;
    constexpr int64_t STEPS = Groups<Kind, ROWS, SIZE>::STEPS;
    constexpr bool KEPT = ROWS * REGISTERS <= MOST_KEPT;
    // Processors foresee what an instruction will read from what it read before: copies of a load,
    // each with strides of its own, make them ask for the wrong things. So steps are not unrolled.
    // A row of bytes waits for the memory alone, and has every line read by one instruction.
    constexpr bool BY_LINES = Kind::PARTS == 1 && ROWS == 1;
    const int64_t shared = weight.group / SIZE;
    const bool zeros = weight.zeros;
    const Groups<Kind, ROWS, SIZE> at(weight, index, rows, begin);
    const char* words = at.words;
    const float *x = at.x, *scales = at.scales, *x_sums = at.sums;
    Floats kept[ROWS][REGISTERS] = {};
    auto place = [=](int r, int j) { return sums + r * PANEL + j * WIDTH; };
    auto each_sum = [](const auto& use) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < REGISTERS; ++j) use(r, j);
    };
    if (KEPT && begin) each_sum([&](int r, int j) { kept[r][j] = read<Floats>(place(r, j)); });
    GroupScales of;
    int64_t shares = begin / shared;
    for (int64_t group = begin; group < end; ++group, scales += ROWS, x_sums += ROWS) {
        auto row = [&](int r) { return RowGroup<Sum::OFF>{zeros, scales + r, x_sums + r}; };
        Sum total[ROWS][REGISTERS];
        each_sum([&](int r, int j) { total[r][j].begin(row(r).first()); });
        auto add_step = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 3
            for (int word = 0; word < Kind::STORED; ++word)
                ask_for_weight(words + word * PANEL * 4 + INTEGERS_AHEAD);
#pragma GCC unroll 4
            for (int part = 0; part < Kind::PARTS; ++part, x += ROWS) {
                Words codes[REGISTERS];
#pragma GCC unroll 8
                for (int j = 0; j < REGISTERS; ++j)
                    codes[j] = Kind::part(words + j * sizeof(Words), part);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r) {
                    const Words own = four_of(x + r);
#pragma GCC unroll 8
                    for (int j = 0; j < REGISTERS; ++j) total[r][j].add(codes[j], own);
                }
            }
            words += Groups<Kind, ROWS, SIZE>::BYTES;
        };
        // The sums of a step's lines take turns.
        auto add_line = [&](const float* own) __attribute__((always_inline)) {
            ask_for_line(words + INTEGERS_AHEAD);
            Sum sums[LINE];
#pragma GCC unroll 4
            for (int j = 0; j < LINE; ++j, words += sizeof(Words)) {
                sums[j] = total[0][j];
                sums[j].add(read<Words>(words), four_of(own));
            }
#pragma GCC unroll 8
            for (int j = LINE; j < REGISTERS; ++j) total[0][j - LINE] = total[0][j];
#pragma GCC unroll 4
            for (int j = 0; j < LINE; ++j) total[0][REGISTERS - LINE + j] = sums[j];
        };
        if (BY_LINES) {
            constexpr int LINES = REGISTERS / LINE;  // of a step
#pragma GCC unroll 1
            for (int64_t line = 0; line < STEPS * LINES; ++line) add_line(x + line / LINES);
            x += STEPS;
        } else {
#pragma GCC unroll 1
            for (int64_t step = 0; step < STEPS; ++step) add_step();
        }
        if (PLAIN || group == begin || group == shares * shared) of = all.of(shares++);
        each_sum([&](int r, int j) {
            Floats before = kept[r][j];
            if (!KEPT) before = group ? read<Floats>(place(r, j)) : Floats{};
            const Floats after = row(r).add(total[r][j].end(row(r).first()), of, j, before);
            if (KEPT)
                kept[r][j] = after;
            else
                std::memcpy(place(r, j), &after, sizeof after);
        });
    }
    if (KEPT)
        each_sum([&](int r, int j) { std::memcpy(place(r, j), &kept[r][j], sizeof(Floats)); });
}

// The same where registers are few: a group of the columns of one of them at a time.
template <typename Kind, int ROWS, int64_t SIZE, bool PLAIN>
void integer_columns(Weight weight, int64_t index, const float* rows, int64_t begin, int64_t end,
                     float* sums) {
    if constexpr (PLAIN) settle<Kind>(weight, SIZE);
    const PanelScales all(weight, index);
    using Sum = GroupSum<Kind::MOST, SIZE>;
    constexpr int64_t STEPS = Groups<Kind, ROWS, SIZE>::STEPS;
    constexpr int64_t BYTES = Groups<Kind, ROWS, SIZE>::BYTES;
    const int64_t shared = weight.group / SIZE;
    const bool zeros = weight.zeros;
    const Groups<Kind, ROWS, SIZE> at(weight, index, rows, begin);
    const char* words = at.words;
    const float *x = at.x, *scales = at.scales, *x_sums = at.sums;
    GroupScales of;
    int64_t shares = begin / shared;
    for (int64_t group = begin; group < end; ++group, scales += ROWS, x_sums += ROWS) {
        auto row = [&](int r) { return RowGroup<Sum::OFF>{zeros, scales + r, x_sums + r}; };
        if (PLAIN || group == begin || group == shares * shared) of = all.of(shares++);
        for (int64_t byte = 0; byte < STEPS * BYTES; byte += 128)
            ask_for_weight(words + byte + INTEGERS_AHEAD);
#pragma GCC unroll 8
        for (int j = 0; j < REGISTERS; ++j) {
            Sum total[ROWS];
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) total[r].begin(row(r).first());
            const float* own = x;
#pragma GCC unroll 1
            for (int64_t step = 0; step < STEPS; ++step)
#pragma GCC unroll 4
                for (int part = 0; part < Kind::PARTS; ++part, own += ROWS) {
                    const char* from = words + step * BYTES + j * sizeof(Words);
                    const Words codes = Kind::part(from, part);
#pragma GCC unroll 12
                    for (int r = 0; r < ROWS; ++r) total[r].add(codes, four_of(own + r));
                }
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) {
                float* to = sums + r * PANEL + j * WIDTH;
                const Floats before = group ? read<Floats>(to) : Floats{};
                const Floats after = row(r).add(total[r].end(row(r).first()), of, j, before);
                std::memcpy(to, &after, sizeof after);
            }
        }
        words += STEPS * BYTES, x += SIZE / 4 * ROWS;
    }
}

typedef void (*IntegerTile)(Weight, int64_t, const float*, int64_t, int64_t, float*);

template <typename Kind>
IntegerTile integer_tile_of(const Weight& weight, int64_t rows) {
    constexpr bool WORTH = std::is_same_v<Kind, HalfByteWords>;
    return by_groups<IntegerTile, Kind, WORTH>(weight, [=](auto size, auto plain) {
        constexpr int64_t SIZE = decltype(size)::value;
        constexpr bool PLAIN = decltype(plain)::value;
        return by_rows<IntegerTile, MOST_ROWS>(rows, [](auto count) -> IntegerTile {
            if constexpr (WIDTH == 8 && decltype(count)::value > 1)
                return integer_columns<Kind, count, SIZE, PLAIN>;
            else
                return integer_tile<Kind, count, SIZE, PLAIN>;
        });
    });
}

template <typename Kind>
void multiply_by_fours(const Weight& weight, int64_t index, const Operand& x, float* sums) {
    const int64_t size = row_group(weight), count = weight.depth / size;
    const int64_t some = x.groups() == 1 ? count : CACHED_K / size;
    for (int64_t begin = 0; begin < count; begin += some)
        for (int64_t i = 0; i < x.groups(); ++i)
            integer_tile_of<Kind>(weight, x.size(i))(weight, index, x.group(i), begin,
                                                     std::min(begin + some, count),
                                                     sums + x.first(i) * PANEL);
}

template <typename Kind>
void multiply_row_by_fours(const Weight& weight, const Panels& panels, const float* x,
                           float* sums) {
    typedef void (*Row)(Weight, const Panels&, const float*, float*);
    const auto row = by_groups<Row, Kind, true>(weight, [](auto size, auto plain) -> Row {
        return row_of_panels<Kind, decltype(size)::value, decltype(plain)::value>;
    });
    row(weight, panels, x, sums);
}

}  // namespace

void multiply_integers(const Weight& weight, int64_t index, const Operand& x, float* sums) {
    if (x.in_tiles()) return multiply_byte_tiles(weight, index, x, sums);
    if (weight.type == INT8) return multiply_by_fours<ByteWords>(weight, index, x, sums);
    if (weight.type == INT6) return multiply_by_fours<SixBitWords>(weight, index, x, sums);
    if (weight.type == INT4) return multiply_by_fours<HalfByteWords>(weight, index, x, sums);
    multiply_by_fours<LookedUpWords>(weight, index, x, sums);
}

void multiply_integer_row(const Weight& weight, const Panels& panels, const Operand& x,
                          float* sums) {
    const auto multiply = weight.type == INT4   ? multiply_row_by_fours<HalfByteWords>
                          : weight.type == INT6 ? multiply_row_by_fours<SixBitWords>
                                                : multiply_row_by_fours<LookedUpWords>;
    multiply(weight, panels, x.group(0), sums);
}

}  // namespace vlm
