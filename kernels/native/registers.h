// The processor's vector registers: the few operations that compilers do not generate from plain
// vector code. All else (+, -, *, /, comparisons, shuffles) uses the compiler's vector types, which
// become single instructions only if they are as wide as a register.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#error "vector registers with fused multiply-add are needed: AVX2, AVX-512 or NEON"
#endif

// Registers that hold 16 lanes of float32.
#if defined(__AVX512F__)
#define VLM_REGISTERS_PER_VEC 1
#elif defined(__AVX2__)
#define VLM_REGISTERS_PER_VEC 2
#else
#define VLM_REGISTERS_PER_VEC 4
#endif

// For functions of a few instructions, where a call would double the cost.
#define VLM_INLINE inline __attribute__((always_inline))

namespace vlm {

constexpr int WIDTH = 16 / VLM_REGISTERS_PER_VEC;  // float32 lanes of a register

// Tells whether one instruction multiplies pairs of bfloat16; its sums round differently.
#if defined(__AVX512BF16__)
constexpr bool HAS_BF16_DOT = true;
#else
constexpr bool HAS_BF16_DOT = false;
#endif

// Tells whether the processor has AMX tiles, of bfloat16 and of bytes.
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && \
    defined(__AVX512BF16__)
#define VLM_AMX 1
#else
#define VLM_AMX 0
#endif
constexpr bool HAS_AMX = VLM_AMX;

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Signed __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

// Cache level that weights are prefetched into, as __builtin_prefetch takes it. Processors with AMX
// allow few outstanding prefetches into L1, so use L2 there.
constexpr int L1_CACHE = 3, L2_CACHE = 2, WEIGHT_CACHE = HAS_AMX ? L2_CACHE : L1_CACHE;
// Prefetch distance in bytes for weights that are not codes.
constexpr int64_t WEIGHT_PREFETCH_DISTANCE = HAS_AMX ? 2048 : 4096;

// Prefetches 128 bytes of a weight.
template <int CACHE = WEIGHT_CACHE>
VLM_INLINE void prefetch_weight(const char* at) {
    __builtin_prefetch(at, 0, CACHE);
    __builtin_prefetch(at + 64, 0, CACHE);
}

// Prefetches one line of a weight; asm keeps it between the instructions before and after it.
// Processors with AMX answer back-to-back prefetches more slowly, so pad with nops.
VLM_INLINE void prefetch_line(const char* at) {
#if VLM_AMX
    asm volatile("prefetcht1 %0\n\tnop\n\tnop\n\tnop" : : "m"(*at));
#elif defined(__x86_64__)
    asm volatile("prefetcht0 %0" : : "m"(*at));
#else
    __builtin_prefetch(at);
#endif
}

// Selects lanes from a and b: lane i of the result is lane `AT::of(i)` of their concatenation.
template <typename At, typename V, int... LANE>
VLM_INLINE V shuffle(V a, V b, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, At::of(LANE)...);
#else
    // Older GCC has only this builtin.
    typedef decltype(a < a) Lanes;
    return __builtin_shuffle(a, b, Lanes{At::of(LANE)...});
#endif
}
template <typename At, typename V>
VLM_INLINE V shuffle(V a, V b) {
    constexpr int COUNT = sizeof a / sizeof a[0];
    return shuffle<At>(a, b, std::make_integer_sequence<int, COUNT>());
}

// a * b + c, rounded once.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

// Widens the first or the second of every pair of bfloat16 at `from`. If IN_ONE, with 16 registers,
// it uses a single register: compilers would keep the pairs in a second one and the mask in a
// third, and lose accumulators.
template <bool SECOND, bool IN_ONE>
VLM_INLINE Floats unpack_bf16(const char* from) {
    constexpr uint32_t UPPER = 0xffff0000u;
    Words pairs;
#if defined(__AVX2__) && !defined(__AVX512F__)
    alignas(32) static constexpr uint32_t MASK[] = {UPPER, UPPER, UPPER, UPPER,
                                                    UPPER, UPPER, UPPER, UPPER};
    typedef const char Bytes[sizeof pairs];
    if (IN_ONE) {
        if (SECOND)
            asm("vmovdqu %1, %0\n\tvpand %2, %0, %0" : "=x"(pairs) : "m"(*(Bytes*)from), "m"(MASK));
        else
            asm("vmovdqu %1, %0\n\tvpslld $16, %0, %0" : "=x"(pairs) : "m"(*(Bytes*)from));
        return (Floats)pairs;
    }
#endif
    std::memcpy(&pairs, from, sizeof pairs);
    return (Floats)(SECOND ? pairs & UPPER : pairs << 16);
}

inline Floats minimum(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return (Floats)vminq_f32((float32x4_t)a, (float32x4_t)b);
#endif
}

// Returns c plus the products of the pairs of bfloat16 in a and b. Requires HAS_BF16_DOT.
inline Floats fma_bf16_pairs(Words a, Words b, Floats c) {
#if defined(__AVX512BF16__) && defined(__clang__)
    // Clang 16 crashes on such a product with a broadcast from memory.
    asm("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
#elif defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
    (void)a, (void)b;
    return c;
#endif
}

// Rounds values below 2^31 to the nearest integer, ties to even.
inline Signed round_to_int(Floats x) {
#if defined(__AVX512F__)
    return (Signed)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (Signed)_mm256_cvtps_epi32((__m256)x);
#else
    return (Signed)vcvtnq_s32_f32((float32x4_t)x);
#endif
}

// Loads WIDTH unsigned bytes and widens each to a word.
inline Signed from_bytes(const void* from) {
#if defined(__AVX512F__)
    return (Signed)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (Signed)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    Signed words;
    for (int i = 0; i < WIDTH; ++i) words[i] = ((const uint8_t*)from)[i];
    return words;
#endif
}

// Loads WIDTH signed bytes and widens each to a word.
inline Signed from_signed_bytes(const void* from) {
#if defined(__AVX512F__)
    return (Signed)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (Signed)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    Signed words;
    for (int i = 0; i < WIDTH; ++i) words[i] = ((const int8_t*)from)[i];
    return words;
#endif
}

// Loads WIDTH 16-bit values and widens each to a word. (Compilers widen in two parts.)
inline Words from_halves(const void* from) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    return (Words)vmovl_u16(vld1_u16((const uint16_t*)from));
#endif
}

// Stores the lower half of every word.
inline void to_halves(void* to, Words words) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)words));
#else
    const Halves halves = __builtin_convertvector(words, Halves);
    std::memcpy(to, &halves, sizeof halves);
#endif
}

// Stores the lowest byte of every word.
inline void to_bytes(void* to, Signed words) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)words));
#elif defined(__AVX2__)
    const __m256i places = _mm256_broadcastsi128_si256(
        _mm_set_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 12, 8, 4, 0));
    const __m256i lanes = _mm256_shuffle_epi8((__m256i)words, places);
    const __m128i high = _mm256_extracti128_si256(lanes, 1);
    _mm_storel_epi64((__m128i*)to, _mm_unpacklo_epi32(_mm256_castsi256_si128(lanes), high));
#else
    uint8_t bytes[WIDTH];
    for (int i = 0; i < WIDTH; ++i) bytes[i] = (uint8_t)words[i];
    std::memcpy(to, bytes, WIDTH);
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
