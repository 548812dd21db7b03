// The causal convolution before the gated delta rule, shared by compiled steps and the op of a
// single layer. See kernels/causal_conv for the mathematics.
#pragma once

#include "functions.h"

namespace vlm {

constexpr int64_t MAX_TAPS = 9;

// Deinterleaves three registers of triples: lane i of the result is value 3 i + PLACE.
template <int PLACE>
VLM_INLINE Floats deinterleave3(Floats a, Floats b, Floats c) {
    struct Early {
        static constexpr int of(int lane) {
            return 3 * lane + PLACE < 2 * WIDTH ? 3 * lane + PLACE : 0;
        }
    };
    struct All {
        static constexpr int of(int lane) {
            const int value = 3 * lane + PLACE;
            return value < 2 * WIDTH ? lane : value - WIDTH;
        }
    };
    return shuffle<All>(shuffle<Early>(a, b), c);
}

// Interleaves again: returns the register of the values from PART * WIDTH on.
template <int PART>
VLM_INLINE Floats interleave3(Floats first, Floats second, Floats third) {
    struct Two {
        static constexpr int of(int lane) {
            const int value = PART * WIDTH + lane;
            return value % 3 == 1 ? WIDTH + value / 3 : value / 3;
        }
    };
    struct All {
        static constexpr int of(int lane) {
            const int value = PART * WIDTH + lane;
            return value % 3 == 2 ? WIDTH + value / 3 : lane;
        }
    };
    return shuffle<All>(shuffle<Two>(first, second), third);
}

// The inputs before the first token, in a state row; null means zeros.
template <typename T>
struct Tails {
    T* row;  // [channels, kernel - 1], oldest first
    int64_t history;

    // Loads the inputs of 16 channels into a window of `convolve`.
    void load(int64_t channel, Vec* window) const {
        const T* from = row + channel * history;
        if (row && history == 3) {
            window[0] = third<0>(from);
            window[1] = third<1>(from);
            window[2] = third<2>(from);
            return;
        }
        for (int64_t j = 0; j < history; ++j) {
            float lanes[LANES] = {};
            for (int i = 0; i < LANES && row; ++i) lanes[i] = load_one(from + i * history + j);
            window[j] = vlm::load(lanes);
        }
    }
    void store(int64_t channel, const Vec* window) const {
        if (!row) return;
        T* to = row + channel * history;
        if (history == 3) {
            const Vec &first = window[0], &second = window[1], &third = window[2];
            for_each_register(
                [=](int lane, Floats a, Floats b, Floats c) {
                    T* own = to + 3 * lane;
                    store_register(own, interleave3<0>(a, b, c));
                    store_register(own + WIDTH, interleave3<1>(a, b, c));
                    store_register(own + 2 * WIDTH, interleave3<2>(a, b, c));
                },
                first, second, third);
            return;
        }
        for (int64_t j = 0; j < history; ++j) {
            float lanes[LANES];
            vlm::store(lanes, window[j]);
            for (int i = 0; i < LANES; ++i) store_one(to + i * history + j, lanes[i]);
        }
    }

  private:
    // One of the three inputs of each channel.
    template <int PLACE>
    static VLM_INLINE Vec third(const T* from) {
        return make_vec([=](int lane) {
            const T* own = from + 3 * lane;
            return deinterleave3<PLACE>(load_register(own), load_register(own + WIDTH),
                                        load_register(own + 2 * WIDTH));
        });
    }
};

// Appends an input to the `history` ones of a window, which are oldest first.
VLM_INLINE void shift(Vec* window, int64_t history, Vec input) {
    for (int64_t j = 1; j < history; ++j) window[j - 1] = window[j];
    if (history) window[history - 1] = input;
}

// Convolves one token of 16 channels: returns the sum of taps * inputs, and of the bias if there is
// one. `window` holds the `history` inputs before it, and is updated to those before the next
// token. `taps` are [history + 1, channels].
VLM_INLINE Vec convolve_token(Vec input, const float* taps, const float* bias, int64_t channels,
                              int64_t history, Vec* window) {
    Vec total = zero();
    for (int64_t j = 0; j < history; ++j) {
        total = fma(window[j], load(taps + j * channels), total);
        if (j) window[j - 1] = window[j];
    }
    total = fma(input, load(taps + history * channels), total);
    if (history) window[history - 1] = input;
    return bias ? total + load(bias) : total;
}

// Convolves `n` tokens of 16 channels, see `convolve_token`: y is the sum, or its SiLU, rounded to
// T.
template <typename T, bool SILU = true, typename Y>
inline void convolve(const T* x, int64_t x_stride, int64_t n, const float* taps, const float* bias,
                     int64_t channels, int64_t history, Vec* window, Y* y, int64_t y_stride) {
    for (int64_t t = 0; t < n; ++t) {
        const Vec total =
            convolve_token(load(x + t * x_stride), taps, bias, channels, history, window);
        store(y + t * y_stride, rounded<T>(SILU ? silu(total) : total));
    }
}

}  // namespace vlm
