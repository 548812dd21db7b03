// Groups of k of a quantised row: their bytes, their scales, and how their sums become results.
#pragma once

#include "codes/byte_products.h"
#include "codes/grouped.h"

namespace vlm {

// Broadcasts a word of a row's bytes to all columns of a register.
inline Words broadcast4(const float* word) {
    uint32_t bits;
    std::memcpy(&bits, word, sizeof bits);
    return bits - Words{};
}

// The usual form of a kind of weight: the type of its scales, and the k per scale.
template <int64_t TYPE, int64_t SIZE>
struct UsualScales {
    static constexpr int64_t SCALES = TYPE, GROUP = SIZE;
};
template <typename Kind>
struct Usual {};
template <>
struct Usual<Int6Bytes> : UsualScales<ROOTS, 32> {};
template <>
struct Usual<Int4Bytes> : UsualScales<ROOTS, 32> {};
template <>
struct Usual<Float4Bytes> : UsualScales<FLOAT8, 16> {};

// Turns a group's accumulator, whose codes are less OFFSET, into a result.
template <int OFFSET>
struct RowGroupScale {
    bool zeros, minima;  // the weight has zero points, which are minima
    const float *scale, *sum;

    // Returns the accumulator's start. Without zero points and OFFSET, it is what the codes' middle
    // takes off.
    VLM_INLINE Signed first() const { return OFFSET || zeros ? Signed{} : (Signed)broadcast4(sum); }

    // Returns before + sum * both scales. Sums of a group are integers below 2^24, exact in
    // float32.
    VLM_INLINE Floats add(Signed total, const GroupScales& of, int j, Floats before) const {
        Floats own = __builtin_convertvector(total, Floats);
        if (zeros && !minima) own = fma((float)OFFSET - of.zero[j], broadcast(*sum), own);
        const Floats after = fma(own, of.scale[j] * broadcast(*scale), before);
        if (!minima) return after;
        const Floats offset = fma(broadcast((float)OFFSET), of.scale[j], -of.zero[j]);
        return fma(offset * broadcast(*scale), broadcast(*sum), after);
    }
};

// Returns what `make` returns for the group size of a row as a compile-time constant, and for
// whether the weight is plain: of the usual group size and type of scales, without zero points.
// Only SPECIALISED kernels are compiled for plain weights, to limit compile time.
template <typename Function, typename Kind, bool SPECIALISED, typename Make>
Function dispatch_group_size(const Weight& weight, const Make& make) {
    constexpr std::integral_constant<int64_t, 16> SMALL{};
    constexpr std::integral_constant<int64_t, 32> LARGE{};
    if constexpr (SPECIALISED) {
        constexpr std::integral_constant<int64_t, Usual<Kind>::GROUP> USUAL{};
        if (weight.group == USUAL && weight.scale_type == Usual<Kind>::SCALES && !weight.zeros)
            return make(USUAL, std::true_type());
    }
    if (row_group(weight) == SMALL) return make(SMALL, std::false_type());
    return make(LARGE, std::false_type());
}

// Makes the properties of a plain weight known to the compiler.
template <typename Kind>
VLM_INLINE void assume_plain(Weight& weight, int64_t size) {
    weight.group = size, weight.scale_type = Usual<Kind>::SCALES, weight.zeros = nullptr;
    weight.floors = nullptr;
}

// Addresses of a panel and of ROWS rows, from group `begin` of SIZE k on.
template <typename Kind, int ROWS, int64_t SIZE>
struct GroupCursor {
    static constexpr int64_t STEPS = SIZE / (4 * Kind::PARTS),
                             BYTES = Kind::WORDS_PER_STEP * PANEL * 4;

    const char* words;
    const float *x, *scales, *sums;

    VLM_INLINE GroupCursor(const Weight& weight, int64_t index, const float* rows, int64_t begin)
        : words(panel_at(weight, index) + begin * STEPS * BYTES),
          x(rows + begin * SIZE / 4 * ROWS),
          scales(rows + weight.depth / 4 * ROWS + begin * ROWS),
          sums(scales + weight.depth / SIZE * ROWS) {}
};

}  // namespace vlm
