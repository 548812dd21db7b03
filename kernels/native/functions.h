// Elementary functions of 16 lanes, made of additions, products and fused multiply-adds alone. Math
// libraries are not called, because their last bits differ.
#pragma once

#include "vectors.h"

namespace vlm {

// Returns 2^n for integers n from -126 to 127.
VLM_INLINE Floats exp2_integer(Signed n) { return (Floats)((n + 127) << 23); }

// Evaluates a polynomial by Horner's rule, the highest power first.
template <int N>
VLM_INLINE Floats polynomial(Floats x, const float (&factors)[N]) {
    Floats p = broadcast(factors[0]);
#pragma GCC unroll 16
    for (int i = 1; i < N; ++i) p = fma(p, x, broadcast(factors[i]));
    return p;
}

// Taylor series of 2^r for |r| <= 1/2.
constexpr float POWERS[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f,
                            2.4022651e-1f, 6.9314718e-1f, 1.0f};

// Returns 2^x for x <= 0, and 0 below the smallest normal number. NaN stays NaN.
VLM_INLINE Vec exp2_nonpositive(const Vec& x) {
    return each(
        [](Floats v) {
            const Floats least = broadcast(-126.0f);
            const Floats clamped = v < least ? least : v;
            const Signed n = round_to_int(clamped);
            const Floats r = clamped - __builtin_convertvector(n, Floats);
            const Floats power = polynomial(r, POWERS) * exp2_integer(n);
            return v < least ? Floats{} : v != v ? v : power;
        },
        x);
}

VLM_INLINE float exp2_nonpositive(float x) { return exp2_nonpositive(all(x)).a[0]; }

constexpr float EXPONENTS[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                               4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};

// Returns e^x to within two units in the last place: 2^n times a polynomial of the remainder
// (Cephes' expf). The result is 0 below the smallest normal number, infinity above the largest. NaN
// stays NaN.
VLM_INLINE Vec exponential(const Vec& x) {
    return each(
        [](Floats v) {
            const Floats least = broadcast(-87.33654f), most = broadcast(88.72283f);
            Floats clamped = v < least ? least : v;
            clamped = most < clamped ? most : clamped;
            const Signed n = round_to_int(clamped * 1.44269504f);
            const Floats whole = __builtin_convertvector(n, Floats);
            Floats r = fma(whole, broadcast(-0.693359375f), clamped);
            r = fma(whole, broadcast(2.12194440e-4f), r);
            Floats p = polynomial(r, EXPONENTS);
            p = fma(p * r, r, r + 1.0f);
            // Multiply by two factors, because 2^128 exceeds float32.
            const Signed half = n >> 1;
            Floats power = p * exp2_integer(half) * exp2_integer(n - half);
            power = most < v ? broadcast(INFINITY) : power;
            return v < least ? Floats{} : v != v ? v : power;
        },
        x);
}

VLM_INLINE float exponential(float x) { return exponential(all(x)).a[0]; }

VLM_INLINE Vec sigmoid(const Vec& x) { return 1.0f / (1.0f + exponential(-x)); }

VLM_INLINE float sigmoid(float x) { return sigmoid(all(x)).a[0]; }

VLM_INLINE Vec silu(const Vec& x) { return x / (1.0f + exponential(-x)); }

constexpr float LOGARITHMS[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,
                                -1.2420140846e-1f, 1.4249322787e-1f,  -1.6668057665e-1f,
                                2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};

// Returns log(x) for normal x > 0 (Cephes' logf).
VLM_INLINE Vec logarithm(const Vec& x) {
    return each(
        [](Floats v) {
            const Words bits = (Words)v;
            const Floats half_up = (Floats)((bits & 0x7fffffu) | 0x3f000000u);  // 1/2 <= m < 1
            const Signed low = half_up < 0.707106781f;
            // A true comparison is -1.
            const Signed n = (Signed)(bits >> 23) - 126 + low;
            const Floats m = (low ? half_up + half_up : half_up) - 1.0f;
            const Floats whole = __builtin_convertvector(n, Floats), square = m * m;
            Floats y = polynomial(m, LOGARITHMS) * m * square;
            y = fma(whole, broadcast(-2.12194440e-4f), y);
            y = fma(square, broadcast(-0.5f), y);
            return fma(whole, broadcast(0.693359375f), m + y);
        },
        x);
}

// Returns log(1 + e^x), and x itself where that is the same number. With u = 1 + e rounded, log(1 +
// e) is log(u) e / (u - 1) up to the last bits (W. Kahan).
VLM_INLINE Vec softplus(const Vec& x) {
    const Vec e = exponential(x), u = 1.0f + e, one = all(1.0f);
    const Vec exact = logarithm(u) * e / (u - one);
    const Vec small = where_less(one, u, exact, e);
    return where_nan(x, x, where_less(all(20.0f), x, x, small));
}

// Returns 1 - erf(x) for x >= 0, to within 1.2e-7 of its value (Numerical Recipes' erfc).
VLM_INLINE Vec complementary_error(const Vec& x) {
    const Vec t = 1.0f / fma(0.5f, x, all(1.0f));
    const float factors[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                             0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
    Vec p = all(0.17087277f);
    for (float factor : factors) p = fma(p, t, factor);
    return t * exponential(fma(-x, x, p));
}

// Returns x Phi(x), with Phi of the normal distribution.
VLM_INLINE Vec gelu(const Vec& x) {
    const Vec tail = 0.5f * complementary_error(magnitude(x) * 0.707106781f);
    return x * where_less(x, zero(), tail, 1.0f - tail);
}

// Returns the usual approximation of gelu: x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
VLM_INLINE Vec gelu_tanh(const Vec& x) {
    const Vec cubed = fma(x * x * x, 0.044715f, x);
    return x / (1.0f + exponential(cubed * -1.59576912f));
}

// Returns max(x, 0) squared.
VLM_INLINE Vec relu2(const Vec& x) {
    const Vec part = where_less(x, zero(), zero(), x);
    return part * part;
}

// Computes cosine and sine of an angle below 2^26, in double precision up to the last rounding:
// subtracts quarter turns, then evaluates fdlibm's polynomials.
inline void cosine_and_sine(float angle, float* cosine, float* sine) {
    const double x = angle, turns = x * 0.63661977236758134308;
    const double shifted = turns + 6755399441055744.0;  // 1.5 * 2^52: the sum rounds to an integer
    const double whole = shifted - 6755399441055744.0;
    const double r = (x - whole * 1.57079632673412561417) - whole * 6.07710050650619224932e-11;
    const double z = r * r;
    double s = 1.58969099521155010221e-10;
    s = s * z - 2.50507602534068634195e-08;
    s = s * z + 2.75573137070700676789e-06;
    s = s * z - 1.98412698298579493134e-04;
    s = s * z + 8.33333333332248946124e-03;
    s = s * z - 1.66666666666666324348e-01;
    s = r + r * z * s;
    double c = -1.13596475577881948265e-11;
    c = c * z + 2.08757232129817482790e-09;
    c = c * z - 2.75573143513906633035e-07;
    c = c * z + 2.48015872894767294178e-05;
    c = c * z - 1.38888888888741095749e-03;
    c = c * z + 4.16666666666666019037e-02;
    c = 1.0 - 0.5 * z + z * z * c;
    const int64_t quarter = (int64_t)whole;
    const bool odd = quarter & 1;
    const double along = odd ? s : c, across = odd ? c : s;
    *cosine = (float)((quarter + 1) & 2 ? -along : along);
    *sine = (float)(quarter & 2 ? -across : across);
}

}  // namespace vlm
