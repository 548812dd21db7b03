// Dot products of bytes, with the instructions that a processor has.
#pragma once

#include "registers.h"

namespace vlm {

// HAS_DOT4: one instruction adds four products to a 32-bit lane. HAS_DOT2: one instruction adds two
// products to a 16-bit lane, saturating, and another adds pairs of those lanes.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || \
    defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool HAS_DOT4 = true, HAS_DOT2 = false;
#elif defined(__AVX512BW__) || defined(__AVX2__)
constexpr bool HAS_DOT4 = false, HAS_DOT2 = true;
#else
constexpr bool HAS_DOT4 = false, HAS_DOT2 = false;
#endif

// Returns c plus, per 32-bit lane, the dot product of four unsigned bytes of a and four signed
// bytes of b.
inline Signed dot4(Words a, Words b, Signed c) {
#if defined(__AVX512VNNI__)
    return (Signed)_mm512_dpbusd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (Signed)_mm256_dpbusd_avx_epi32((__m256i)c, (__m256i)a, (__m256i)b);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (Signed)vusdotq_s32((int32x4_t)c, (uint8x16_t)a, (int8x16_t)b);
#elif defined(__ARM_FEATURE_DOTPROD)
    // Make the unsigned bytes signed by subtracting 128; 128 times the sum of b makes up for it.
    const int8x16_t half = vdupq_n_s8(-128), own = (int8x16_t)(a ^ 0x80808080u);
    const int32x4_t rest = vdotq_s32(vdupq_n_s32(0), half, (int8x16_t)b);
    return (Signed)vsubq_s32(vdotq_s32((int32x4_t)c, own, (int8x16_t)b), rest);
#else
    for (int byte = 0; byte < 4; ++byte)
        c += (Signed)(a >> 8 * byte & 255u) * ((Signed)(b << (24 - 8 * byte)) >> 24);
    return c;
#endif
}

// Building blocks for HAS_DOT2. byte_pairs: products of unsigned bytes of a and signed bytes of b,
// adjacent ones added to 16 bits. short_pairs: adjacent 16-bit lanes added to 32 bits. with_signs:
// the bytes of b with the signs of the bytes of a.
#if defined(__AVX512BW__)
inline Words byte_pairs(Words a, Words b) {
    return (Words)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
}
inline Signed short_pairs(Words a) {
    return (Signed)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(1));
}
inline Words add_shorts(Words a, Words b) {
    return (Words)_mm512_add_epi16((__m512i)a, (__m512i)b);
}
inline Words magnitudes(Words a) { return (Words)_mm512_abs_epi8((__m512i)a); }
inline Words with_signs(Words b, Words a) {
    const __mmask64 negative = _mm512_movepi8_mask((__m512i)a);
    return (Words)_mm512_mask_sub_epi8((__m512i)b, negative, _mm512_setzero_si512(), (__m512i)b);
}
#elif defined(__AVX2__)
inline Words byte_pairs(Words a, Words b) {
    return (Words)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
}
inline Signed short_pairs(Words a) {
    return (Signed)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1));
}
inline Words add_shorts(Words a, Words b) {
    return (Words)_mm256_add_epi16((__m256i)a, (__m256i)b);
}
inline Words magnitudes(Words a) { return (Words)_mm256_abs_epi8((__m256i)a); }
inline Words with_signs(Words b, Words a) {
    return (Words)_mm256_sign_epi8((__m256i)b, (__m256i)a);
}
#else
Words byte_pairs(Words a, Words b);
Signed short_pairs(Words a);
Words add_shorts(Words a, Words b);
Words magnitudes(Words a);
Words with_signs(Words b, Words a);
#endif

// Accumulates one group of SIZE k of a row for a register of columns: sum((code - OFFSET) * byte),
// with codes up to MAX_CODE and bytes other than -128. With HAS_DOT2, small groups of small codes
// stay in 16-bit lanes, and large codes are reduced by OFFSET so that pairs of products fit.
template <int MAX_CODE, int64_t SIZE>
class GroupAccumulator {
  public:
    static constexpr int OFFSET = HAS_DOT2 && MAX_CODE > 127 ? 128 : 0;

    VLM_INLINE void begin(Signed first) { total_ = IN_SHORTS ? Signed{} : first; }

    // Adds the codes of four k, times the row's four bytes, which are the same for all columns.
    VLM_INLINE void add(Words codes, Words bytes) {
        if constexpr (IN_SHORTS) {
            total_ = (Signed)add_shorts((Words)total_, byte_pairs(codes, bytes));
        } else if constexpr (OFFSET) {
            const Words own = codes ^ OFFSET * 0x01010101u;
            total_ += short_pairs(byte_pairs(magnitudes(own), with_signs(bytes, own)));
        } else if constexpr (HAS_DOT2) {
            total_ += short_pairs(byte_pairs(codes, bytes));
        } else {
            total_ = dot4(codes, bytes, total_);
        }
    }

    VLM_INLINE Signed end(Signed first) const {
        if constexpr (IN_SHORTS) return short_pairs((Words)total_) + first;
        return total_;
    }

  private:
    static constexpr bool IN_SHORTS = HAS_DOT2 && SIZE / 2 * 127 * MAX_CODE <= 32767;

    Signed total_;
};

}  // namespace vlm
