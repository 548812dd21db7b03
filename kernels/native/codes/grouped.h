// Products with codes that share scales in groups of k.
//
// A panel holds words, `[K / 4, 32]` of bytes or `[K / 8, 32]` of four bits, and those of every
// column lie next to each other. In a word of bytes the least significant one is the first k; one
// of four bits has k 0 to 3 in the lower halves of its bytes and k 4 to 7 in the upper ones. Of six
// bits they are `[K / 16, 3, 32]`: two words of the lower four bits, and one whose bytes have the
// upper two of k 0 to 3 in their lowest bits, of k 4 to 7 in the next ones, and so on.
// Integer codes are unsigned. Their value is (code - zero) * scale; without zero points zero is the
// middle, 128, 32 or 8. A byte of FLOAT8 is e4m3 without infinities; its value is that times the
// scale. A code of FLOAT4 is e2m1, and has no zero points; its value is twice that, a whole number,
// times the scale. Scales and zero points of a panel are `[K / group, 32]`. Scales of one byte are
// roots, whose value is q * |q|, e4m3 or e8m0; a column's sum is multiplied by its factor when it
// is complete.
//
// Every group has a sum of its own, a chain of fused multiply-adds over ascending k, from zero on,
// of x * (code - middle). One more adds (middle - zero) times the sum of the group's x (16 lanes
// over ascending k, then joined) where there are zero points. The groups' sums times their scales
// are a chain of fused multiply-adds over ascending k in turn.
//
// Where pairs of bfloat16 are multiplied, rows of those meet e4m3 codes, which bfloat16 has all, in
// pairs of k: the chain of a group is one over pairs. Where there are tiles (AMX), the sum of a
// group is what amx_products.h says instead, and groups that are no multiples of 32 meet float32.
//
// If activations are quantised, groups are those of a row (`row_group`), a group's sum is one of
// integers, sum(code * x) - zero * sum(x), to the bit, and its factor the product of both scales.
#pragma once

#include <utility>

#include "products/operand.h"

namespace vlm {

// sums[r][PANEL] = x[r] . panel `index`, without the bias.
void multiply_codes(const Weight& weight, int64_t index, const Operand& x, float* sums);
void multiply_integers(const Weight& weight, int64_t index, const Operand& x, float* sums);
// Of an operand in tiles; writes behind the rows, up to a multiple of TILE_ROWS.
void multiply_byte_tiles(const Weight& weight, int64_t index, const Operand& x, float* sums);

// Whether a row meets all panels of a run in one loop. Panels of less than bytes are short, and at
// the end of a loop a processor guesses wrong, and asks the memory late. Panels of bytes are faster
// with a loop for each (measured where tiles are).
inline bool in_one_loop(const Weight& weight, const Operand& x) {
    return weight.dynamic && panel_step(weight.type) < PANEL && x.rows() == 1;
}
// sums[p][PANEL] = x . panel `panels.first + p`, without the bias; only if `in_one_loop`.
void multiply_integer_row(const Weight& weight, const Panels& panels, const Operand& x,
                          float* sums);

// What `make` gives for a constant number of rows, up to MOST.
template <typename Function, typename Make, size_t... LESS>
Function by_rows(int64_t rows, const Make& make, std::index_sequence<LESS...>) {
    const Function all[] = {make(std::integral_constant<int, LESS + 1>())...};
    return all[rows - 1];
}

template <typename Function, int64_t MOST = WHOLE_ROWS, typename Make>
Function by_rows(int64_t rows, const Make& make) {
    return by_rows<Function>(rows, make, std::make_index_sequence<MOST>());
}

// Codes as bytes. What a step of each kind is: how many words of a column are stored, and how many
// of four codes each, or parts, they become, and the largest code. `step` is where the columns of a
// register begin.
struct ByteWords {
    static constexpr int STORED = 1, PARTS = 1, MOST = 255;
    static VLM_INLINE Words part(const char* step, int) { return read<Words>(step); }
};

struct SixBitWords {
    static constexpr int STORED = 3, PARTS = 4, MOST = 63;
    static VLM_INLINE Words part(const char* step, int quarter) {
        constexpr int64_t WORD = PANEL * 4;
        const Words both = read<Words>(step + quarter / 2 * WORD);
        const Words tops = read<Words>(step + 2 * WORD);
        const Words low = (quarter % 2 ? both >> 4 : both) & 0x0f0f0f0fu;
        const Words high = quarter < 3 ? tops << (4 - 2 * quarter) : tops >> 2;
        return low | (high & 0x30303030u);
    }
};

struct HalfByteWords {
    static constexpr int STORED = 1, PARTS = 2, MOST = 15;
    static VLM_INLINE Words part(const char* step, int half) {
        const Words both = read<Words>(step);
        return (half ? both >> 4 : both) & 0x0f0f0f0fu;
    }
};

// What e2m1 codes stand for, above the middle.
struct LookedUpWords {
    static constexpr int STORED = 1, PARTS = 2, MOST = 2 * FLOAT4_MIDDLE;
    static VLM_INLINE Words part(const char* step, int half) {
        static constexpr ByteTable VALUES = float4_bytes(FLOAT4_MIDDLE);
        return looked_up(VALUES, HalfByteWords::part(step, half));
    }
};

// What gives the codes of a group their values.
struct GroupScales {
    Floats scale[REGISTERS], zero[REGISTERS];
};

// Scales and zero points of a panel; without zero points zero is the middle.
class PanelScales {
  public:
    PanelScales(const Weight& weight, int64_t index)
        : type_(weight.scale_type), middle_(middle_of(weight.type)) {
        const int64_t at = index * (weight.depth / weight.group) * PANEL;
        scales_ = (const char*)weight.scales + at * bytes_of(type_);
        zeros_ = weight.zeros ? weight.zeros + at : nullptr;
    }

    VLM_INLINE GroupScales of(int64_t group) const {
        GroupScales found;
        const char* scales = scales_ + group * PANEL * bytes_of(type_);
        // They lie apart from the codes, whose reading is too slow for processors to foresee them.
        __builtin_prefetch(scales + SCALES_AHEAD);
        if (type_ == FLOAT32) __builtin_prefetch(scales + SCALES_AHEAD + 64);
#pragma GCC unroll 8
        for (int j = 0; j < REGISTERS; ++j) {
            found.scale[j] = scale_at(scales + j * WIDTH * bytes_of(type_));
            found.zero[j] = zeros_ ? zero_at(zeros_ + group * PANEL + j * WIDTH) : spread(middle_);
        }
        return found;
    }

  private:
    static constexpr int64_t SCALES_AHEAD = 1024;  // bytes

    VLM_INLINE Floats scale_at(const char* from) const {
        if (type_ == FLOAT32) return read<Floats>(from);
        if (type_ == FLOAT16) return from_float16(from);
        if (type_ == ROOTS) {
            const Floats root = __builtin_convertvector(from_signed_bytes(from), Floats);
            return root * (Floats)((Words)root & 0x7fffffffu);
        }
        if (type_ == FLOAT8) return from_float8((Words)from_signed_bytes(from));
        if (type_ == E8M0) return from_e8m0(from_bytes(from));
        return (Floats)(from_halves(from) << 16);
    }
    static VLM_INLINE Floats zero_at(const uint8_t* from) {
        return __builtin_convertvector(from_bytes(from), Floats);
    }

    const char* scales_;
    const uint8_t* zeros_;
    int64_t type_;
    float middle_;
};

}  // namespace vlm
