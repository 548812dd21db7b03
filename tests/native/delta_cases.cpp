// vlm_gated_delta and vlm_gates.
#include "calls.h"
#include "cases.h"
#include "sequences.h"

namespace cases {

struct DeltaShape {
    const char* name;
    int64_t key_heads, value_heads, key_dim, value_dim;
    bool skips;  // whether values are added to the outputs: Mamba2's recurrence

    int64_t keys() const { return key_heads * key_dim; }
    int64_t values() const { return value_heads * value_dim; }
};

// States of S.
template <typename T, typename S>
static void delta(const DeltaShape& own) {
    const std::string kind = sizeof(S) == 2 ? "-states-of-bfloat16" : "";
    const std::string name = std::string("vlm_gated_delta/") + own.name + kind;
    Random random(name);
    // Queries, keys and values side by side, as a projection leaves them, and 16 numbers of no use.
    const Table<T> wide(random, 3, SEQUENCE_TOKENS, 2 * own.keys() + own.values() + 16, 2.0f);
    Table<float> decay(random, 3, SEQUENCE_TOKENS, own.value_heads), beta = decay;
    for (float& each : decay.values) each = -8.0f * each * each;
    for (float& each : beta.values) each = 0.5f + 0.5f * each;
    const std::vector<float> skip = random.numbers(own.skips ? own.value_heads : 0);
    const int64_t row = own.values() * own.key_dim;
    const std::vector<S> states = random.numbers<S>(STATE_ROWS * row);
    auto run = [&](const std::vector<Slice>& slices, int64_t threads, std::vector<S>& to) {
        const Sequences sequences(slices);
        const std::vector<T> x = wide.of(slices);
        const std::vector<float> g = decay.of(slices), b = beta.of(slices);
        std::vector<T> out(sequences.tokens() * own.values());
        const vlm::Delta job{.packed = sequences.packed(threads),
                             .key_heads = own.key_heads,
                             .value_heads = own.value_heads,
                             .key_dim = own.key_dim,
                             .value_dim = own.value_dim,
                             .q_stride = wide.width,
                             .q_head = own.key_dim,
                             .k_stride = wide.width,
                             .k_head = own.key_dim,
                             .v_stride = wide.width,
                             .v_head = own.value_dim,
                             .state_row_stride = row,
                             .state_type = sizeof(S) == 2 ? vlm::BFLOAT16 : vlm::FLOAT32,
                             .q = &x[0],
                             .k = &x[own.keys()],
                             .v = &x[2 * own.keys()],
                             .g = g.data(),
                             .beta = b.data(),
                             .skip = own.skips ? skip.data() : nullptr,
                             .states = to.data(),
                             .out = out.data()};
        must(vlm_gated_delta(&job, BITS<T>), "vlm_gated_delta");
        return out;
    };
    report_sequences<T>(name, own.values(), states, run);
}

// Where functions change from one formula to another, and what they do not reach.
static const float EDGES[] = {0.0f,   -0.0f, 1e-30f, -1e-30f, 19.99f, 20.0f,    20.01f,    88.7f,
                              -87.3f, 88.8f, -87.4f, 1e30f,   -1e30f, INFINITY, -INFINITY, NAN};

template <typename T>
static void gates(int64_t tokens, int64_t heads) {
    const std::string name = "vlm_gates/" + std::to_string(tokens) + "x" + std::to_string(heads);
    Random random(name);
    const int64_t stride = 2 * heads + 3;
    std::vector<T> raw = random.numbers<T>(tokens * stride, 32.0f);
    for (float edge : EDGES)
        for (int64_t i = 0; i < 4 && tokens > 1; ++i)
            vlm::store_one(&raw[random.below((int64_t)raw.size())], edge);
    const std::vector<float> neg_decay = random.numbers(heads, 4.0f, -4.0f);
    const std::vector<float> dt_bias = random.numbers(heads, 4.0f);
    report(BITS<T>, name, [&](int64_t threads) {
        std::vector<float> beta(tokens * heads), decay(tokens * heads);
        const vlm::Gates job{.tokens = tokens,
                             .heads = heads,
                             .stride = stride,
                             .threads = threads,
                             .raw = raw.data(),
                             .neg_decay = neg_decay.data(),
                             .dt_bias = dt_bias.data(),
                             .beta = beta.data(),
                             .decay = decay.data()};
        must(vlm_gates(&job, BITS<T>), "vlm_gates");
        return Digest().add(beta).add(decay);
    });
}

template <typename T, typename S>
static void deltas() {
    delta<T, S>({"1x16-1x16", 1, 1, 16, 16, false});
    delta<T, S>({"2x64-4x48", 2, 4, 64, 48, false});
    delta<T, S>({"1x128-2x128", 1, 2, 128, 128, false});
    delta<T, S>({"1x16-1x16-skip", 1, 1, 16, 16, true});
    delta<T, S>({"1x128-8x64-skip", 1, 8, 128, 64, true});
}

template <typename T>
static void all_deltas() {
    deltas<T, float>();
    deltas<T, bf16>();
    for (int64_t tokens : {1, 63, 200})
        for (int64_t heads : {1, 16, 19}) gates<T>(tokens, heads);
}

void delta_cases() {
    all_deltas<float>();
    all_deltas<bf16>();
}

}  // namespace cases
