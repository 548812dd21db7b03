// Groups of k of a row that is quantised: what is multiplied, and what becomes of their sums.
#pragma once

#include "codes/byte_products.h"
#include "codes/grouped.h"

namespace vlm {

// A word of a row's bytes, the same for all columns of a register.
inline Words four_of(const float* word) {
    uint32_t bits;
    std::memcpy(&bits, word, sizeof bits);
    return bits - Words{};
}

// What the usual weight of a kind has: scales of a type, of so many k each.
template <int64_t TYPE, int64_t SIZE>
struct UsualScales {
    static constexpr int64_t SCALES = TYPE, GROUP = SIZE;
};
template <typename Kind>
struct Usual {};
template <>
struct Usual<SixBitWords> : UsualScales<ROOTS, 32> {};
template <>
struct Usual<HalfByteWords> : UsualScales<ROOTS, 32> {};
template <>
struct Usual<LookedUpWords> : UsualScales<FLOAT8, 16> {};

// What a row has to do with the sum of a group, of codes less OFF.
template <int OFF>
struct RowGroup {
    bool zeros;  // of the weight
    const float *scale, *sum;

    // How it begins: without zero points with what the middle takes off, if that is not OFF.
    VLM_INLINE Signed first() const { return OFF || zeros ? Signed{} : (Signed)four_of(sum); }

    // before + the sum * both scales; all sums of a group are whole numbers below 2^24.
    VLM_INLINE Floats add(Signed total, const GroupScales& of, int j, Floats before) const {
        Floats own = __builtin_convertvector(total, Floats);
        if (zeros) own = fused((float)OFF - of.zero[j], spread(*sum), own);
        return fused(own, of.scale[j] * spread(*scale), before);
    }
};

// What `make` gives for a constant number of k in a group of a row, and for whether the weight is
// plain: every such group has scales of its own, of the usual type, and there are no zero points.
// Only some are worth what compiling such ones takes.
template <typename Function, typename Kind, bool WORTH, typename Make>
Function by_groups(const Weight& weight, const Make& make) {
    constexpr std::integral_constant<int64_t, 16> SMALL{};
    constexpr std::integral_constant<int64_t, 32> LARGE{};
    if constexpr (WORTH) {
        constexpr std::integral_constant<int64_t, Usual<Kind>::GROUP> USUAL{};
        if (weight.group == USUAL && weight.scale_type == Usual<Kind>::SCALES && !weight.zeros)
            return make(USUAL, std::true_type());
    }
    if (row_group(weight) == SMALL) return make(SMALL, std::false_type());
    return make(LARGE, std::false_type());
}

// Tells compilers what they need not ask for in every group of a plain weight.
template <typename Kind>
VLM_INLINE void settle(Weight& weight, int64_t size) {
    weight.group = size, weight.scale_type = Usual<Kind>::SCALES, weight.zeros = nullptr;
}

// Where groups of SIZE k of ROWS rows and a panel lie, from one on.
template <typename Kind, int ROWS, int64_t SIZE>
struct Groups {
    static constexpr int64_t STEPS = SIZE / (4 * Kind::PARTS), BYTES = Kind::STORED * PANEL * 4;

    const char* words;
    const float *x, *scales, *sums;

    VLM_INLINE Groups(const Weight& weight, int64_t index, const float* rows, int64_t begin)
        : words(panel_at(weight, index) + begin * STEPS * BYTES),
          x(rows + begin * SIZE / 4 * ROWS),
          scales(rows + weight.depth / 4 * ROWS + begin * ROWS),
          sums(scales + weight.depth / SIZE * ROWS) {}
};

}  // namespace vlm
