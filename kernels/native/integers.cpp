// The kernels of grouped.h with quantised activations: products of bytes, summed by fours.
#include "grouped.h"

namespace vlm {

namespace {

constexpr int64_t INTEGERS_AHEAD = 4096;  // bytes between what is used and what is asked for
constexpr int64_t CACHED_K = 512;         // of a panel's part that stays in the L1 cache, about

inline Words four_of(const float* word) {
    uint32_t bits;
    std::memcpy(&bits, word, sizeof bits);
    return bits - Words{};
}

// How many words of a row meet a word of codes, and what each of them meets.
struct ByteWords {
    static constexpr int COUNT = 1;
    static VLM_INLINE Words part(Words word, int) { return word; }
};

struct HalfByteWords {
    static constexpr int COUNT = 2;
    static VLM_INLINE Words part(Words word, int which) {
        return (which ? word >> 4 : word) & 0x0f0f0f0fu;
    }
};

// Groups `begin` to `end` of the rows and a panel for ROWS rows.
template <typename Kind, int ROWS>
void integer_tile(const Weight& weight, int64_t index, const char* words, const float* x,
                  int64_t begin, int64_t end, float* sums) {
    const int64_t size = row_group(weight), all_groups = weight.depth / size;
    const int64_t shared = weight.group / size;
    const float *scales = x + weight.depth / 4 * ROWS, *x_sums = scales + all_groups * ROWS;
    const float middle = middle_of(weight.type);
    words += begin * size / (4 * Kind::COUNT) * PANEL * 4;
    x += begin * size / 4 * ROWS;
    for (int64_t group = begin; group < end; ++group) {
        Signed total[ROWS][REGISTERS] = {};
        for (int64_t step = 0; step < size / (4 * Kind::COUNT); ++step, words += PANEL * 4) {
            __builtin_prefetch(words + INTEGERS_AHEAD);
            __builtin_prefetch(words + INTEGERS_AHEAD + 64);
#pragma GCC unroll 2
            for (int part = 0; part < Kind::COUNT; ++part, x += ROWS) {
                Words codes[REGISTERS];
#pragma GCC unroll 8
                for (int j = 0; j < REGISTERS; ++j)
                    codes[j] = Kind::part(read<Words>(words + j * sizeof(Words)), part);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r) {
                    const Words own = four_of(x + r);
#pragma GCC unroll 8
                    for (int j = 0; j < REGISTERS; ++j)
                        total[r][j] = dots(codes[j], own, total[r][j]);
                }
            }
        }
        const GroupScales of(weight, index, group / shared, middle);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const Floats scale = spread(scales[group * ROWS + r]);
            const Floats sum = spread(x_sums[group * ROWS + r]);
#pragma GCC unroll 8
            for (int j = 0; j < REGISTERS; ++j) {
                float* to = sums + r * PANEL + j * WIDTH;
                // All of these are whole numbers below 2^24.
                const Floats dot = __builtin_convertvector(total[r][j], Floats);
                const Floats own = fused(-of.zero[j], sum, dot);
                const Floats before = group ? read<Floats>(to) : Floats{};
                const Floats after = fused(own, of.scale[j] * scale, before);
                std::memcpy(to, &after, sizeof after);
            }
        }
    }
}

typedef void (*IntegerTile)(const Weight&, int64_t, const char*, const float*, int64_t, int64_t,
                            float*);

template <typename Kind>
IntegerTile integer_tile_of(int64_t rows) {
    return by_rows<IntegerTile>(rows, [](auto count) { return integer_tile<Kind, count>; });
}

template <typename Kind>
void multiply_by_fours(const Weight& weight, int64_t index, const Operand& x, float* sums) {
    const char* words = (const char*)weight.packed + index * panel_bytes(weight.depth, weight.type);
    const int64_t count = weight.depth / row_group(weight);
    const int64_t some = x.groups() == 1 ? count : CACHED_K / row_group(weight);
    for (int64_t begin = 0; begin < count; begin += some)
        for (int64_t i = 0; i < x.groups(); ++i)
            integer_tile_of<Kind>(x.size(i))(weight, index, words, x.group(i), begin,
                                             std::min(begin + some, count),
                                             sums + x.first(i) * PANEL);
}

}  // namespace

void multiply_integers(const Weight& weight, int64_t index, const Operand& x, float* sums) {
    if (weight.type == INT8) return multiply_by_fours<ByteWords>(weight, index, x, sums);
    multiply_by_fours<HalfByteWords>(weight, index, x, sums);
}

}  // namespace vlm
