// The kernels of product.h: a tile of rows times a panel, sums in registers.
#include "products/product.h"

#include "codes/grouped.h"
#include "products/amx_products.h"
#include "products/multiply_add.h"

namespace vlm {

namespace {

// What a tile asks the memory for while it computes: `step` bytes in every step, up to 128.
struct Next {
    const char* at;
    int64_t step;
};

// Steps that ask for more wait for the memory, which a processor foresees best if one instruction
// reads it; others for the arithmetic, of which there is more in a loop that has several of them.
constexpr int64_t MOST_ASKED = 64;

// Values of 16 bits are widened in registers; if they are KEPT they are also written down, as
// `[k, PANEL]` float32.
template <bool KEPT>
class Widening {
  public:
    explicit Widening(float* to) : to_(to) {}

  protected:
    VLM_INLINE Floats kept(Floats values, int64_t at) const {
        if (KEPT) std::memcpy(to_ + at, &values, sizeof values);
        return values;
    }
    VLM_INLINE void go_on(int64_t count) {
        if (KEPT) to_ += count;
    }

  private:
    float* to_;
};

// What a panel holds: how many bytes of a step (a k or a pair of k), and how such a step is added
// to the sums of ROWS rows. `x` are the step's values, next to each other.
template <bool KEPT>
struct HalfSingles : Widening<KEPT> {
    static constexpr int64_t BYTES = 2 * PANEL, STEP = 1;
    using Widening<KEPT>::Widening;

    template <int ROWS, int FIRST>
    VLM_INLINE void add(const char* step, const float* x, Floats (*total)[TAKEN<ROWS>]) {
        auto value = [&](int j) {
            const int at = (FIRST + j) * WIDTH;
            return this->kept(from_float16(step + 2 * at), at);
        };
        add_products<ROWS>(value, x, total);
        this->go_on(PANEL);
    }
};

template <bool KEPT>
struct WidenedPairs : Widening<KEPT> {
    static constexpr int64_t BYTES = 4 * PANEL, STEP = 2;
    using Widening<KEPT>::Widening;

    template <int ROWS, int FIRST>
    VLM_INLINE void add(const char* step, const float* x, Floats (*total)[TAKEN<ROWS>]) {
        // Sums that fill all registers find no place anyway.
        constexpr bool IN_ONE = ROWS != WHOLE_ROWS;
        auto even = [&](int j) {
            const Floats values = of_pairs<false, IN_ONE>(step + (FIRST + j) * sizeof(Words));
            return this->kept(values, (FIRST + j) * WIDTH);
        };
        auto odd = [&](int j) {
            const Floats values = of_pairs<true, IN_ONE>(step + (FIRST + j) * sizeof(Words));
            return this->kept(values, PANEL + (FIRST + j) * WIDTH);
        };
        add_products<ROWS>(even, x, total);
        add_products<ROWS>(odd, x + ROWS, total);
        this->go_on(2 * PANEL);
    }
};

// Of a kind that only one group of rows meets.
template <typename Kind>
struct Alone : Kind {
    using Kind::Kind;
};
template <typename Kind>
constexpr bool ALONE = false;
template <typename Kind>
constexpr bool ALONE<Alone<Kind>> = true;

// Where what comes next is asked into: beside several rows there is time for the way to the L1
// cache as well, but that has no room for it if other groups of rows have yet to meet this part.
template <typename Kind>
constexpr int cache_of(int rows) {
    return rows == 1 ? WEIGHT_CACHE : ALONE<Kind> ? L1_CACHE : L2_CACHE;
}

// Of the columns from register FIRST on.
template <typename Kind, int ROWS, int FIRST>
VLM_INLINE void tile_part(Kind kind, const char* panel, const float* x, int64_t steps, Next next,
                          bool fresh, float* sums) {
    constexpr int COUNT = TAKEN<ROWS>;
    sums += FIRST * WIDTH;
    Floats total[ROWS][COUNT];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; ++j)
            total[r][j] = fresh ? Floats{} : read<Floats>(sums + r * PANEL + j * WIDTH);
    auto add_step = [&]() __attribute__((always_inline)) {
        if (FIRST == 0) ask_for_weight<cache_of<Kind>(ROWS)>(next.at);
        next.at += next.step;
        kind.template add<ROWS, FIRST>(panel, x, total);
        panel += Kind::BYTES;
        x += Kind::STEP * ROWS;
    };
    int64_t s = 0;
    if (ROWS > 1 && next.step <= MOST_ASKED) {
#pragma GCC unroll 4
        for (; s < steps; ++s) add_step();
    } else {
#pragma GCC unroll 1
        for (; s < steps; ++s) add_step();
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; ++j)
            std::memcpy(sums + r * PANEL + j * WIDTH, &total[r][j], sizeof total[r][j]);
}

template <typename Kind, int ROWS>
void tile(Kind kind, const char* panel, const float* x, int64_t steps, Next next, bool fresh,
          float* sums) {
    tile_part<Kind, ROWS, 0>(kind, panel, x, steps, next, fresh, sums);
    if constexpr (TAKEN<ROWS> < REGISTERS)
        tile_part<Kind, ROWS, TAKEN<ROWS>>(kind, panel, x, steps, next, fresh, sums);
}

template <typename Kind>
using Tile = void (*)(Kind, const char*, const float*, int64_t, Next, bool, float*);

// Some k of a panel, or pairs of k where the operand has pairs, for the sums of all rows.
struct Part {
    const Operand& x;
    int64_t begin, count;
    float* sums;
    const char* next;  // what is asked for meanwhile, and how many bytes of it a group does at a k
    int64_t step;
    // The panel's place in its run, and who gets its sums if this is its last part, or null.
    int64_t p;
    const Complete* complete;

    // Adds values to the sums of one group of rows.
    template <typename Kind>
    void add(Kind kind, int64_t group, const void* values) {
        const int64_t first = x.first(group), size = x.size(group);
        const int64_t steps = count / Kind::STEP, asked = Kind::STEP * step;
        const auto tile_of = [](auto rows) { return tile<Kind, rows>; };
        by_rows<Tile<Kind>, MOST_ROWS>(size, tile_of)(
            kind, (const char*)values, x.group(group) + begin * size, steps, {next, asked},
            begin == 0, sums + first * PANEL);
        next += steps * asked;
        if (complete) (*complete)(p, first, size, sums + first * PANEL);
    }

    template <typename Kind>
    void add_all(const char* values) {
        if (x.groups() == 1) return add(Alone<Kind>(), 0, values);
        for (int64_t group = 0; group < x.groups(); ++group) add(Kind(), group, values);
    }

    // The first group widens them for the others.
    template <template <bool> typename Kind>
    void add_widened(const char* values) {
        if (x.groups() == 1) return add(Alone<Kind<false>>(nullptr), 0, values);
        alignas(64) float wide[DEPTH * PANEL];
        add(Kind<true>(wide), 0, values);
        for (int64_t group = 1; group < x.groups(); ++group) add(Singles(), group, wide);
    }
};

// Panel `p` of a run; hands on every group of rows that is complete if `complete` is not null.
void multiply_dense(const Weight& weight, const Panels& panels, int64_t p, const Operand& x,
                    float* sums, const Complete* complete) {
    const int64_t depth = padded(weight.depth, weight.type), unit = x.pairs() ? 2 : 1;
    const int64_t bytes = panel_step(weight.type), share = (bytes + x.groups() - 1) / x.groups();
    const char* values = panel_at(weight, panels.first + p);
    const bool once = x.groups() == 1;
    const int64_t most = once ? depth : unit * (x.rows() < FEW ? FEW_DEPTH : DEPTH);
    for (int64_t begin = 0; begin < depth; begin += most) {
        const int64_t count = std::min(most, depth - begin);
        // Several groups work on a part from the cache, while the next one comes.
        const char* next = values + (once ? WEIGHT_AHEAD : count * bytes);
        const Complete* ended = begin + count == depth ? complete : nullptr;
        Part part{x, begin / unit, count / unit, sums, next, unit * share, p, ended};
        if (x.pairs())
            part.add_all<Pairs>(values);
        else if (weight.type == FLOAT32)
            part.add_all<Singles>(values);
        else if (weight.type == BFLOAT16)
            part.add_widened<WidenedPairs>(values);
        else
            part.add_widened<HalfSingles>(values);
        values += count * bytes;
    }
}

// Whether the sums of some rows are handed on while others are computed: few wait for the memory
// alone, which nothing else is asked for meanwhile.
bool hands_on(const Weight& weight, const Operand& x) {
    if (is_codes(weight.type)) return false;
    return x.in_tiles() ? x.tiles() > 2 : x.rows() > RUN_ROWS;
}

// A panel's columns, which the processor does not foresee: they are read when its codes have been.
VLM_INLINE void ask_for(const float* columns) {
    for (int j = 0; j < PANEL; j += LANES) __builtin_prefetch(columns + j);
}

// Every sum of some rows of a panel as `made(column, sum)` makes it.
template <typename Make>
VLM_INLINE void remake(int64_t rows, float* sums, const Make& made) {
    for (float* end = sums + rows * PANEL; sums < end; sums += PANEL)
        for (int j = 0; j < PANEL; j += LANES) store(sums + j, made(j, load(sums + j)));
}

// What a column of some rows has to be multiplied with, and its bias.
void finish(const Weight& weight, int64_t index, int64_t rows, float* sums) {
    const int64_t column = index * PANEL, count = std::min<int64_t>(PANEL, weight.columns - column);
    if (weight.factors) {
        const float* factors = weight.factors + column;
        remake(rows, sums, [=](int j, const Vec& sum) { return sum * load(factors + j); });
    }
    if (!weight.bias) return;
    float bias[PANEL] = {};
    std::memcpy(bias, weight.bias + column, count * sizeof(float));
    remake(rows, sums, [&](int j, const Vec& sum) { return sum + load(bias + j); });
}

// All but what `finish` does.
void multiply_all(const Weight& weight, const Panels& panels, const Operand& x, float* sums) {
    if (in_one_loop(weight, x)) return multiply_integer_row(weight, panels, x, sums);
    if (x.in_tiles() && weight.type == FLOAT8)
        return multiply_float8_tiles(weight, panels, x, sums);
    if (x.in_tiles() && !is_codes(weight.type)) return multiply_tiles(weight, panels, x, sums);
    for (int64_t p = 0; p < panels.count; ++p, sums += x.rows() * PANEL)
        if (is_codes(weight.type))
            multiply_codes(weight, panels.first + p, x, sums);
        else
            multiply_dense(weight, panels, p, x, sums, nullptr);
}

}  // namespace

void multiply(const Weight& weight, const Panels& panels, const Operand& x, float* sums) {
    if (weight.factors) ask_for(weight.factors + panels.first * PANEL);
    multiply_all(weight, panels, x, sums);
    for (int64_t p = 0; p < panels.count; ++p, sums += x.rows() * PANEL)
        finish(weight, panels.first + p, x.rows(), sums);
}

void multiply(const Weight& weight, const Panels& panels, const Operand& x, float* room,
              const Complete& complete) {
    if (hands_on(weight, x)) {
        auto finished = [&](int64_t p, int64_t row, int64_t rows, float* sums) {
            if (weight.bias) finish(weight, panels.first + p, rows, sums);
            complete(p, row, rows, sums);
        };
        if (x.in_tiles()) return multiply_tiles(weight, panels, x, room, finished);
        const Complete each(finished);
        for (int64_t p = 0; p < panels.count; ++p)
            multiply_dense(weight, panels, p, x, room, &each);
        return;
    }
    for_runs(panels, x.rows(), [&](const Panels& run) {
        multiply(weight, run, x, room);
        for (int64_t p = 0; p < run.count; ++p)
            complete(run.first - panels.first + p, 0, x.rows(), room + p * x.rows() * PANEL);
    });
}

Workplace& own_workplace() {
    static thread_local Workplace own;
    return own;
}

}  // namespace vlm
