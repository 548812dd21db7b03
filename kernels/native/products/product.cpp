// Kernels of product.h. A micro-kernel multiplies a few rows by one panel and keeps the
// accumulators in registers.
#include "products/product.h"

#include "codes/grouped.h"
#include "products/amx_products.h"
#include "products/multiply_add.h"

namespace vlm {

namespace {

// What a micro-kernel prefetches: `step` bytes per step, up to 128.
struct Prefetch {
    const char* at;
    int64_t step;
};

// Steps that prefetch more than MAX_PREFETCHED bytes are memory-bound: keep one load per loop so
// that the hardware prefetcher locks on. Others are compute-bound: unroll by 4.
constexpr int64_t MAX_PREFETCHED = 64;

// Widens 16-bit values in registers. If CACHED, it also stores them as `[k, PANEL]` float32 for the
// other groups of rows.
template <bool CACHED>
class WidenedCopy {
  public:
    explicit WidenedCopy(float* to) : to_(to) {}

  protected:
    VLM_INLINE Floats cached(Floats values, int64_t at) const {
        if (CACHED) std::memcpy(to_ + at, &values, sizeof values);
        return values;
    }
    VLM_INLINE void advance(int64_t count) {
        if (CACHED) to_ += count;
    }

  private:
    float* to_;
};

// Layouts of a panel. BYTES is the size of a step (one k or one pair of k); `add` adds a step to
// the accumulators of ROWS rows. `x` holds the rows' values of that step, contiguous.
template <bool CACHED>
struct Float16Values : WidenedCopy<CACHED> {
    static constexpr int64_t BYTES = 2 * PANEL, STEP = 1;
    using WidenedCopy<CACHED>::WidenedCopy;

    template <int ROWS, int FIRST>
    VLM_INLINE void add(const char* step, const float* x, Floats (*acc)[KERNEL_REGISTERS<ROWS>]) {
        auto value = [&](int j) {
            const int at = (FIRST + j) * WIDTH;
            return this->cached(from_float16(step + 2 * at), at);
        };
        multiply_add<ROWS>(value, x, acc);
        this->advance(PANEL);
    }
};

template <bool CACHED>
struct Bfloat16Values : WidenedCopy<CACHED> {
    static constexpr int64_t BYTES = 4 * PANEL, STEP = 2;
    using WidenedCopy<CACHED>::WidenedCopy;

    template <int ROWS, int FIRST>
    VLM_INLINE void add(const char* step, const float* x, Floats (*acc)[KERNEL_REGISTERS<ROWS>]) {
        // At FULL_WIDTH_ROWS the accumulators fill all registers anyway.
        constexpr bool IN_ONE = ROWS != FULL_WIDTH_ROWS;
        auto even = [&](int j) {
            const Floats values = unpack_bf16<false, IN_ONE>(step + (FIRST + j) * sizeof(Words));
            return this->cached(values, (FIRST + j) * WIDTH);
        };
        auto odd = [&](int j) {
            const Floats values = unpack_bf16<true, IN_ONE>(step + (FIRST + j) * sizeof(Words));
            return this->cached(values, PANEL + (FIRST + j) * WIDTH);
        };
        multiply_add<ROWS>(even, x, acc);
        multiply_add<ROWS>(odd, x + ROWS, acc);
        this->advance(2 * PANEL);
    }
};

// Marks a layout whose panel is read by a single group of rows.
template <typename Kind>
struct SingleGroup : Kind {
    using Kind::Kind;
};
template <typename Kind>
constexpr bool IS_SINGLE_GROUP = false;
template <typename Kind>
constexpr bool IS_SINGLE_GROUP<SingleGroup<Kind>> = true;

// Cache level to prefetch into. Several rows leave time to reach the L1 cache, but L1 has no space
// for the next part while other groups of rows still read this one.
template <typename Kind>
constexpr int prefetch_level(int rows) {
    if (rows == 1) return WEIGHT_CACHE;
    return IS_SINGLE_GROUP<Kind> ? L1_CACHE : L2_CACHE;
}

// Micro-kernel of the columns from register FIRST on.
template <typename Kind, int ROWS, int FIRST>
VLM_INLINE void column_kernel(Kind kind, const char* panel, const float* x, int64_t steps,
                              Prefetch prefetch, bool fresh, float* results) {
    constexpr int COUNT = KERNEL_REGISTERS<ROWS>;
    results += FIRST * WIDTH;
    Floats acc[ROWS][COUNT];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; ++j)
            acc[r][j] = fresh ? Floats{} : read<Floats>(results + r * PANEL + j * WIDTH);
    auto add_step = [&]() __attribute__((always_inline)) {
        if (FIRST == 0) prefetch_weight<prefetch_level<Kind>(ROWS)>(prefetch.at);
        prefetch.at += prefetch.step;
        kind.template add<ROWS, FIRST>(panel, x, acc);
        panel += Kind::BYTES;
        x += Kind::STEP * ROWS;
    };
    int64_t s = 0;
    if (ROWS > 1 && prefetch.step <= MAX_PREFETCHED) {
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
            std::memcpy(results + r * PANEL + j * WIDTH, &acc[r][j], sizeof acc[r][j]);
}

template <typename Kind, int ROWS>
void micro_kernel(Kind kind, const char* panel, const float* x, int64_t steps, Prefetch prefetch,
                  bool fresh, float* results) {
    column_kernel<Kind, ROWS, 0>(kind, panel, x, steps, prefetch, fresh, results);
    if constexpr (KERNEL_REGISTERS<ROWS> < PANEL_REGISTERS)
        column_kernel<Kind, ROWS, KERNEL_REGISTERS<ROWS>>(kind, panel, x, steps, prefetch, fresh,
                                                          results);
}

template <typename Kind>
using MicroKernel = void (*)(Kind, const char*, const float*, int64_t, Prefetch, bool, float*);

// A block of k (or of pairs of k, if the operand has pairs) of one panel, for all rows.
struct KBlock {
    const Operand& x;
    int64_t begin, count;
    float* results;
    const char* next;  // next prefetch address; bytes that one group of rows prefetches per k
    int64_t step;
    // Index of the panel in its run; `epilogue` is null unless this is the panel's last block.
    int64_t p;
    const Epilogue* epilogue;

    // Adds the block to the accumulators of one group of rows.
    template <typename Kind>
    void add(Kind kind, int64_t group, const void* values) {
        const int64_t first = x.first(group), size = x.size(group);
        const int64_t steps = count / Kind::STEP, prefetched = Kind::STEP * step;
        const auto kernel_of = [](auto rows) { return micro_kernel<Kind, rows>; };
        dispatch_rows<MicroKernel<Kind>, MAX_ROWS>(size, kernel_of)(
            kind, (const char*)values, x.group(group) + begin * size, steps, {next, prefetched},
            begin == 0, results + first * PANEL);
        next += steps * prefetched;
        if (epilogue) (*epilogue)(p, first, size, results + first * PANEL);
    }

    template <typename Kind>
    void add_all(const char* values) {
        if (x.groups() == 1) return add(SingleGroup<Kind>(), 0, values);
        for (int64_t group = 0; group < x.groups(); ++group) add(Kind(), group, values);
    }

    // The first group of rows widens the values; the others read the float32 copy.
    template <template <bool> typename Kind>
    void add_widened(const char* values) {
        if (x.groups() == 1) return add(SingleGroup<Kind<false>>(nullptr), 0, values);
        alignas(64) float wide[L1_DEPTH * PANEL];
        add(Kind<true>(wide), 0, values);
        for (int64_t group = 1; group < x.groups(); ++group) add(Float32Values(), group, wide);
    }
};

// Multiplies panel `p` of a run. Unless `epilogue` is null, it is called for each group of rows as
// soon as the group's results are complete.
void multiply_dense(const Weight& weight, const Panels& panels, int64_t p, const Operand& x,
                    float* results, const Epilogue* epilogue) {
    const int64_t depth = padded(weight.depth, weight.type), unit = x.pairs() ? 2 : 1;
    const int64_t bytes = panel_step(weight.type), share = (bytes + x.groups() - 1) / x.groups();
    const char* values = panel_at(weight, panels.first + p);
    const bool one_group = x.groups() == 1;
    const int64_t most =
        one_group ? depth : unit * (x.rows() < FEW_ROWS ? FEW_ROWS_L1_DEPTH : L1_DEPTH);
    for (int64_t begin = 0; begin < depth; begin += most) {
        const int64_t count = std::min(most, depth - begin);
        // With several groups of rows this part stays in the cache, so prefetch the next part.
        const char* next = values + (one_group ? WEIGHT_PREFETCH_DISTANCE : count * bytes);
        const Epilogue* last_epilogue = begin + count == depth ? epilogue : nullptr;
        KBlock block{x, begin / unit, count / unit, results, next, unit * share, p, last_epilogue};
        if (x.pairs())
            block.add_all<Bfloat16Pairs>(values);
        else if (weight.type == FLOAT32)
            block.add_all<Float32Values>(values);
        else if (weight.type == BFLOAT16)
            block.add_widened<Bfloat16Values>(values);
        else
            block.add_widened<Float16Values>(values);
        values += count * bytes;
    }
}

// Tells whether the epilogue of some rows overlaps the products of others. A few rows are
// memory-bound, and other memory traffic would disturb the weight's stream.
bool overlaps_epilogue(const Weight& weight, const Operand& x) {
    if (is_codes(weight.type)) return false;
    return x.in_tiles() ? x.tiles() > 2 : x.rows() > RUN_ROWS;
}

// Prefetches one value per column of a panel. They are read after the panel's codes, too far apart
// for the hardware prefetcher.
VLM_INLINE void prefetch_columns(const float* columns) {
    for (int j = 0; j < PANEL; j += LANES) __builtin_prefetch(columns + j);
}

// Replaces every result of a panel by `made(column, result)`.
template <typename Make>
VLM_INLINE void map_results(int64_t rows, float* results, const Make& make_vec) {
    for (float* end = results + rows * PANEL; results < end; results += PANEL)
        for (int j = 0; j < PANEL; j += LANES) store(results + j, make_vec(j, load(results + j)));
}

// Multiplies the columns by their factors and adds the bias.
void apply_factors_and_bias(const Weight& weight, int64_t index, int64_t rows, float* results) {
    const int64_t column = index * PANEL, count = std::min<int64_t>(PANEL, weight.columns - column);
    if (weight.factors) {
        const float* factors = weight.factors + column;
        map_results(rows, results, [=](int j, const Vec& sum) { return sum * load(factors + j); });
    }
    if (!weight.bias) return;
    float bias[PANEL] = {};
    std::memcpy(bias, weight.bias + column, count * sizeof(float));
    map_results(rows, results, [&](int j, const Vec& sum) { return sum + load(bias + j); });
}

// Everything but `apply_factors_and_bias`.
void multiply_all(const Weight& weight, const Panels& panels, const Operand& x, float* results) {
    if (is_table(weight.type)) {
        char* bytes = thread_workspace().bytes_of_panel(weight.depth);
        for (int64_t p = 0; p < panels.count; ++p, results += x.rows() * PANEL)
            multiply_codes(looked_up(weight, panels.first + p, bytes), 0, x, results);
        return;
    }
    if (in_one_loop(weight, x)) return multiply_integer_row(weight, panels, x, results);
    if (x.in_tiles() && weight.type == FLOAT8)
        return multiply_float8_tiles(weight, panels, x, results);
    if (x.in_tiles() && !is_codes(weight.type)) return multiply_tiles(weight, panels, x, results);
    for (int64_t p = 0; p < panels.count; ++p, results += x.rows() * PANEL)
        if (is_codes(weight.type))
            multiply_codes(weight, panels.first + p, x, results);
        else
            multiply_dense(weight, panels, p, x, results, nullptr);
}

}  // namespace

void multiply(const Weight& weight, const Panels& panels, const Operand& x, float* results) {
    if (weight.factors) prefetch_columns(weight.factors + panels.first * PANEL);
    multiply_all(weight, panels, x, results);
    for (int64_t p = 0; p < panels.count; ++p, results += x.rows() * PANEL)
        apply_factors_and_bias(weight, panels.first + p, x.rows(), results);
}

void multiply(const Weight& weight, const Panels& panels, const Operand& x, float* scratch,
              const Epilogue& epilogue) {
    if (overlaps_epilogue(weight, x)) {
        auto with_bias = [&](int64_t p, int64_t row, int64_t rows, float* results) {
            if (weight.bias) apply_factors_and_bias(weight, panels.first + p, rows, results);
            epilogue(p, row, rows, results);
        };
        if (x.in_tiles()) return multiply_tiles(weight, panels, x, scratch, with_bias);
        const Epilogue each(with_bias);
        for (int64_t p = 0; p < panels.count; ++p)
            multiply_dense(weight, panels, p, x, scratch, &each);
        return;
    }
    for_runs(panels, x.rows(), [&](const Panels& run) {
        multiply(weight, run, x, scratch);
        for (int64_t p = 0; p < run.count; ++p)
            epilogue(run.first - panels.first + p, 0, x.rows(), scratch + p * x.rows() * PANEL);
    });
}

Workspace& thread_workspace() {
    static thread_local Workspace own;
    return own;
}

}  // namespace vlm
