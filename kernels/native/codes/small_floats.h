// Conversions of four-bit and eight-bit floating point numbers, of weights and of scales.
#pragma once

#include "registers.h"

namespace vlm {

// Twice the value of every e2m1 code: an integer.
constexpr int8_t FLOAT4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int FLOAT4_MIDDLE = 12;

// A table of 16 bytes, for byte shuffles.
struct ByteTable {
    uint8_t bytes[16];
};
// Returns FLOAT4_VALUES plus a number.
constexpr ByteTable float4_bytes(int more) {
    ByteTable table{};
    for (int i = 0; i < 16; ++i) table.bytes[i] = (uint8_t)(FLOAT4_VALUES[i] + more);
    return table;
}

// Looks up every byte of `places`, which must be below 16, in the table.
inline Words table_lookup(const ByteTable& table, Words places) {
#if defined(__AVX512BW__)
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table.bytes));
    return (Words)_mm512_shuffle_epi8(all, (__m512i)places);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table.bytes));
    return (Words)_mm256_shuffle_epi8(all, (__m256i)places);
#elif defined(__aarch64__)
    return (Words)vqtbl1q_u8(vld1q_u8(table.bytes), (uint8x16_t)places);
#else
    uint8_t bytes[sizeof places];
    std::memcpy(bytes, &places, sizeof bytes);
    for (uint8_t& byte : bytes) byte = table.bytes[byte];
    std::memcpy(&places, bytes, sizeof bytes);
    return places;
#endif
}

// Returns FLOAT4_VALUES of the lowest four bits of every word.
inline Floats from_float4(Words codes) {
#if defined(__AVX512F__)
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    return (Floats)_mm512_permutexvar_ps((__m512i)codes, values);
#elif defined(__AVX2__)
    const __m256 sizes = _mm256_setr_ps(0, 1, 2, 3, 4, 6, 8, 12);
    const Words size = (Words)_mm256_permutevar8x32_ps(sizes, (__m256i)codes);
    return (Floats)(size | codes << 28 & 0x80000000u);
#else
    // Shift the bits to where float32 has them. Subnormal numbers become twice that less 2, which
    // is smaller than the normal formula's result.
    const Floats none = {}, normal = (Floats)(((codes & 7u) << 22) + 0x3f800000u);
    const Floats size = minimum(normal, fma(normal, none + 2.0f, none - 2.0f));
    return (Floats)((Words)size | (codes << 28 & 0x80000000u));
#endif
}

// Converts e4m3 numbers without infinities: the lowest byte of each sign-extended word.
inline Floats from_float8(Words codes) {
    const Floats none = {}, normal = (Floats)((codes << 20 & 0x07f00000u) + 0x3c000000u);
    const Floats size = minimum(normal, fma(normal, none + 2.0f, none - 0x1p-6f));
    return (Floats)((Words)size | (codes & 0x80000000u));
}

#if defined(__AVX512BF16__)

// Spreads bytes 0 and 1 of every word, or 2 and 3, to its two halves.
template <bool UPPER>
VLM_INLINE Words bytes_apart(Words words) {
    constexpr int FIRST = UPPER ? 0x8003'8002 : 0x8001'8000;
    const __m128i places =
        _mm_setr_epi32(FIRST, FIRST + 0x0004'0004, FIRST + 0x0008'0008, FIRST + 0x000c'000c);
    return (Words)_mm512_shuffle_epi8((__m512i)words, _mm512_broadcast_i32x4(places));
}

// Converts e4m3 codes in 16-bit lanes to bfloat16: rebias the exponent, and look subnormal numbers
// up.
VLM_INLINE Words to_bfloat16(Words halves) {
    const __m128i below = _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60);
    const __m512i codes = (__m512i)halves;
    const __m512i bits = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
    const __m512i sign = _mm512_slli_epi16(_mm512_sub_epi16(codes, bits), 8);
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(bits, 4), _mm512_set1_epi16(0x3c00));
    const __mmask32 small = _mm512_cmplt_epu16_mask(bits, _mm512_set1_epi16(8));
    const __m512i size =
        _mm512_mask_permutexvar_epi16(normal, small, bits, _mm512_broadcast_i32x4(below));
    return (Words)_mm512_or_si512(size, sign);
}

#endif

// Converts the first two or the last two e4m3 codes of every word to a pair of bfloat16, exactly.
// Requires HAS_BF16_DOT.
template <bool LAST>
VLM_INLINE Words pair_of_float8(Words codes) {
#if defined(__AVX512BF16__)
    return to_bfloat16(bytes_apart<LAST>(codes));
#else
    return codes;
#endif
}

// Returns 2^(e - 127) of an exponent e per word.
inline Floats from_e8m0(Signed exponents) {
    const Signed normal = exponents << 23, least = Signed{} + 0x00400000;
    return (Floats)(normal > least ? normal : least);
}

}  // namespace vlm
