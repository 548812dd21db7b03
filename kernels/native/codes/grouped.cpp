// The kernels of grouped.h with activations as they are: a few rows meet codes that are widened in
// registers, more of them a group of a panel that has been widened into the L1 cache.
#include "codes/grouped.h"

#include "products/multiply_add.h"

namespace vlm {

namespace {

constexpr int64_t CODES_AHEAD = 4096;  // bytes between what is used and what is asked for
// Rows beside whose sums there are registers to widen codes in.
constexpr int64_t MOST_FEW = WIDTH == 8 ? 2 : WHOLE_ROWS;

// Bits of a word as a whole number above 2^23, less the middle's: the code less the middle, times
// the value of its lowest bit, which the factors of an operand take back.
template <uint32_t MASK>
inline Floats number(Words word) {
    constexpr uint32_t LOWEST = MASK & -MASK, MIDDLE = (MASK / LOWEST + 1) / 2 * LOWEST;
    return (Floats)((word & MASK) | 0x4b000000u) - spread(0x1p23f + (float)MIDDLE);
}

// How many words of a column make a step, how many k those have, and how many words, or parts, they
// are unpacked to. How many values a part has and what each is, a number or a pair; `high` is the
// word's upper half.
struct PlainWords : ByteWords {
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

struct Int6Words : SixBitWords {
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

// The bits of a byte where those of float32 are, and 112 in the exponent: 2^-8 times the number,
// which an operand's factors take back. Below the least normal one twice that less 2^-14 is, and
// less.
struct Float8Words : NumbersOf4 {
    template <int K>
    static VLM_INLINE Floats value(Words word, Words) {
        const Words top = K < 3 ? word << (24 - 8 * K) : word;
        const Floats normal = (Floats)(((top >> 4) & 0x07f00000u) | 0x38000000u);
        const Floats size = lesser(normal, fused(normal, spread(2.0f), spread(-0x1p-14f)));
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

// Calls `use(i, values)` with a constant i and the values of all columns, for every one of a step.
template <typename Kind, typename Use, int... I>
VLM_INLINE void use_values(const char* step, const Use& use, std::integer_sequence<int, I...>) {
    Words words[REGISTERS], high[REGISTERS];
    auto all_columns = [&](auto i) {
        constexpr int PART = i / Kind::VALUES, K = i % Kind::VALUES;
        if constexpr (K == 0) {
#pragma GCC unroll 8
            for (int j = 0; j < REGISTERS; ++j) {
                words[j] = Kind::part(step + j * sizeof(Words), PART);
                high[j] = words[j] >> 16;
            }
        }
        Floats values[REGISTERS];
#pragma GCC unroll 8
        for (int j = 0; j < REGISTERS; ++j) values[j] = Kind::template value<K>(words[j], high[j]);
        use(i, values);
    };
    (all_columns(std::integral_constant<int, I>()), ...);
}

template <typename Kind, typename Use>
VLM_INLINE void use_values(const char* step, const Use& use) {
    use_values<Kind>(step, use, std::make_integer_sequence<int, Kind::PARTS * Kind::VALUES>());
}

template <typename Kind>
VLM_INLINE void ask_for_step(const char* words) {
#pragma GCC unroll 6
    for (int64_t line = 0; line < Kind::STORED * PANEL * 4; line += 64)
        __builtin_prefetch(words + CODES_AHEAD + line);
}

// total = group's sum * scale + total
struct Folding {
    GroupScales scales;
    float middle;
    const float* x_sums;  // of ROWS rows, null if there are no zero points

    VLM_INLINE Folding(const Weight& weight, const PanelScales& all, int64_t group,
                       const float* behind, int64_t rows)
        : scales(all.of(group)),
          middle(middle_of(weight.type)),
          x_sums(weight.zeros ? behind + group * rows : nullptr) {}

    VLM_INLINE void add(int r, int j, Floats sum, bool fresh, float* sums) const {
        float* to = sums + r * PANEL + j * WIDTH;
        if (x_sums) sum = fused(middle - scales.zero[j], spread(x_sums[r]), sum);
        const Floats total = fused(sum, scales.scale[j], fresh ? Floats{} : read<Floats>(to));
        std::memcpy(to, &total, sizeof total);
    }
};

// One group after the other: two side by side have more chains under way, but two places where the
// memory has to begin anew.
template <typename Kind, int ROWS>
void few_rows(const Weight& weight, const PanelScales& scales, const char* words, const float* x,
              float* sums) {
    const int64_t size = weight.group, count = weight.depth / size;
    const float* behind = x + weight.depth * ROWS;
    for (int64_t group = 0; group < count; ++group) {
        Floats total[ROWS][REGISTERS] = {};
        for (int64_t step = 0; step < size / Kind::COUNT; ++step) {
            ask_for_step<Kind>(words);
            use_values<Kind>(words, [&](int i, const Floats* values) {
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
                    for (int j = 0; j < REGISTERS; ++j)
                        total[r][j] =
                            fused_at<Kind::PAIRS>(x + i * ROWS + r, values[j], total[r][j]);
            });
            words += Kind::STORED * PANEL * 4;
            x += Kind::PARTS * Kind::VALUES * ROWS;
        }
        const Folding fold(weight, scales, group, behind, ROWS);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < REGISTERS; ++j) fold.add(r, j, total[r][j], group == 0, sums);
    }
}

// A widened group, of singles or of pairs.
template <typename Values, int ROWS>
void wide_rows(const Weight& weight, const PanelScales& scales, const float* wide, const float* x,
               int64_t group, float* sums) {
    Floats total[ROWS][REGISTERS] = {};
    const int64_t size = std::is_same_v<Values, Pairs> ? weight.group / 2 : weight.group;
    const float* own = x + group * size * ROWS;
#pragma GCC unroll 4
    for (int64_t i = 0; i < size; ++i)
        Values::template add<ROWS>((const char*)(wide + i * PANEL), own + i * ROWS, total);
    const Folding fold(weight, scales, group, x + weight.depth * ROWS, ROWS);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < REGISTERS; ++j) fold.add(r, j, total[r][j], group == 0, sums);
}

typedef void (*WideRows)(const Weight&, const PanelScales&, const float*, const float*, int64_t,
                         float*);

template <typename Values>
WideRows wide_rows_of(int64_t rows) {
    return by_rows<WideRows>(rows, [](auto count) { return wide_rows<Values, count>; });
}

typedef void (*FewRows)(const Weight&, const PanelScales&, const char*, const float*, float*);

template <typename Kind>
FewRows few_rows_of(int64_t rows) {
    return by_rows<FewRows, MOST_FEW>(rows, [](auto count) { return few_rows<Kind, count>; });
}

template <typename Kind>
void widen_codes(const char* from, int64_t count, float* to) {
    for (int64_t k = 0; k < count; k += Kind::COUNT) {
        ask_for_step<Kind>(from);
        use_values<Kind>(from, [&](int i, const Floats* values) {
        // One by one: all at once would go by way of the stack.
#pragma GCC unroll 8
            for (int j = 0; j < REGISTERS; ++j)
                std::memcpy(to + i * PANEL + j * WIDTH, &values[j], sizeof values[j]);
        });
        from += Kind::STORED * PANEL * 4;
        to += Kind::PARTS * Kind::VALUES * PANEL;
    }
}

template <typename Kind>
void multiply_words(const Weight& weight, int64_t index, const Operand& x, float* sums) {
    const char* words = panel_at(weight, index);
    const PanelScales scales(weight, index);
    if (x.rows() <= MOST_FEW)
        return few_rows_of<Kind>(x.rows())(weight, scales, words, x.group(0), sums);
    alignas(64) float wide[MOST_GROUP * PANEL];
    const int64_t bytes = weight.group * panel_step(weight.type);
    using Values = std::conditional_t<Kind::PAIRS, Pairs, Singles>;
    for (int64_t group = 0; group < weight.depth / weight.group; ++group) {
        widen_codes<Kind>(words + group * bytes, weight.group, wide);
        for (int64_t i = 0; i < x.groups(); ++i)
            wide_rows_of<Values>(x.size(i))(weight, scales, wide, x.group(i), group,
                                            sums + x.first(i) * PANEL);
    }
}

}  // namespace

void multiply_codes(const Weight& weight, int64_t index, const Operand& x, float* sums) {
    if (weight.dynamic) return multiply_integers(weight, index, x, sums);
    if (weight.type == INT8) return multiply_words<Int8Words>(weight, index, x, sums);
    if (weight.type == INT6) return multiply_words<Int6Words>(weight, index, x, sums);
    if (weight.type == INT4) return multiply_words<Int4Words>(weight, index, x, sums);
    if (weight.type == FLOAT4) return multiply_words<Float4Words>(weight, index, x, sums);
    if constexpr (PAIR_PRODUCTS)
        if (x.pairs()) return multiply_words<Float8Pairs>(weight, index, x, sums);
    multiply_words<Float8Words>(weight, index, x, sums);
}

}  // namespace vlm
