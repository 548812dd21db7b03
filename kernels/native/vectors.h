// Sixteen float32 lanes, written with the compiler's vector types: one source for AVX-512, AVX2 and
// NEON. bfloat16 is stored as its bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
namespace vlm {

constexpr int LANES = 16;

typedef float Vec __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

inline Vec all(float value) { return value - Vec{}; }

inline Vec load(const float* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline Vec load(const bf16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Vec)(__builtin_convertvector(halves, Bits) << 16);
}

inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

// Rounds to the nearest, ties to even, as torch does.
inline void store(bf16* to, Vec v) {
    Bits bits = (Bits)v;
    Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Bits quiet = (bits >> 16) | 0x40;
    Halves halves = __builtin_convertvector((Ints)(v != v) ? quiet : rounded, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

inline float load_one(const float* from) { return *from; }

inline float load_one(const bf16* from) {
    uint32_t bits = (uint32_t)from->bits << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void store_one(float* to, float value) { *to = value; }

inline void store_one(bf16* to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    to->bits = value != value ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// What a value becomes when it is stored as T.
template <typename T>
inline Vec rounded(Vec v) {
    if (sizeof(T) == sizeof(float)) return v;
    bf16 stored[LANES];
    store(stored, v);
    return load(stored);
}

// The lanes eight apart, and four apart.
inline Vec turned_8(Vec v) {
    return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
}
inline Vec turned_4(Vec v) {
    return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
}

// Each step adds the lanes half as far apart, so that lane 0 holds all of them.
inline float sum(Vec v) {
    v += turned_8(v);
    v += turned_4(v);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return v[0];
}

// Lane i holds the sum of v[i]. Every step adds halves of two vectors and keeps both results in
// one.
inline Vec sums(const Vec* v) {
    Vec eight[8], four[4], two[2];
    for (int i = 0; i < 8; ++i)
        eight[i] = __builtin_shufflevector(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19,
                                           20, 21, 22, 23) +
                   __builtin_shufflevector(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26,
                                           27, 28, 29, 30, 31);
    for (int i = 0; i < 4; ++i)
        four[i] = __builtin_shufflevector(eight[i], eight[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9,
                                          10, 11, 24, 25, 26, 27) +
                  __builtin_shufflevector(eight[i], eight[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12,
                                          13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; ++i)
        two[i] = __builtin_shufflevector(four[i], four[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24,
                                         25, 12, 13, 28, 29) +
                 __builtin_shufflevector(four[i], four[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11,
                                         26, 27, 14, 15, 30, 31);
    return __builtin_shufflevector(two[0], two[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12,
                                   28, 14, 30) +
           __builtin_shufflevector(two[0], two[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13,
                                   29, 15, 31);
}

inline float largest(Vec v) {
    Vec a = v, b = turned_8(v);
    a = a > b ? a : b;
    b = turned_4(a);
    a = a > b ? a : b;
    b = __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    a = a > b ? a : b;
    return a[0] > a[1] ? a[0] : a[1];
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// One step of a transposition: rows STEP apart swap the lanes whose number has that bit.
template <int STEP>
inline void swap_lanes(Bits* rows) {
    for (int i = 0; i < LANES; ++i) {
        if (i & STEP) continue;
        Bits a = rows[i], b = rows[i + STEP], low, high;
        for (int lane = 0; lane < LANES; ++lane) {
            low[lane] = lane & STEP ? b[lane - STEP] : a[lane];
            high[lane] = lane & STEP ? b[lane] : a[lane + STEP];
        }
        rows[i] = low;
        rows[i + STEP] = high;
    }
}

// 16 rows of 16 words become its columns.
inline void transpose(Bits* rows) {
    swap_lanes<8>(rows);
    swap_lanes<4>(rows);
    swap_lanes<2>(rows);
    swap_lanes<1>(rows);
}

// e^x to within two units in the last place: 2^n times a polynomial of the rest (Cephes' expf).
// Below the smallest normal number the result is 0, above the largest infinity; NaN stays NaN.
inline Vec exponential(Vec x) {
    Vec clamped = x < -87.33654f ? all(-87.33654f) : x;
    clamped = clamped > 88.72283f ? all(88.72283f) : clamped;
    Vec shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum rounds to an integer
    Ints n = (Ints)shifted - 0x4b400000;
    Vec rounds = shifted - 12582912.0f;
    Vec r = clamped - rounds * 0.693359375f + rounds * 2.12194440e-4f;
    Vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // In two factors, since 2^128 has no float32.
    Ints half = n >> 1;
    Vec low = (Vec)((half + 127) << 23), high = (Vec)((n - half + 127) << 23);
    Vec result = p * low * high;
    result = x < -87.33654f ? Vec{} : result;
    result = x > 88.72283f ? all(INFINITY) : result;
    return x != x ? x : result;
}

// 2^x for x <= 0; 0 below the smallest normal number. NaN stays NaN.
inline Vec power_of_2(Vec x) {
    Vec clamped = x < -126.0f ? all(-126.0f) : x;
    Vec shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the sum rounds to an integer
    Ints n = (Ints)shifted - 0x4b400000;
    Vec r = clamped - (shifted - 12582912.0f);
    Vec p = all(1.5403530e-4f);  // the Taylor series of 2^r, |r| <= 1/2
    p = p * r + 1.3333558e-3f;
    p = p * r + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    return x < -126.0f ? Vec{} : (Vec)((Ints)p + (n << 23));
}

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exponential(-x)); }

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

inline Vec silu(Vec x) { return x / (1.0f + exponential(-x)); }

// One over the root of the mean square, the same for a step of few tokens and for an op's rows.
template <typename T>
inline float inverse_rms(const T* x, int64_t width, float eps) {
    Vec squares{};
    for (int64_t c = 0; c < width; c += LANES) squares += load(x + c) * load(x + c);
    return 1.0f / std::sqrt(sum(squares) / width + eps);
}

}  // namespace vlm
