// Sums of products of bytes, as the instructions of a processor have them.
#pragma once

#include "registers.h"

namespace vlm {

// Whether four such products are summed by one instruction, or two by one and pairs of those by
// another, which saturate what does not fit 16 bits.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || \
    defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool BYTE_FOURS = true, BYTE_PAIRS = false;
#elif defined(__AVX512BW__) || defined(__AVX2__)
constexpr bool BYTE_FOURS = false, BYTE_PAIRS = true;
#else
constexpr bool BYTE_FOURS = false, BYTE_PAIRS = false;
#endif

// c plus, word by word, the products of the four unsigned bytes in a and the signed ones in b.
inline Signed dots(Words a, Words b, Signed c) {
#if defined(__AVX512VNNI__)
    return (Signed)_mm512_dpbusd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (Signed)_mm256_dpbusd_avx_epi32((__m256i)c, (__m256i)a, (__m256i)b);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (Signed)vusdotq_s32((int32x4_t)c, (uint8x16_t)a, (int8x16_t)b);
#elif defined(__ARM_FEATURE_DOTPROD)
    // Bytes less 128, and 128 times the sum of the others.
    const int8x16_t half = vdupq_n_s8(-128), own = (int8x16_t)(a ^ 0x80808080u);
    const int32x4_t rest = vdotq_s32(vdupq_n_s32(0), half, (int8x16_t)b);
    return (Signed)vsubq_s32(vdotq_s32((int32x4_t)c, own, (int8x16_t)b), rest);
#else
    for (int byte = 0; byte < 4; ++byte)
        c += (Signed)(a >> 8 * byte & 255u) * ((Signed)(b << (24 - 8 * byte)) >> 24);
    return c;
#endif
}

// Only where BYTE_PAIRS. Sums of neighbours: of the products of unsigned bytes in a and signed ones
// in b, as shorts, and of shorts, as words. Sums of shorts lane by lane. Magnitudes of bytes, and
// the bytes of b with the signs of those in a.
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

// What a register's columns have of a group of SIZE k of a row: the sums of codes, at most MOST,
// less OFF, times the row's bytes, none of which is -128. Where pairs are summed, codes that are
// small and few stay in shorts, and those that are large lose OFF, so that pairs fit.
template <int MOST, int64_t SIZE>
class GroupSum {
  public:
    static constexpr int OFF = BYTE_PAIRS && MOST > 127 ? 128 : 0;

    VLM_INLINE void begin(Signed first) { total_ = IN_SHORTS ? Signed{} : first; }

    // Codes of four k, and the row's bytes of those, the same for all columns.
    VLM_INLINE void add(Words codes, Words bytes) {
        if constexpr (IN_SHORTS) {
            total_ = (Signed)add_shorts((Words)total_, byte_pairs(codes, bytes));
        } else if constexpr (OFF) {
            const Words own = codes ^ OFF * 0x01010101u;
            total_ += short_pairs(byte_pairs(magnitudes(own), with_signs(bytes, own)));
        } else if constexpr (BYTE_PAIRS) {
            total_ += short_pairs(byte_pairs(codes, bytes));
        } else {
            total_ = dots(codes, bytes, total_);
        }
    }

    VLM_INLINE Signed end(Signed first) const {
        if constexpr (IN_SHORTS) return short_pairs((Words)total_) + first;
        return total_;
    }

  private:
    static constexpr bool IN_SHORTS = BYTE_PAIRS && SIZE / 2 * 127 * MOST <= 32767;

    Signed total_;
};

}  // namespace vlm
