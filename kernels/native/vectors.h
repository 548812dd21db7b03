// Vectors of sixteen float32 lanes, independent of register width: one source, with the same bits,
// for AVX-512, AVX2 and NEON. bfloat16 and float16 are stored as their bits.
#pragma once

#include <cmath>

#include "registers.h"

namespace vlm {

constexpr int LANES = 16;

struct bf16 {
    uint16_t bits;
};

struct f16 {
    uint16_t bits;
};

// Named members, not an array, so that compilers keep them in registers.
struct Vec {
    Floats a;
#if VLM_REGISTERS_PER_VEC >= 2
    Floats b;
#endif
#if VLM_REGISTERS_PER_VEC >= 4
    Floats c, d;
#endif
};

// Calls `make(lane)` for each register, with the number of its first lane.
template <typename Make>
VLM_INLINE Vec make_vec(const Make& make) {
#if VLM_REGISTERS_PER_VEC == 1
    return {make(0)};
#elif VLM_REGISTERS_PER_VEC == 2
    return {make(0), make(WIDTH)};
#else
    return {make(0), make(WIDTH), make(2 * WIDTH), make(3 * WIDTH)};
#endif
}

// Calls `what` for each register.
template <typename Do, typename... Vecs>
VLM_INLINE Vec each(const Do& what, const Vecs&... v) {
#if VLM_REGISTERS_PER_VEC == 1
    return {what(v.a...)};
#elif VLM_REGISTERS_PER_VEC == 2
    return {what(v.a...), what(v.b...)};
#else
    return {what(v.a...), what(v.b...), what(v.c...), what(v.d...)};
#endif
}

VLM_INLINE Floats broadcast(float value) { return value - Floats{}; }

VLM_INLINE Vec all(float value) {
    return make_vec([=](int) { return broadcast(value); });
}

VLM_INLINE Vec zero() {
    return make_vec([](int) { return Floats{}; });
}

VLM_INLINE Vec operator+(const Vec& a, const Vec& b) {
    return each([](Floats x, Floats y) { return x + y; }, a, b);
}
VLM_INLINE Vec operator-(const Vec& a, const Vec& b) {
    return each([](Floats x, Floats y) { return x - y; }, a, b);
}
VLM_INLINE Vec operator*(const Vec& a, const Vec& b) {
    return each([](Floats x, Floats y) { return x * y; }, a, b);
}
VLM_INLINE Vec operator/(const Vec& a, const Vec& b) {
    return each([](Floats x, Floats y) { return x / y; }, a, b);
}
VLM_INLINE Vec operator-(const Vec& a) {
    return each([](Floats x) { return -x; }, a);
}
VLM_INLINE Vec operator+(float a, const Vec& b) { return all(a) + b; }
VLM_INLINE Vec operator-(float a, const Vec& b) { return all(a) - b; }
VLM_INLINE Vec operator*(float a, const Vec& b) { return all(a) * b; }
VLM_INLINE Vec operator*(const Vec& a, float b) { return a * all(b); }
VLM_INLINE Vec operator/(float a, const Vec& b) { return all(a) / b; }

// a * b + c, rounded once.
VLM_INLINE Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return each([](Floats x, Floats y, Floats z) { return fma(x, y, z); }, a, b, c);
}
VLM_INLINE Vec fma(float a, const Vec& b, const Vec& c) { return fma(all(a), b, c); }
VLM_INLINE Vec fma(const Vec& a, float b, const Vec& c) { return fma(a, all(b), c); }
VLM_INLINE Vec fma(const Vec& a, const Vec& b, float c) { return fma(a, b, all(c)); }

// Returns `yes` where a < b, and `no` elsewhere, also where one of them is NaN.
VLM_INLINE Vec where_less(const Vec& a, const Vec& b, const Vec& yes, const Vec& no) {
    return each([](Floats x, Floats y, Floats p, Floats q) { return x < y ? p : q; }, a, b, yes,
                no);
}

VLM_INLINE Vec where_nan(const Vec& x, const Vec& yes, const Vec& no) {
    return each([](Floats v, Floats p, Floats q) { return v != v ? p : q; }, x, yes, no);
}

VLM_INLINE Vec maximum(const Vec& a, const Vec& b) {
    return each([](Floats x, Floats y) { return x > y ? x : y; }, a, b);
}

VLM_INLINE Vec magnitude(const Vec& x) {
    return each([](Floats v) { return (Floats)((Words)v & 0x7fffffffu); }, x);
}

template <typename V>
VLM_INLINE V read(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// Returns total plus lanes times the broadcast number at `factor`, or pairs of bfloat16 times the
// pair there.
template <bool PAIRS>
VLM_INLINE Floats fma_broadcast(const float* factor, Floats lanes, Floats total) {
    if constexpr (PAIRS) {
        uint32_t word;
        std::memcpy(&word, factor, sizeof word);
        return fma_bf16_pairs(word - Words{}, (Words)lanes, total);
    } else {
        return fma(broadcast(*factor), lanes, total);
    }
}

VLM_INLINE Floats load_register(const float* from) { return read<Floats>(from); }
VLM_INLINE Floats load_register(const bf16* from) { return (Floats)(from_halves(from) << 16); }
VLM_INLINE Floats load_register(const f16* from) { return from_float16(from); }

template <typename T>
VLM_INLINE Vec load(const T* from) {
    return make_vec([=](int lane) { return load_register(from + lane); });
}

// Calls `use(lane, registers...)` for each register of the vectors.
template <typename Use, typename... Vecs>
VLM_INLINE void for_each_register(const Use& use, const Vecs&... v) {
    use(0, v.a...);
#if VLM_REGISTERS_PER_VEC >= 2
    use(WIDTH, v.b...);
#endif
#if VLM_REGISTERS_PER_VEC >= 4
    use(2 * WIDTH, v.c...);
    use(3 * WIDTH, v.d...);
#endif
}

// Rounds float32 to bfloat16 in the upper half, to nearest, ties to even, as torch does.
VLM_INLINE Words rounded_bits(Floats x) {
    const Words bits = (Words)x;
    const Words kept = bits + 0x7fff + ((bits >> 16) & 1);
    return x != x ? bits | 0x400000u : kept;
}

// Stores numbers that are exact in the type.
VLM_INLINE void store_exact(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
VLM_INLINE void store_exact(bf16* to, Floats x) { to_halves(to, (Words)x >> 16); }
template <typename T>
VLM_INLINE void store_exact(T* to, const Vec& v) {
    for_each_register([=](int lane, Floats x) { store_exact(to + lane, x); }, v);
}

VLM_INLINE void store_register(float* to, Floats x) { store_exact(to, x); }
VLM_INLINE void store_register(bf16* to, Floats x) { store_exact(to, (Floats)rounded_bits(x)); }
VLM_INLINE void store_register(f16* to, Floats x) { to_float16(to, x); }

template <typename T>
VLM_INLINE void store(T* to, const Vec& v) {
    for_each_register([=](int lane, Floats x) { store_register(to + lane, x); }, v);
}

VLM_INLINE float load_one(const float* from) { return *from; }

VLM_INLINE float load_one(const bf16* from) {
    const uint32_t bits = (uint32_t)from->bits << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

VLM_INLINE void store_one(float* to, float value) { *to = value; }

VLM_INLINE void store_one(bf16* to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    to->bits = value != value ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// Loads the first `count` lanes; the others are zero.
template <typename T>
VLM_INLINE Vec load_partial(const T* from, int64_t count) {
    float lanes[LANES] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i] = load_one(from + i);
    return load(lanes);
}

template <typename T>
VLM_INLINE void store_partial(T* to, const Vec& v, int64_t count) {
    float lanes[LANES];
    store(lanes, v);
    for (int64_t i = 0; i < count; ++i) store_one(to + i, lanes[i]);
}

// Returns the value that results from storing x as T.
template <typename T>
VLM_INLINE Floats rounded(Floats x) {
    if constexpr (sizeof(T) == sizeof(float)) return x;
    return (Floats)(rounded_bits(x) & 0xffff0000u);
}
template <typename T>
VLM_INLINE Vec rounded(const Vec& v) {
    return each([](Floats x) { return rounded<T>(x); }, v);
}

// Swaps halves of each group of SPAN lanes: lane i takes lane i ^ (SPAN / 2).
template <int SPAN>
VLM_INLINE Floats swapped(Floats v) {
    struct From {
        static constexpr int of(int lane) { return lane ^ (SPAN / 2); }
    };
    return shuffle<From>(v, v);
}

// Reduces all lanes: first those eight apart, then four, two and one.
template <typename Join>
VLM_INLINE float reduce(const Vec& v, const Join& join) {
#if VLM_REGISTERS_PER_VEC == 1
    Floats x = v.a;
#elif VLM_REGISTERS_PER_VEC == 2
    Floats x = join(v.a, v.b);
#else
    Floats x = join(join(v.a, v.c), join(v.b, v.d));
#endif
    if constexpr (WIDTH > 8) x = join(x, swapped<16>(x));
    if constexpr (WIDTH > 4) x = join(x, swapped<8>(x));
    x = join(x, swapped<4>(x));
    x = join(x, swapped<2>(x));
    return x[0];
}

VLM_INLINE float sum(const Vec& v) {
    return reduce(v, [](Floats a, Floats b) { return a + b; });
}

VLM_INLINE float reduce_max(const Vec& v) {
    return reduce(v, [](Floats a, Floats b) { return a > b ? a : b; });
}

VLM_INLINE float square_root(float x) { return __builtin_sqrtf(x); }

template <typename T>
VLM_INLINE float sum_of_squares(const T* x, int64_t width) {
    Vec squares = zero();
    for (int64_t c = 0; c < width; c += LANES) {
        const Vec own = load(x + c);
        squares = fma(own, own, squares);
    }
    return sum(squares);
}

// Returns one over the root mean square.
template <typename T>
VLM_INLINE float inverse_rms(const T* x, int64_t width, float eps) {
    return 1.0f / square_root(sum_of_squares(x, width) / (float)width + eps);
}

}  // namespace vlm
