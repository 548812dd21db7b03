// Packing of rows into an operand.
#include "products/operand.h"

#include "transpose.h"

namespace vlm {

namespace {

// Factors of the k in a word of codes, by position; see grouped.h.
constexpr float PLAIN_FACTORS[] = {1, 1, 1, 1, 1, 1, 1, 1};
constexpr float INT8_FACTORS[] = {1, 0x1p-8f, 1, 0x1p-8f, 1, 0x1p-8f, 1, 0x1p-8f};
constexpr float INT4_FACTORS[] = {1, 0x1p-8f, 1, 0x1p-8f, 0x1p-4f, 0x1p-12f, 0x1p-4f, 0x1p-12f};
constexpr float FLOAT8_FACTORS[] = {256, 256, 256, 256, 256, 256, 256, 256};

inline const float* factors_of(int64_t type) {
    if (type == INT8 || type == INT6 || is_table(type)) return INT8_FACTORS;
    if (type == INT4) return INT4_FACTORS;
    return type == FLOAT8 ? FLOAT8_FACTORS : PLAIN_FACTORS;
}

// Copies pairs as words.
void pack_pairs(const bf16* const* from, int64_t rows, int64_t depth, int64_t words, float* to) {
    int64_t k = 0;
    if (WIDTH == 16 && rows > 1)
        for (; 2 * (k + WIDTH) <= depth; k += WIDTH) {
            Words square[WIDTH] = {};
            for (int64_t r = 0; r < rows; ++r) square[r] = read<Words>(from[r] + 2 * k);
            transpose(square);
            for (int i = 0; i < WIDTH; ++i)
                std::memcpy(to + (k + i) * rows, &square[i], sizeof square[i]);
        }
    for (; k < words; ++k)
        for (int64_t r = 0; r < rows; ++r) {
            const uint32_t low = from[r][2 * k].bits;
            const uint32_t high = 2 * k + 1 < depth ? from[r][2 * k + 1].bits : 0;
            const uint32_t pair = low | high << 16;
            std::memcpy(to + k * rows + r, &pair, sizeof pair);
        }
}

// Factors that turn the groups of a row into codes, and back.
struct Ranges {
    Floats scale, inverse;
};

// Covers up to WIDTH adjacent groups.
template <typename T>
Ranges ranges_of(const T* from, int64_t group, int64_t count) {
    constexpr float MIN_PEAK = 1e-30f;
    // Compares as integers, so that values that are not finite are the largest.
    auto larger_bits = [](Words a, Words b) { return (Signed)a > (Signed)b ? a : b; };
    Words most[WIDTH] = {};
    for (int64_t i = 0; i < count; ++i)
        for (int64_t k = 0; k < group; k += WIDTH, from += WIDTH)
            most[i] = larger_bits((Words)load_register(from) & 0x7fffffffu, most[i]);
    const Floats top = (Floats)transpose_reduce(most, larger_bits), none = {};
    return {(top > MIN_PEAK ? top / 127.0f : none) + (top - top),
            top > MIN_PEAK ? 127.0f / top : none};
}

// Stores a group's codes as words `step` floats apart, and returns their sum in parts.
template <typename T>
VLM_INLINE Words put_codes(const T* from, int64_t group, float inverse, float* words,
                           int64_t step) {
    int8_t codes[MAX_GROUP];
    Signed total = {};
    for (int64_t k = 0; k < group; k += WIDTH) {
        const Signed own = round_to_int(load_register(from + k) * inverse);
        to_bytes((step == 1 ? (int8_t*)words : codes) + k, own);
        total += own;
    }
    if (step != 1)
        for (int64_t i = 0; i < group / 4; ++i) std::memcpy(words + i * step, codes + 4 * i, 4);
    return (Words)total;
}

}  // namespace

void Operand::pack_tile_row(const bf16* from, int64_t depth, int64_t step, char* to) {
    constexpr int64_t BYTES = 2 * TILE_DEPTH;
    for (; depth >= TILE_DEPTH; depth -= TILE_DEPTH, from += TILE_DEPTH, to += step)
        std::memcpy(to, from, BYTES);
    if (!depth) return;
    std::memcpy(to, from, 2 * depth);
    std::memset(to + 2 * depth, 0, BYTES - 2 * depth);
}

// Transposes many rows in registers; the stores overwrite lanes that have no row.
template <typename T>
void Operand::pack_group(const T* const* from, int64_t rows, int64_t depth, int64_t padded,
                         int64_t type, float* to) const {
    if constexpr (sizeof(T) == 2)
        if (pairs_) return pack_pairs(from, rows, depth, padded, to);
    const float* factors = factors_of(type);
    int64_t k = 0;
    if (WIDTH > 4 && rows > 4)
        for (; k + WIDTH <= depth; k += WIDTH) {
            Words square[WIDTH] = {};
            for (int64_t r = 0; r < rows; ++r) square[r] = (Words)load_register(from[r] + k);
            transpose(square);
            for (int i = 0; i < WIDTH; ++i) {
                const Floats own = (Floats)square[i] * factors[i % 8];
                std::memcpy(to + (k + i) * rows, &own, sizeof own);
            }
        }
    if (rows == 3 && factors == PLAIN_FACTORS) {
        const T *a = from[0], *b = from[1], *c = from[2];
        for (; k < depth; ++k) {
            to[3 * k] = load_one(a + k);
            to[3 * k + 1] = load_one(b + k);
            to[3 * k + 2] = load_one(c + k);
        }
    }
    for (; k < depth; ++k)
        for (int64_t r = 0; r < rows; ++r)
            to[k * rows + r] = load_one(from[r] + k) * factors[k % 8];
    for (; k < padded; ++k)
        for (int64_t r = 0; r < rows; ++r) to[k * rows + r] = 0.0f;
}

template <typename T>
void Operand::sum_groups(const T* const* from, int64_t rows, const Weight& weight,
                         float* to) const {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t g = 0; g < weight.depth / weight.group; ++g) {
            const T* own = from[r] + g * weight.group;
            Vec total = zero();
            for (int64_t k = 0; k < weight.group; k += LANES) total = total + load(own + k);
            to[g * rows + r] = sum(total);
        }
}

// Maps the largest magnitude of a group to 127. Magnitudes too small to divide by become zero; a
// value that is not finite makes the scale NaN. Without zero points the sums are integers: what the
// codes' middle takes off a product.
template <typename T>
void Operand::quantise(const T* const* from, int64_t rows, int64_t among, bool by_rows,
                       const Weight& weight, float* to) const {
    const int32_t middle = (int32_t)middle_of(weight.type);
    const int64_t group = row_group(weight), count = weight.depth / group;
    const int64_t row_step = by_rows ? group / 4 : 1, word_step = by_rows ? 1 : among;
    float *scales = to + weight.depth / 4 * among, *sums = scales + count * among;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t g = 0; g < count; g += WIDTH) {
            const int64_t some = std::min<int64_t>(WIDTH, count - g);
            const T* own = from[r] + g * group;
            const Ranges ranges = ranges_of(own, group, some);
            float* words = to + g * group / 4 * among + r * row_step;
            Words totals[WIDTH] = {};
            for (int64_t i = 0; i < some; ++i, own += group, words += group / 4 * among)
                totals[i] = put_codes(own, group, ranges.inverse[i], words, word_step);
            // Unsigned, because sums of codes of values that are not finite may overflow.
            const Words whole = transpose_reduce(totals, [](Words a, Words b) { return a + b; });
            const Floats last = weight.zeros ? __builtin_convertvector((Signed)whole, Floats)
                                             : (Floats)(whole * (uint32_t)-middle);
            for (int64_t i = 0; i < some; ++i) {
                scales[(g + i) * among + r] = ranges.scale[i];
                sums[(g + i) * among + r] = last[i];
            }
        }
}

#define VLM_OPERAND(T)                                                                             \
    template void Operand::pack_group(const T* const*, int64_t, int64_t, int64_t, int64_t, float*) \
        const;                                                                                     \
    template void Operand::quantise(const T* const*, int64_t, int64_t, bool, const Weight&,        \
                                    float*) const;                                                 \
    template void Operand::sum_groups(const T* const*, int64_t, const Weight&, float*) const;
VLM_OPERAND(float)
VLM_OPERAND(bf16)
#undef VLM_OPERAND

}  // namespace vlm
