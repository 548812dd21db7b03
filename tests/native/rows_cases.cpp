// The ops that treat every row alike, and vlm_rotations.
#include <cmath>
#include <limits>

#include "calls.h"
#include "cases.h"
#include "rows/rows.h"

namespace cases {

constexpr double EPS = 1e-6;

// Rows of heads, some numbers of no use between tokens and heads.
template <typename T>
struct Input {
    int64_t tokens, heads, width, head_stride, stride;
    std::vector<T> x;

    Input(Random& random, int64_t tokens_, int64_t heads_, int64_t width_, float scale)
        : tokens(tokens_),
          heads(heads_),
          width(width_),
          head_stride(width_ + 16),
          stride(heads_ * head_stride + 32),
          x(random.numbers<T>(tokens_ * stride, scale)) {
        // Rows whose squares are next to nothing, and some values that saturate what follows.
        for (int64_t i = 0; i < width; ++i) vlm::store_one(&x[i], 1e-22f * random.number(1.0f));
        for (float edge : {0.0f, -0.0f, 87.4f, -87.4f, 89.0f, -89.0f, 1e18f, -1e18f})
            vlm::store_one(&x[random.below((int64_t)x.size())], edge);
    }

    vlm::Rows rows(int64_t first, int64_t count, int64_t threads, std::vector<T>* out) const {
        return {.tokens = count,
                .heads = heads,
                .width = width,
                .stride = stride,
                .head_stride = head_stride,
                .threads = threads,
                .x = &x[first * stride],
                .out = out ? out->data() : nullptr};
    }
};

// `op(x, gate, first, factors)` is a kernel's result for tokens from `first` on.
template <typename T, typename Op>
static void row_op(const std::string& kernel, int64_t tokens, int64_t heads, int64_t width,
                   const Op& op) {
    const std::string name = kernel + "/" + std::to_string(tokens) + "x" + std::to_string(heads) +
                             "x" + std::to_string(width);
    Random random(name);
    const Input<T> x(random, tokens, heads, width, 4.0f), gate(random, tokens, heads, width, 16.0f);
    const std::vector<float> factors = random.numbers(width, 0.5f, 1.0f);
    auto run = [&](int64_t first, int64_t count, int64_t threads) {
        std::vector<T> out(count * heads * width);
        const vlm::Rows rows = x.rows(first, count, threads, &out);
        const vlm::Rows gates = gate.rows(first, count, threads, nullptr);
        must(op(&rows, &gates, factors.data(), first), kernel.c_str());
        return out;
    };
    report(BITS<T>, name, [&](int64_t threads) { return Digest().add(run(0, tokens, threads)); });
    const int64_t last = (tokens - 1) * heads * width;
    expect(alike(run(tokens - 1, 1, 1), part(run(0, tokens, 1), last, heads * width)), BITS<T>,
           name, "its last token alone");
}

template <typename T>
static void norm_rope(int64_t tokens, int64_t heads, int64_t width, int64_t half) {
    const std::string name = "vlm_norm_rope";
    Random random(name);
    const std::vector<float> cos = random.numbers(tokens * half);
    const std::vector<float> sin = random.numbers(tokens * half);
    row_op<T>(name, tokens, heads, width,
              [&](const vlm::Rows* rows, const vlm::Rows*, const float* factors, int64_t first) {
                  return vlm_norm_rope(rows, factors, &cos[first * half], &sin[first * half], half,
                                       EPS, BITS<T>);
              });
}

template <typename T>
static void row_ops(int64_t tokens, int64_t heads, int64_t width) {
    using vlm::Rows;
    row_op<T>("vlm_rms_norm", tokens, heads, width,
              [](const Rows* x, const Rows*, const float* factors, int64_t) {
                  return vlm_rms_norm(x, factors, EPS, BITS<T>);
              });
    row_op<T>("vlm_gated_rms_norm", tokens, heads, width,
              [](const Rows* x, const Rows* gate, const float* factors, int64_t) {
                  return vlm_gated_rms_norm(x, gate, factors, EPS, BITS<T>);
              });
    row_op<T>("vlm_times_sigmoid", tokens, heads, width,
              [](const Rows* x, const Rows* gate, const float*, int64_t) {
                  return vlm_times_sigmoid(x, gate, BITS<T>);
              });
    row_op<T>("vlm_silu_times", tokens, heads, width,
              [](const Rows* x, const Rows* gate, const float*, int64_t) {
                  return vlm_silu_times(gate, x, BITS<T>);
              });
}

static void rotations(int64_t tokens, int64_t half, int64_t most) {
    const std::string name = "vlm_rotations/" + std::to_string(tokens) + "x" +
                             std::to_string(half) + "-up-to-" + std::to_string(most);
    Random random(name);
    std::vector<double> positions(3 * tokens);
    for (double& each : positions) each = (double)random.below(most + 1);
    positions[tokens - 1] = (double)most;
    std::vector<float> inv_freq = random.numbers(half, 0.5f, 0.5f);
    inv_freq[0] = 1.0f;
    std::vector<int32_t> axis;
    for (int64_t i = 0; i < half; ++i) axis.push_back(i % 3);
    report(32, name, [&](int64_t threads) {
        std::vector<float> cos(tokens * half), sin(tokens * half);
        must(vlm_rotations(tokens, half, threads, positions.data(), inv_freq.data(), axis.data(),
                           1.25, cos.data(), sin.data()),
             "vlm_rotations");
        return Digest().add(cos).add(sin);
    });
}

// Among numbers with equals, zeros of both signs, and some that are not finite.
static void argmax(int64_t count) {
    const std::string name = "first_largest/" + std::to_string(count);
    Random random(name);
    const float NONE = std::numeric_limits<float>::quiet_NaN();
    const float MOST = std::numeric_limits<float>::infinity();
    for (int kind = 0; kind < 40; ++kind) {
        std::vector<float> row = random.numbers(count, 4.0f);
        if (kind % 4 == 1)
            for (float& each : row) each = std::round(each);
        if (kind % 4 == 2)
            for (float& each : row) each = random.below(2) ? 0.0f : -0.0f;
        if (kind % 4 == 3)
            for (float& each : row) each = -MOST;
        if (kind % 5 == 1) row[random.below(count)] = MOST;
        for (int i = 0; i < 2 && kind % 5 == 2; ++i) row[random.below(count)] = NONE;
        int64_t first = 0;
        for (int64_t i = 1; i < count; ++i)
            if (row[i] > row[first] || (std::isnan(row[i]) && !std::isnan(row[first]))) first = i;
        expect(vlm::argmax(row.data(), count) == first, 32, name, "the first");
    }
}

template <typename T>
static void all_row_ops() {
    row_ops<T>(1, 1, 16);
    row_ops<T>(7, 3, 48);
    row_ops<T>(50, 1, 1040);  // enough for several threads
    norm_rope<T>(5, 3, 32, 16);
    norm_rope<T>(60, 4, vlm::MAX_DIM, 32);
}

void rows_cases() {
    all_row_ops<float>();
    all_row_ops<bf16>();
    for (int64_t count : {1, 15, 16, 17, 1024, 1030, 2500}) argmax(count);
    rotations(3, 8, 100);
    rotations(200, 32, 1 << 20);
    rotations(100, 32, (1 << 26) - 1);
}

}  // namespace cases
