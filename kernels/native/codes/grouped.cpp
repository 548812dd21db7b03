// Kernels of grouped.h for activations that are not quantised. Few rows widen the codes in
// registers; more rows share a group of a panel that was widened into the L1 cache.
#include "codes/grouped.h"

#include "products/multiply_add.h"

namespace vlm {

namespace {

constexpr int64_t CODES_PREFETCH_DISTANCE = 4096;  // prefetch distance in bytes
// Most rows whose accumulators leave registers free to widen codes in.
constexpr int64_t MAX_STREAMED_ROWS = WIDTH == 8 ? 2 : FULL_WIDTH_ROWS;

// Returns (code - middle) times the value of the code's lowest bit: places the bits above 2^23 in a
// float32 and subtracts. The operand's factors undo the multiplication.
template <uint32_t MASK>
inline Floats number(Words word) {
    constexpr uint32_t LOWEST = MASK & -MASK, MIDDLE = (MASK / LOWEST + 1) / 2 * LOWEST;
    return (Floats)((word & MASK) | 0x4b000000u) - broadcast(0x1p23f + (float)MIDDLE);
}

// Unpackers of codes to float32. A step of a column is WORDS_PER_STEP words of COUNT k, unpacked to
// PARTS words of VALUES values each: numbers, or pairs of bfloat16. `high` is the upper half of a
// word.
struct PlainWords : Int8Bytes {
    static constexpr bool PAIRS = false;
};

struct NumbersOf4 : PlainWords {
    static constexpr int COUNT = 4, VALUES = 4;
};

struct NumbersOf8 : PlainWords {
    static constexpr int COUNT = 8, VALUES = 8;
};

struct Int8Words : NumbersOf4 {
    template <int K>
    static VLM_INLINE Floats value(Words word, Words high) {
        return number<K % 2 ? 0xff00u : 0xffu>(K / 2 ? high : word);
    }
};

struct Int6Words : Int6Bytes {
    static constexpr int COUNT = 16, VALUES = 4;
    static constexpr bool PAIRS = false;
    template <int K>
    static VLM_INLINE Floats value(Words word, Words high) {
        return number<K % 2 ? 0x3f00u : 0x3fu>(K / 2 ? high : word);
    }
};

struct Int4Words : NumbersOf8 {
    template <int K>
    static VLM_INLINE Floats value(Words word, Words high) {
        constexpr uint32_t LOWEST = (K % 2 ? 0xf00u : 0xfu) << (K / 4 * 4);
        return number<LOWEST>(K / 2 % 2 ? high : word);
    }
};

struct Float4Words : NumbersOf8 {
    template <int K>
    static VLM_INLINE Floats value(Words word, Words) {
        return from_float4(word >> (K % 4 * 8 + K / 4 * 4));
    }
};

// Shift the bits of a byte to where float32 has them and add 112 to the exponent: 2^-8 times the
// number, which the operand's factors undo. Subnormal numbers become twice that less 2^-14, which
// is smaller than the normal formula's result.
struct Float8Words : NumbersOf4 {
    template <int K>
    static VLM_INLINE Floats value(Words word, Words) {
        const Words top = K < 3 ? word << (24 - 8 * K) : word;
        const Floats normal = (Floats)(((top >> 4) & 0x07f00000u) | 0x38000000u);
        const Floats size = minimum(normal, fma(normal, broadcast(2.0f), broadcast(-0x1p-14f)));
        return (Floats)((Words)size | (top & 0x80000000u));
    }
};

struct Float8Pairs : PlainWords {
    static constexpr int COUNT = 4, VALUES = 2;
    static constexpr bool PAIRS = true;
    template <int K>
    static VLM_INLINE Floats value(Words word, Words) {
        return (Floats)pair_of_float8<K == 1>(word);
    }
};

// Calls `use(i, values)` for every value of a step, with i as a constant and the values of all
// columns.
template <typename Kind, typename Use, int... I>
VLM_INLINE void use_values(const char* step, const Use& use, std::integer_sequence<int, I...>) {
    Words words[PANEL_REGISTERS], high[PANEL_REGISTERS];
    auto all_columns = [&](auto i) {
        constexpr int PART = i / Kind::VALUES, K = i % Kind::VALUES;
        if constexpr (K == 0) {
#pragma GCC unroll 8
            for (int j = 0; j < PANEL_REGISTERS; ++j) {
                words[j] = Kind::part(step + j * sizeof(Words), PART);
                high[j] = words[j] >> 16;
            }
        }
        Floats values[PANEL_REGISTERS];
#pragma GCC unroll 8
        for (int j = 0; j < PANEL_REGISTERS; ++j)
            values[j] = Kind::template value<K>(words[j], high[j]);
        use(i, values);
    };
    (all_columns(std::integral_constant<int, I>()), ...);
}

template <typename Kind, typename Use>
VLM_INLINE void use_values(const char* step, const Use& use) {
    use_values<Kind>(step, use, std::make_integer_sequence<int, Kind::PARTS * Kind::VALUES>());
}

template <typename Kind>
VLM_INLINE void prefetch_step(const char* words) {
#pragma GCC unroll 6
    for (int64_t line = 0; line < Kind::WORDS_PER_STEP * PANEL * 4; line += 64)
        __builtin_prefetch(words + CODES_PREFETCH_DISTANCE + line);
}

// results += group's sum * scale
struct GroupFold {
    GroupScales scales;
    float middle;
    bool minima;          // zero points are minima
    const float* x_sums;  // of ROWS rows, null without zero points

    VLM_INLINE GroupFold(const Weight& weight, const PanelScales& all, int64_t group,
                         const float* behind, int64_t rows)
        : scales(all.of(group)),
          middle(middle_of(weight.type)),
          minima(weight.floors),
          x_sums(weight.zeros ? behind + group * rows : nullptr) {}

    VLM_INLINE void add(int r, int j, Floats sum, bool fresh, float* results) const {
        float* to = results + r * PANEL + j * WIDTH;
        if (x_sums && !minima) sum = fma(middle - scales.zero[j], broadcast(x_sums[r]), sum);
        Floats acc = fma(sum, scales.scale[j], fresh ? Floats{} : read<Floats>(to));
        if (minima) {
            const Floats offset = fma(broadcast(middle), scales.scale[j], -scales.zero[j]);
            acc = fma(offset, broadcast(x_sums[r]), acc);
        }
        std::memcpy(to, &acc, sizeof acc);
    }
};

// Groups are processed one after another. Two side by side would have more independent chains, but
// also two streams that the hardware prefetcher has to find.
template <typename Kind, int ROWS>
void streamed_kernel(const Weight& weight, const PanelScales& scales, const char* words,
                     const float* x, float* results) {
    const int64_t size = weight.group, count = weight.depth / size;
    const float* behind = x + weight.depth * ROWS;
    for (int64_t group = 0; group < count; ++group) {
        Floats acc[ROWS][PANEL_REGISTERS] = {};
        for (int64_t step = 0; step < size / Kind::COUNT; ++step) {
            prefetch_step<Kind>(words);
            use_values<Kind>(words, [&](int i, const Floats* values) {
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
                    for (int j = 0; j < PANEL_REGISTERS; ++j)
                        acc[r][j] =
                            fma_broadcast<Kind::PAIRS>(x + i * ROWS + r, values[j], acc[r][j]);
            });
            words += Kind::WORDS_PER_STEP * PANEL * 4;
            x += Kind::PARTS * Kind::VALUES * ROWS;
        }
        const GroupFold fold(weight, scales, group, behind, ROWS);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < PANEL_REGISTERS; ++j)
                fold.add(r, j, acc[r][j], group == 0, results);
    }
}

// Multiplies a widened group, of float32 values or of pairs of bfloat16.
template <typename Values, int ROWS>
void group_kernel(const Weight& weight, const PanelScales& scales, const float* wide,
                  const float* x, int64_t group, float* results) {
    Floats acc[ROWS][PANEL_REGISTERS] = {};
    const int64_t size = std::is_same_v<Values, Bfloat16Pairs> ? weight.group / 2 : weight.group;
    const float* own = x + group * size * ROWS;
#pragma GCC unroll 4
    for (int64_t i = 0; i < size; ++i)
        Values::template add<ROWS>((const char*)(wide + i * PANEL), own + i * ROWS, acc);
    const GroupFold fold(weight, scales, group, x + weight.depth * ROWS, ROWS);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < PANEL_REGISTERS; ++j) fold.add(r, j, acc[r][j], group == 0, results);
}

typedef void (*GroupKernel)(const Weight&, const PanelScales&, const float*, const float*, int64_t,
                            float*);

template <typename Values>
GroupKernel group_kernel_of(int64_t rows) {
    return dispatch_rows<GroupKernel>(rows, [](auto count) { return group_kernel<Values, count>; });
}

typedef void (*StreamedKernel)(const Weight&, const PanelScales&, const char*, const float*,
                               float*);

template <typename Kind>
StreamedKernel streamed_kernel_of(int64_t rows) {
    return dispatch_rows<StreamedKernel, MAX_STREAMED_ROWS>(
        rows, [](auto count) { return streamed_kernel<Kind, count>; });
}

template <typename Kind>
void widen_codes(const char* from, int64_t count, float* to) {
    for (int64_t k = 0; k < count; k += Kind::COUNT) {
        prefetch_step<Kind>(from);
        use_values<Kind>(from, [&](int i, const Floats* values) {
        // Store values one by one; all at once would be spilled to the stack.
#pragma GCC unroll 8
            for (int j = 0; j < PANEL_REGISTERS; ++j)
                std::memcpy(to + i * PANEL + j * WIDTH, &values[j], sizeof values[j]);
        });
        from += Kind::WORDS_PER_STEP * PANEL * 4;
        to += Kind::PARTS * Kind::VALUES * PANEL;
    }
}

template <typename Kind>
void multiply_words(const Weight& weight, int64_t index, const Operand& x, float* results) {
    const char* words = panel_at(weight, index);
    const PanelScales scales(weight, index);
    if (x.rows() <= MAX_STREAMED_ROWS)
        return streamed_kernel_of<Kind>(x.rows())(weight, scales, words, x.group(0), results);
    alignas(64) float wide[MAX_GROUP * PANEL];
    const int64_t bytes = weight.group * panel_step(weight.type);
    using Values = std::conditional_t<Kind::PAIRS, Bfloat16Pairs, Float32Values>;
    for (int64_t group = 0; group < weight.depth / weight.group; ++group) {
        widen_codes<Kind>(words + group * bytes, weight.group, wide);
        for (int64_t i = 0; i < x.groups(); ++i)
            group_kernel_of<Values>(x.size(i))(weight, scales, wide, x.group(i), group,
                                               results + x.first(i) * PANEL);
    }
}

}  // namespace

void multiply_codes(const Weight& weight, int64_t index, const Operand& x, float* results) {
    if (weight.dynamic) return multiply_integers(weight, index, x, results);
    if (weight.type == INT8) return multiply_words<Int8Words>(weight, index, x, results);
    if (weight.type == INT6) return multiply_words<Int6Words>(weight, index, x, results);
    if (weight.type == INT4) return multiply_words<Int4Words>(weight, index, x, results);
    if (weight.type == FLOAT4) return multiply_words<Float4Words>(weight, index, x, results);
    if constexpr (HAS_BF16_DOT)
        if (x.pairs()) return multiply_words<Float8Pairs>(weight, index, x, results);
    multiply_words<Float8Words>(weight, index, x, results);
}

}  // namespace vlm
