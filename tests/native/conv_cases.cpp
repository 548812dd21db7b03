// vlm_causal_conv.
#include "calls.h"
#include "cases.h"
#include "gated_delta/convolution.h"
#include "sequences.h"

namespace cases {

// Taps with a bias and SiLU, or neither, as a short convolution has them.
template <typename T>
static void conv(int64_t channels, int64_t kernel, bool biased, bool silu) {
    const std::string size = std::to_string(channels) + "x" + std::to_string(kernel);
    const std::string kind = std::string(biased ? "-bias" : "") + (silu ? "" : "-linear");
    const std::string name = "vlm_causal_conv/" + size + kind;
    Random random(name);
    const Table<T> wide(random, 3, SEQUENCE_TOKENS, channels + 16, 4.0f);
    const std::vector<float> taps = random.numbers(kernel * channels);
    const std::vector<float> bias = random.numbers(biased ? channels : 0);
    const int64_t row = channels * (kernel - 1);
    const std::vector<T> tails = random.numbers<T>(STATE_ROWS * row, 4.0f);
    auto run = [&](const std::vector<Slice>& slices, int64_t threads, std::vector<T>& to) {
        const Sequences sequences(slices);
        const std::vector<T> x = wide.of(slices);
        std::vector<T> out(sequences.tokens() * channels);
        const vlm::Convolution job{.packed = sequences.packed(threads),
                                   .channels = channels,
                                   .kernel = kernel,
                                   .x_stride = wide.width,
                                   .tail_row_stride = row,
                                   .x = x.data(),
                                   .taps = taps.data(),
                                   .bias = biased ? bias.data() : nullptr,
                                   .silu = silu,
                                   .tails = to.data(),
                                   .out = out.data()};
        must(vlm_causal_conv(&job, BITS<T>), "vlm_causal_conv");
        return out;
    };
    report_sequences<T>(name, channels, tails, run);
}

template <typename T>
static void convs() {
    for (bool biased : {false, true})
        for (bool silu : {true, false}) {
            conv<T>(16, 2, biased, silu);
            conv<T>(48, vlm::MAX_TAPS, biased, silu);
            conv<T>(528, 4, biased, silu);
        }
}

void conv_cases() {
    convs<float>();
    convs<bf16>();
}

}  // namespace cases
