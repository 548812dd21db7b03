// Products with codes that share scales in groups of k.
//
// Layout. A panel holds 32-bit words, those of all columns of a step contiguous: `[K / 4, 32]` for
// bytes, `[K / 8, 32]` for four bits. A word of bytes has its first k in the least significant
// byte. A word of four-bit codes has k 0 to 3 in the lower halves of its bytes and k 4 to 7 in the
// upper halves. Six-bit codes are `[K / 16, 3, 32]`: two words of the lower four bits, and one of
// the upper two. The bytes of the latter have k 0 to 3 in their lowest two bits, k 4 to 7 in the
// next two, and so on. Scales and zero points of a panel are `[K / group, 32]`.
//
// Codes of a table lie as four-bit codes do; those of two bits as the upper bits of six-bit codes.
// Three-bit codes are `[K / 32, 3, 32]`: two words of the lower two bits, and one of the top bits,
// whose bytes have k 0 to 3 in their lowest bit, and so on. A panel is multiplied after each of its
// codes was replaced by the byte in the weight's table; it is one of INT8 then.
//
// Values. Integer codes are unsigned; a value is (code - zero) * scale. Without zero points, zero
// is the middle code: 128, 32 or 8. FLOAT8 codes are e4m3 without infinities, and a value is code *
// scale. FLOAT4 codes are e2m1 without zero points; a value is twice the code, an integer, times
// the scale. One-byte scales are roots (q * |q|), e4m3 or e8m0; a column's result is multiplied by
// its factor when it is complete.
//
// Two levels. A scale is a signed byte times the float16 number of a larger group, exactly. With
// floors, zero points become minima in the same way: a value is code * scale - minimum.
//
// Arithmetic. Each group has an accumulator: a chain of fused multiply-adds of x * (code - middle)
// over ascending k, starting at zero. With zero points, one more adds (middle - zero) times the sum
// of the group's x (16 lanes over ascending k, then reduced). The groups' accumulators times their
// scales form another chain of fused multiply-adds over ascending k. With minima, a link of that
// chain is followed by another: (middle * scale - minimum), rounded once, times the sum of x.
//
// Where the processor multiplies pairs of bfloat16, rows of bfloat16 and e4m3 codes (exact in
// bfloat16) are multiplied in pairs of k: a group's chain is over pairs. With AMX, a group's
// accumulator is as in amx_products.h; groups that are no multiple of 32 are computed in float32.
//
// With quantised activations, groups are those of a row (`row_group`). A group's sum is an exact
// integer, sum(code * x) - zero * sum(x), and its factor is the product of both scales. With
// minima, sum(code * x) has that factor, and -minimum times the row's scale is the factor of
// sum(x).
#pragma once

#include <utility>

#include "products/operand.h"

namespace vlm {

// results[r][PANEL] = x[r] . panel `index`, without the bias.
void multiply_codes(const Weight& weight, int64_t index, const Operand& x, float* results);
void multiply_integers(const Weight& weight, int64_t index, const Operand& x, float* results);
// Returns panel `index` of a weight with a table as panel 0 of one of INT8, whose codes it writes.
Weight looked_up(const Weight& weight, int64_t index, char* bytes);
// The same as `multiply_integers` for an operand in tiles; writes behind the rows, up to a multiple
// of TILE_ROWS.
void multiply_byte_tiles(const Weight& weight, int64_t index, const Operand& x, float* results);

// Tells whether one loop covers all panels of a run for a single row. Panels of less than bytes are
// short: a loop per panel mispredicts its end and prefetches late. Panels of bytes are faster with
// a loop each (measured with AMX).
inline bool in_one_loop(const Weight& weight, const Operand& x) {
    return weight.dynamic && panel_step(weight.type) < PANEL && x.rows() == 1;
}
// results[p][PANEL] = x . panel `panels.first + p`, without the bias. Requires `in_one_loop`.
void multiply_integer_row(const Weight& weight, const Panels& panels, const Operand& x,
                          float* results);

// Returns what `make` returns for `rows` as a compile-time constant, up to MAX.
template <typename Function, typename Make, size_t... LESS>
Function dispatch_rows(int64_t rows, const Make& make, std::index_sequence<LESS...>) {
    const Function all[] = {make(std::integral_constant<int, LESS + 1>())...};
    return all[rows - 1];
}

template <typename Function, int64_t MAX = FULL_WIDTH_ROWS, typename Make>
Function dispatch_rows(int64_t rows, const Make& make) {
    return dispatch_rows<Function>(rows, make, std::make_index_sequence<MAX>());
}

// Unpackers of codes to bytes. A step of a column is WORDS_PER_STEP stored words and becomes PARTS
// words of four codes each, up to MAX_CODE. `step` is the address of a register's columns.
struct Int8Bytes {
    static constexpr int WORDS_PER_STEP = 1, PARTS = 1, MAX_CODE = 255;
    static VLM_INLINE Words part(const char* step, int) { return read<Words>(step); }
};

struct Int6Bytes {
    static constexpr int WORDS_PER_STEP = 3, PARTS = 4, MAX_CODE = 63;
    static VLM_INLINE Words part(const char* step, int quarter) {
        constexpr int64_t WORD = PANEL * 4;
        const Words both = read<Words>(step + quarter / 2 * WORD);
        const Words tops = read<Words>(step + 2 * WORD);
        const Words low = (quarter % 2 ? both >> 4 : both) & 0x0f0f0f0fu;
        const Words high = quarter < 3 ? tops << (4 - 2 * quarter) : tops >> 2;
        return low | (high & 0x30303030u);
    }
};

struct Int4Bytes {
    static constexpr int WORDS_PER_STEP = 1, PARTS = 2, MAX_CODE = 15;
    static VLM_INLINE Words part(const char* step, int half) {
        const Words both = read<Words>(step);
        return (half ? both >> 4 : both) & 0x0f0f0f0fu;
    }
};

// Unpacks e2m1 codes to their values plus FLOAT4_MIDDLE.
struct Float4Bytes {
    static constexpr int WORDS_PER_STEP = 1, PARTS = 2, MAX_CODE = 2 * FLOAT4_MIDDLE;
    static VLM_INLINE Words part(const char* step, int half) {
        static constexpr ByteTable VALUES = float4_bytes(FLOAT4_MIDDLE);
        return table_lookup(VALUES, Int4Bytes::part(step, half));
    }
};

// Scales and zero points of one group, per column.
struct GroupScales {
    Floats scale[PANEL_REGISTERS], zero[PANEL_REGISTERS];
};

// Scales and zero points of a panel. Without zero points, zero is the middle code.
class PanelScales {
  public:
    PanelScales(const Weight& weight, int64_t index)
        : type_(weight.scale_type), middle_(middle_of(weight.type)) {
        const int64_t at = index * (weight.depth / weight.group) * PANEL;
        scales_ = (const char*)weight.scales + at * bytes_of(type_);
        zeros_ = weight.zeros ? weight.zeros + at : nullptr;
        if (type_ != TWO_LEVEL) return;
        shared_ = weight.outer_group / weight.group;
        const int64_t above = at / shared_ * bytes_of(FLOAT16);
        outer_ = (const char*)weight.outer + above;
        floors_ = weight.floors ? (const char*)weight.floors + above : nullptr;
    }

    VLM_INLINE GroupScales of(int64_t group) const {
        GroupScales found;
        const char* scales = scales_ + group * PANEL * bytes_of(type_);
        // Scales are read too rarely, beside the codes, for the hardware prefetcher.
        __builtin_prefetch(scales + SCALES_PREFETCH_DISTANCE);
        if (type_ == FLOAT32) __builtin_prefetch(scales + SCALES_PREFETCH_DISTANCE + 64);
#pragma GCC unroll 8
        for (int j = 0; j < PANEL_REGISTERS; ++j) {
            found.scale[j] = scale_at(scales + j * WIDTH * bytes_of(type_));
            found.zero[j] =
                zeros_ ? zero_at(zeros_ + group * PANEL + j * WIDTH) : broadcast(middle_);
        }
        if (type_ == TWO_LEVEL) raise(group, found);
        return found;
    }

  private:
    static constexpr int64_t SCALES_PREFETCH_DISTANCE = 1024;  // bytes

    // Multiplies by the numbers of the larger group.
    VLM_INLINE void raise(int64_t group, GroupScales& found) const {
        const int64_t at = group / shared_ * PANEL * bytes_of(FLOAT16);
#pragma GCC unroll 8
        for (int j = 0; j < PANEL_REGISTERS; ++j) {
            const int64_t own = at + j * WIDTH * bytes_of(FLOAT16);
            found.scale[j] *= from_float16(outer_ + own);
            if (floors_) found.zero[j] *= from_float16(floors_ + own);
        }
    }

    VLM_INLINE Floats scale_at(const char* from) const {
        if (type_ == FLOAT32) return read<Floats>(from);
        if (type_ == FLOAT16) return from_float16(from);
        if (type_ == ROOTS) {
            const Floats root = __builtin_convertvector(from_signed_bytes(from), Floats);
            return root * (Floats)((Words)root & 0x7fffffffu);
        }
        if (type_ == FLOAT8) return from_float8((Words)from_signed_bytes(from));
        if (type_ == E8M0) return from_e8m0(from_bytes(from));
        if (type_ == TWO_LEVEL) return __builtin_convertvector(from_signed_bytes(from), Floats);
        return (Floats)(from_halves(from) << 16);
    }
    static VLM_INLINE Floats zero_at(const uint8_t* from) {
        return __builtin_convertvector(from_bytes(from), Floats);
    }

    const char *scales_, *outer_ = nullptr, *floors_ = nullptr;
    const uint8_t* zeros_;
    int64_t type_, shared_ = 1;
    float middle_;
};

}  // namespace vlm
