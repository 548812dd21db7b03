// Kernels of grouped.h for quantised activations: dot products of four bytes.
#include "codes/row_groups.h"

namespace vlm {

namespace {

// Prefetch distance in bytes.
constexpr int64_t INTEGERS_PREFETCH_DISTANCE = HAS_AMX ? 5120 : 8192;
// Unroll factor of a single row's loop over codes of less than a byte. With AMX, copies of a load
// mislead the hardware prefetcher (see `integer_kernel`); elsewhere a factor of two was faster.
constexpr int UNROLLED_STEPS = HAS_AMX ? 1 : 2;
// About the k of a panel's part that stays in the L1 cache.
constexpr int64_t INTEGERS_L1_DEPTH = 512;
// Results that stay in registers beside the accumulators of a group.
constexpr int MAX_HELD_REGISTERS = WIDTH == 16 ? 8 : 4;
constexpr int LINE_REGISTERS = 64 / sizeof(Words);  // registers per cache line

// A single loop runs over all panels. The end of a panel is arithmetic, not a branch, so that
// nothing can be mispredicted.
template <typename Kind, int64_t SIZE, bool PLAIN>
void row_of_panels(Weight weight, const Panels& panels, const float* x, float* results) {
    if constexpr (PLAIN) assume_plain<Kind>(weight, SIZE);
    using Acc = GroupAccumulator<Kind::MAX_CODE, SIZE>;
    constexpr int64_t STEPS = SIZE / (4 * Kind::PARTS), BYTES = Kind::WORDS_PER_STEP * PANEL * 4;
    const int64_t count = weight.depth / SIZE, shared = weight.group / SIZE;
    const bool zeros = weight.zeros, minima = weight.floors;
    const float *scales = x + weight.depth / 4, *x_sums = scales + count;
    const char* words = panel_at(weight, panels.first);
    const PanelScales all(weight, panels.first);
    GroupScales of;
    Floats held[PANEL_REGISTERS] = {};
    int64_t group = 0, shares = 0;
    for (int64_t i = 0, end = panels.count * count; i < end; ++i) {
        const float* own = x + group * (SIZE / 4);
        const RowGroupScale<Acc::OFFSET> row{zeros, minima, scales + group, x_sums + group};
        Acc acc[PANEL_REGISTERS];
#pragma GCC unroll 8
        for (Acc& each : acc) each.begin(row.first());
#pragma GCC unroll UNROLLED_STEPS
        for (int64_t step = 0; step < STEPS; ++step) {
            Words factors[Kind::PARTS];
#pragma GCC unroll 4
            for (Words& each : factors) each = broadcast4(own++);
#pragma GCC unroll 8
            for (int j = 0; j < PANEL_REGISTERS; ++j) {
                const char* codes = words + j * sizeof(Words);
#pragma GCC unroll 3
                for (int word = 0; word < Kind::WORDS_PER_STEP; ++word)
                    if (j % LINE_REGISTERS == 0)
                        prefetch_line(codes + word * PANEL * 4 + INTEGERS_PREFETCH_DISTANCE);
#pragma GCC unroll 4
                for (int part = 0; part < Kind::PARTS; ++part)
                    acc[j].add(Kind::part(codes, part), factors[part]);
            }
            words += BYTES;
        }
        if (PLAIN || i == shares * shared) of = all.of(shares++);
        const bool last = group + 1 == count;
        const uint32_t more = (uint32_t)last - 1;  // all bits, or none
#pragma GCC unroll 8
        for (int j = 0; j < PANEL_REGISTERS; ++j) {
            const Floats after = row.add(acc[j].end(row.first()), of, j, held[j]);
            std::memcpy(results + j * WIDTH, &after, sizeof after);
            held[j] = (Floats)((Words)after & more);
        }
        group = (group + 1) & (int64_t)(int32_t)more;
        results += PANEL * last;
    }
}

// Multiplies ROWS rows by groups `begin` to `end`, of SIZE k each, of a panel.
template <typename Kind, int ROWS, int64_t SIZE, bool PLAIN>
void integer_kernel(Weight weight, int64_t index, const float* rows, int64_t begin, int64_t end,
                    float* results) {
    if constexpr (PLAIN) assume_plain<Kind>(weight, SIZE);
    const PanelScales all(weight, index);
    using Acc = GroupAccumulator<Kind::MAX_CODE, SIZE>;
    constexpr int64_t STEPS = GroupCursor<Kind, ROWS, SIZE>::STEPS;
    constexpr bool HELD = ROWS * PANEL_REGISTERS <= MAX_HELD_REGISTERS;
    // The hardware prefetcher predicts an instruction's loads from its earlier ones. Copies of a
    // load have strides of their own and mislead it, so steps are not unrolled. A single row of
    // bytes is memory-bound: every line is read by the same instruction.
    constexpr bool BY_LINES = Kind::PARTS == 1 && ROWS == 1;
    const int64_t shared = weight.group / SIZE;
    const bool zeros = weight.zeros, minima = weight.floors;
    const GroupCursor<Kind, ROWS, SIZE> at(weight, index, rows, begin);
    const char* words = at.words;
    const float *x = at.x, *scales = at.scales, *x_sums = at.sums;
    Floats held[ROWS][PANEL_REGISTERS] = {};
    auto place = [=](int r, int j) { return results + r * PANEL + j * WIDTH; };
    auto each_sum = [](const auto& use) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < PANEL_REGISTERS; ++j) use(r, j);
    };
    if (HELD && begin) each_sum([&](int r, int j) { held[r][j] = read<Floats>(place(r, j)); });
    GroupScales of;
    int64_t shares = begin / shared;
    for (int64_t group = begin; group < end; ++group, scales += ROWS, x_sums += ROWS) {
        auto row = [&](int r) {
            return RowGroupScale<Acc::OFFSET>{zeros, minima, scales + r, x_sums + r};
        };
        Acc acc[ROWS][PANEL_REGISTERS];
        each_sum([&](int r, int j) { acc[r][j].begin(row(r).first()); });
        auto add_step = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 3
            for (int word = 0; word < Kind::WORDS_PER_STEP; ++word)
                prefetch_weight(words + word * PANEL * 4 + INTEGERS_PREFETCH_DISTANCE);
#pragma GCC unroll 4
            for (int part = 0; part < Kind::PARTS; ++part, x += ROWS) {
                Words codes[PANEL_REGISTERS];
#pragma GCC unroll 8
                for (int j = 0; j < PANEL_REGISTERS; ++j)
                    codes[j] = Kind::part(words + j * sizeof(Words), part);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r) {
                    const Words own = broadcast4(x + r);
#pragma GCC unroll 8
                    for (int j = 0; j < PANEL_REGISTERS; ++j) acc[r][j].add(codes[j], own);
                }
            }
            words += GroupCursor<Kind, ROWS, SIZE>::BYTES;
        };
        // Rotates the accumulators of a step's lines, so that one copy of the code handles all
        // lines.
        auto add_line = [&](const float* own) __attribute__((always_inline)) {
            prefetch_line(words + INTEGERS_PREFETCH_DISTANCE);
            Acc next[LINE_REGISTERS];
#pragma GCC unroll 4
            for (int j = 0; j < LINE_REGISTERS; ++j, words += sizeof(Words)) {
                next[j] = acc[0][j];
                next[j].add(read<Words>(words), broadcast4(own));
            }
#pragma GCC unroll 8
            for (int j = LINE_REGISTERS; j < PANEL_REGISTERS; ++j)
                acc[0][j - LINE_REGISTERS] = acc[0][j];
#pragma GCC unroll 4
            for (int j = 0; j < LINE_REGISTERS; ++j)
                acc[0][PANEL_REGISTERS - LINE_REGISTERS + j] = next[j];
        };
        if (BY_LINES) {
            constexpr int LINES = PANEL_REGISTERS / LINE_REGISTERS;  // per step
#pragma GCC unroll 1
            for (int64_t line = 0; line < STEPS * LINES; ++line) add_line(x + line / LINES);
            x += STEPS;
        } else {
#pragma GCC unroll 1
            for (int64_t step = 0; step < STEPS; ++step) add_step();
        }
        if (PLAIN || group == begin || group == shares * shared) of = all.of(shares++);
        each_sum([&](int r, int j) {
            Floats before = held[r][j];
            if (!HELD) before = group ? read<Floats>(place(r, j)) : Floats{};
            const Floats after = row(r).add(acc[r][j].end(row(r).first()), of, j, before);
            if (HELD)
                held[r][j] = after;
            else
                std::memcpy(place(r, j), &after, sizeof after);
        });
    }
    if (HELD)
        each_sum([&](int r, int j) { std::memcpy(place(r, j), &held[r][j], sizeof(Floats)); });
}

// The same with few registers: processes a group one register of columns at a time.
template <typename Kind, int ROWS, int64_t SIZE, bool PLAIN>
void integer_columns(Weight weight, int64_t index, const float* rows, int64_t begin, int64_t end,
                     float* results) {
    if constexpr (PLAIN) assume_plain<Kind>(weight, SIZE);
    const PanelScales all(weight, index);
    using Acc = GroupAccumulator<Kind::MAX_CODE, SIZE>;
    constexpr int64_t STEPS = GroupCursor<Kind, ROWS, SIZE>::STEPS;
    constexpr int64_t BYTES = GroupCursor<Kind, ROWS, SIZE>::BYTES;
    const int64_t shared = weight.group / SIZE;
    const bool zeros = weight.zeros, minima = weight.floors;
    const GroupCursor<Kind, ROWS, SIZE> at(weight, index, rows, begin);
    const char* words = at.words;
    const float *x = at.x, *scales = at.scales, *x_sums = at.sums;
    GroupScales of;
    int64_t shares = begin / shared;
    for (int64_t group = begin; group < end; ++group, scales += ROWS, x_sums += ROWS) {
        auto row = [&](int r) {
            return RowGroupScale<Acc::OFFSET>{zeros, minima, scales + r, x_sums + r};
        };
        if (PLAIN || group == begin || group == shares * shared) of = all.of(shares++);
        for (int64_t byte = 0; byte < STEPS * BYTES; byte += 128)
            prefetch_weight(words + byte + INTEGERS_PREFETCH_DISTANCE);
#pragma GCC unroll 8
        for (int j = 0; j < PANEL_REGISTERS; ++j) {
            Acc acc[ROWS];
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) acc[r].begin(row(r).first());
            const float* own = x;
#pragma GCC unroll 1
            for (int64_t step = 0; step < STEPS; ++step)
#pragma GCC unroll 4
                for (int part = 0; part < Kind::PARTS; ++part, own += ROWS) {
                    const char* from = words + step * BYTES + j * sizeof(Words);
                    const Words codes = Kind::part(from, part);
#pragma GCC unroll 12
                    for (int r = 0; r < ROWS; ++r) acc[r].add(codes, broadcast4(own + r));
                }
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) {
                float* to = results + r * PANEL + j * WIDTH;
                const Floats before = group ? read<Floats>(to) : Floats{};
                const Floats after = row(r).add(acc[r].end(row(r).first()), of, j, before);
                std::memcpy(to, &after, sizeof after);
            }
        }
        words += STEPS * BYTES, x += SIZE / 4 * ROWS;
    }
}

typedef void (*IntegerKernel)(Weight, int64_t, const float*, int64_t, int64_t, float*);

template <typename Kind>
IntegerKernel integer_kernel_of(const Weight& weight, int64_t rows) {
    constexpr bool SPECIALISED = std::is_same_v<Kind, Int4Bytes>;
    return dispatch_group_size<IntegerKernel, Kind, SPECIALISED>(
        weight, [=](auto size, auto plain) {
            constexpr int64_t SIZE = decltype(size)::value;
            constexpr bool PLAIN = decltype(plain)::value;
            return dispatch_rows<IntegerKernel, MAX_ROWS>(rows, [](auto count) -> IntegerKernel {
                if constexpr (WIDTH == 8 && decltype(count)::value > 1)
                    return integer_columns<Kind, count, SIZE, PLAIN>;
                else
                    return integer_kernel<Kind, count, SIZE, PLAIN>;
            });
        });
}

template <typename Kind>
void multiply_dot4(const Weight& weight, int64_t index, const Operand& x, float* results) {
    const int64_t size = row_group(weight), count = weight.depth / size;
    const int64_t some = x.groups() == 1 ? count : INTEGERS_L1_DEPTH / size;
    for (int64_t begin = 0; begin < count; begin += some)
        for (int64_t i = 0; i < x.groups(); ++i)
            integer_kernel_of<Kind>(weight, x.size(i))(weight, index, x.group(i), begin,
                                                       std::min(begin + some, count),
                                                       results + x.first(i) * PANEL);
}

template <typename Kind>
void multiply_row_dot4(const Weight& weight, const Panels& panels, const float* x, float* results) {
    typedef void (*Row)(Weight, const Panels&, const float*, float*);
    const auto row = dispatch_group_size<Row, Kind, true>(weight, [](auto size, auto plain) -> Row {
        return row_of_panels<Kind, decltype(size)::value, decltype(plain)::value>;
    });
    row(weight, panels, x, results);
}

}  // namespace

void multiply_integers(const Weight& weight, int64_t index, const Operand& x, float* results) {
    if (x.in_tiles()) return multiply_byte_tiles(weight, index, x, results);
    if (weight.type == INT8) return multiply_dot4<Int8Bytes>(weight, index, x, results);
    if (weight.type == INT6) return multiply_dot4<Int6Bytes>(weight, index, x, results);
    if (weight.type == INT4) return multiply_dot4<Int4Bytes>(weight, index, x, results);
    multiply_dot4<Float4Bytes>(weight, index, x, results);
}

void multiply_integer_row(const Weight& weight, const Panels& panels, const Operand& x,
                          float* results) {
    const auto multiply = weight.type == INT4   ? multiply_row_dot4<Int4Bytes>
                          : weight.type == INT6 ? multiply_row_dot4<Int6Bytes>
                                                : multiply_row_dot4<Float4Bytes>;
    multiply(weight, panels, x.group(0), results);
}

}  // namespace vlm
