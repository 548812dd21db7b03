// Keys and values in their stored form (see kernels/kv_quant), and their conversion to operands.
//
// An int8 code means scale * (code - zero). The operand is code - zero, an integer that is exact in
// bfloat16. A key's scale multiplies its scores, and a value's scale multiplies the weights of its
// key.
#pragma once

#include "vectors.h"

namespace vlm {

enum PageForm : int64_t {
    KV_FLOAT32 = 0,
    KV_BFLOAT16 = 1,
    KV_FLOAT16 = 2,
    KV_FLOAT8 = 3,
    KV_INT8 = 4,
};

// Pages of one layer: [blocks, block_size, kv_heads, head_dim] for keys and for values, the dims of
// a head contiguous. Strides are in elements.
struct Pages {
    int64_t form, block_size, block_stride, token_stride, head_stride;
    int64_t scale_block_stride, scale_token_stride,
        scale_head_stride;  // of the scales and zero points
    void *k, *v;
    void *k_scales, *k_zeros, *v_scales, *v_zeros;  // int8 only, float16
};

// float8_e4m3fn.
struct float8 {
    uint8_t bits;
};

struct code8 {
    uint8_t bits;
};

VLM_INLINE Vec load(const code8* from) {
    return make_vec(
        [=](int lane) { return __builtin_convertvector(from_bytes(from + lane), Floats); });
}

// Avoids arithmetic on subnormal numbers, which is slow on some processors.
VLM_INLINE Vec load(const float8* from) {
    return make_vec([=](int lane) {
        const Words code = (Words)from_bytes(from + lane), size = code & 0x7fu;
        const Floats tiny = __builtin_convertvector((Signed)size, Floats) * 0x1p-9f;
        const Floats normal = (Floats)((size << 20) + 0x3c000000u);
        const Floats value = size < 8u ? tiny : size == 0x7fu ? broadcast(NAN) : normal;
        return (Floats)((Words)value | (code & 0x80u) << 24);
    });
}

// Returns table[at[i]] in lane i.
template <typename V>
VLM_INLINE V table_lookup(V table, V at) {
#if defined(__clang__)
    constexpr int COUNT = sizeof at / sizeof at[0];
    V found;
    for (int i = 0; i < COUNT; ++i) found[i] = table[at[i] % COUNT];
    return found;
#else
    return __builtin_shuffle(table, at);
#endif
}

// Converts to bfloat16, exactly.
inline void widen_row(const float8* from, int64_t dim, bf16* to) {
    typedef uint8_t Bytes __attribute__((vector_size(2 * WIDTH)));
    typedef uint16_t Wide __attribute__((vector_size(4 * WIDTH)));
    // Codes below 2^-6, in multiples of 2^-9.
    constexpr uint16_t TINY[] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    Wide tiny;
    for (int i = 0; i < 2 * WIDTH; ++i) tiny[i] = TINY[i % 8];
    int64_t d = 0;
    for (; d + 2 * WIDTH <= dim; d += 2 * WIDTH) {
        const Wide code = __builtin_convertvector(read<Bytes>(from + d), Wide), size = code & 0x7f;
        Wide value = size < 8 ? table_lookup(tiny, size) : (size << 4) + 0x3c00;
        value = size == 0x7f ? Wide{} + 0x7fc0 : value;
        value |= (code & 0x80) << 8;
        std::memcpy(to + d, &value, sizeof value);
    }
    for (; d < dim; d += LANES) store_exact(to + d, load(from + d));
}

// Rounds to nearest, ties to even; saturates at the largest number.
VLM_INLINE void store(float8* to, const Vec& v) {
    for_each_register(
        [=](int lane, Floats x) {
            const Words bits = (Words)x, sign = bits >> 24 & 0x80u;
            Floats size = (Floats)(bits & 0x7fffffffu);
            size = size > 448.0f ? broadcast(448.0f) : size;
            const Words own = (Words)size;
            // Drop 20 of 23 mantissa bits, and change the exponent's bias from 127 to 7.
            const Words normal = ((own + 0x7ffffu + (own >> 20 & 1)) >> 20) - 960;
            // Below 2^-6, codes count multiples of 2^-9, the spacing of float32 at 2^14: adding
            // 2^14 rounds to one.
            const Words tiny = (Words)(size + 16384.0f) - 0x46800000u;
            Words code = size < 0x1p-6f ? tiny : normal;
            code = x != x ? code * 0 + 0x7fu : code;
            to_bytes(to + lane, (Signed)(code | sign));
        },
        v);
}

// Returns the smallest float16 not below x, for 0 <= x <= 65504.
inline f16 round_up_half(float x) {
    f16 halves[LANES];
    float wide[LANES];
    store(halves, all(x));
    store(wide, load(halves));
    return {(uint16_t)(halves[0].bits + (wide[0] < x))};
}

// Quantises `dim` numbers to codes, a scale and a zero point, bit for bit as kv_quant.quantise.
inline void quantise_row(const float* x, int64_t dim, code8* codes, f16* scale, f16* zero_point) {
    Vec low = zero(), high = zero(), broken = zero();
    for (int64_t d = 0; d < dim; d += LANES) {
        const Vec own = load(x + d);
        low = where_less(own, low, own, low);
        high = maximum(own, high);
        broken = where_nan(own, own, broken);
    }
    const float least = -reduce_max(-low), spread_of = reduce_max(high) - least + sum(broken);
    *scale = round_up_half(spread_of / 255.0f);
    f16 halves[LANES];
    for (f16& half : halves) half = *scale;
    const float wide = load(halves).a[0], inverse = wide > 0 ? 1.0f / wide : 0.0f;
    const Signed middle = round_to_int(broadcast(-least * inverse));
    store(halves, all((float)middle[0]));
    *zero_point = halves[0];
    for (int64_t d = 0; d < dim; d += LANES)
        for_each_register(
            [&](int lane, Floats own) {
                Signed code = round_to_int(own) + middle;
                code = code < 0 ? code * 0 : code > 255 ? code * 0 + 255 : code;
                to_bytes(codes + d + lane, code);
            },
            load(x + d) * inverse);
}

template <typename P>
inline void store_plain(void* pages, int64_t place, const float* x, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LANES) store((P*)pages + place + d, load(x + d));
}

// Stores one head's key (or value) of a token in its slot.
inline void store_row(const Pages& pages, bool value, int64_t slot, int64_t head, const float* x,
                      int64_t dim) {
    const int64_t block = slot / pages.block_size, token = slot % pages.block_size;
    const int64_t place =
        block * pages.block_stride + token * pages.token_stride + head * pages.head_stride;
    const int64_t scale = block * pages.scale_block_stride + token * pages.scale_token_stride +
                          head * pages.scale_head_stride;
    void* to = value ? pages.v : pages.k;
    switch (pages.form) {
        case KV_FLOAT32:
            return store_plain<float>(to, place, x, dim);
        case KV_BFLOAT16:
            return store_plain<bf16>(to, place, x, dim);
        case KV_FLOAT16:
            return store_plain<f16>(to, place, x, dim);
        case KV_FLOAT8:
            return store_plain<float8>(to, place, x, dim);
        case KV_INT8:
            f16* scales = (f16*)(value ? pages.v_scales : pages.k_scales) + scale;
            f16* zeros = (f16*)(value ? pages.v_zeros : pages.k_zeros) + scale;
            return quantise_row(x, dim, (code8*)to + place, scales, zeros);
    }
}

}  // namespace vlm
