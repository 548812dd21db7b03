// The processor's own vectors: the few operations that compilers do not make of plain vector code.
// Everything else (+, -, *, /, comparisons, shuffles) is written with the compiler's vector types,
// which become single instructions only if they are as wide as a register.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#error "vector registers with fused multiply-add are needed: AVX2, AVX-512 or NEON"
#endif

// How many registers 16 lanes of float32 are.
#if defined(__AVX512F__)
#define VLM_PARTS 1
#elif defined(__AVX2__)
#define VLM_PARTS 2
#else
#define VLM_PARTS 4
#endif

// For what is a few instructions, which calls would double.
#define VLM_INLINE inline __attribute__((always_inline))

namespace vlm {

constexpr int WIDTH = 16 / VLM_PARTS;  // float32 lanes of a register

// Whether products of pairs of bfloat16 are one instruction; its sums round in a way of their own.
#if defined(__AVX512BF16__)
constexpr bool PAIR_PRODUCTS = true;
#else
constexpr bool PAIR_PRODUCTS = false;
#endif

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Signed __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

// a * b + c, rounded once.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

// c plus the products of the pairs of bfloat16 in a and b; only where PAIR_PRODUCTS.
inline Floats fused_pairs(Words a, Words b, Floats c) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
    (void)a, (void)b;
    return c;
#endif
}

// The nearest whole number of a value below 2^31, ties to even.
inline Signed nearest(Floats x) {
#if defined(__AVX512F__)
    return (Signed)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (Signed)_mm256_cvtps_epi32((__m256)x);
#else
    return (Signed)vcvtnq_s32_f32((float32x4_t)x);
#endif
}

// A register's lanes from as many bytes.
inline Words from_bytes(const void* from) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    uint32_t bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    const uint8x8_t eight = vreinterpret_u8_u32(vdup_n_u32(bytes));
    return (Words)vmovl_u16(vget_low_u16(vmovl_u8(eight)));
#endif
}

inline Floats from_float16(const void* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    uint16x4_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(bits));
#endif
}

inline void to_float16(void* to, Floats x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    const uint16x4_t bits = vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x));
    std::memcpy(to, &bits, sizeof bits);
#endif
}

}  // namespace vlm
