// vlm_step on small made-up models: gated delta rule, attention, gated delta rule.
#include <deque>

#include "cases.h"
#include "matrix.h"
#include "sequences.h"
#include "step.cpp"

namespace cases {

constexpr int64_t HIDDEN = 64, VOCAB = 99, LAYERS = 3, HEADS = 4, KV_HEADS = 2, DIM = 32, HALF = 8;
constexpr int64_t KEY_HEADS = 2, VALUE_HEADS = 4, DELTA_DIM = 32, KERNEL = 4, INNER = 80;
constexpr int64_t TOP_K = 2, EXPERT_INNER = 48, BLOCK = 16, BLOCKS = 10;  // of a sequence
constexpr int64_t CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DELTA_DIM;
constexpr int64_t TAILS = CHANNELS * (KERNEL - 1), STATES = VALUE_HEADS * DELTA_DIM * DELTA_DIM;
constexpr int64_t PAGE = BLOCK * KV_HEADS * DIM;

// What a step changes: [rows, layers, ...] of tails and states, [blocks, layers, keys or values,
// ...] of pages.
template <typename T>
struct StepState {
    std::vector<T> tails, pages;
    std::vector<float> states;

    explicit StepState(Random& random)
        : tails(random.numbers<T>(STATE_ROWS * LAYERS * TAILS)),
          pages(random.numbers<T>(3 * BLOCKS * LAYERS * 2 * PAGE)),
          states(random.numbers(STATE_ROWS * LAYERS * STATES)) {}
};

template <typename T>
bool alike(const StepState<T>& a, const StepState<T>& b) {
    return alike(a.tails, b.tails) && alike(a.pages, b.pages) && alike(a.states, b.states);
}

// A model and the embeddings of three sequences' tokens.
template <typename T>
class Tiny {
  public:
    Tiny(Random& random, int64_t type, int64_t experts)
        : random_(random), type_(type), experts_(experts), x_(random, 3, SEQUENCE_TOKENS, HIDDEN) {
        for (int64_t i = 0; i < 2 * experts * LAYERS; ++i)
            gate_up_.push_back(matrix(EXPERT_INNER, HIDDEN));
        for (int64_t i = 0; i < experts * LAYERS; ++i)
            down_.push_back(matrix(HIDDEN, EXPERT_INNER));
        for (int64_t i = 0; i < LAYERS; ++i) layers_.push_back(layer(i));
        head_ = matrix(VOCAB, HIDDEN);
        final_norm_ = vector(HIDDEN, 0.5f, 1.0f);
        inv_freq_ = vector(HALF, 0.5f, 0.5f);
        for (int64_t i = 0; i < 3 * BLOCKS; ++i) blocks_.push_back((int32_t)(i * 7 % (3 * BLOCKS)));
    }

    struct Result {
        std::vector<float> logits;        // of the last token of every slice
        std::vector<int64_t> expert_ids;  // of all tokens, if they were asked for
    };

    Result run(const std::vector<Slice>& slices, int64_t threads, StepState<T>& state,
               bool ids) const {
        std::vector<vlm::Layer> layers = layers_;
        for (int64_t i = 0; i < LAYERS; ++i) {
            layers[i].tails = &state.tails[i * TAILS];
            layers[i].states = &state.states[i * STATES];
            layers[i].k_pages = &state.pages[2 * i * PAGE];
            layers[i].v_pages = &state.pages[(2 * i + 1) * PAGE];
        }
        const vlm::Model model{.sizes = sizes(),
                               .layers = layers.data(),
                               .final_norm = final_norm_,
                               .head = head_,
                               .inv_freq = inv_freq_,
                               .rope_axis = axes_};
        return run(model, slices, threads, ids);
    }

  private:
    Result run(const vlm::Model& model, const std::vector<Slice>& slices, int64_t threads,
               bool ids) const;

    const float* vector(int64_t count, float scale, float centre) {
        vectors_.push_back(random_.numbers(count, scale, centre));
        return vectors_.back().data();
    }

    vlm::Weight matrix(int64_t columns, int64_t depth) {
        matrices_.emplace_back(random_, type_, columns, depth);
        return matrices_.back().weight();
    }

    vlm::Sizes sizes() const {
        return {.hidden = HIDDEN,
                .vocab = VOCAB,
                .layers = LAYERS,
                .heads = HEADS,
                .kv_heads = KV_HEADS,
                .head_dim = DIM,
                .rotary_half = HALF,
                .key_heads = KEY_HEADS,
                .value_heads = VALUE_HEADS,
                .key_dim = DELTA_DIM,
                .value_dim = DELTA_DIM,
                .conv_kernel = KERNEL,
                .experts = experts_,
                .top_k = experts_ ? TOP_K : 0,
                .block_size = BLOCK,
                .kv_block_stride = LAYERS * 2 * PAGE,
                .kv_token_stride = KV_HEADS * DIM,
                .conv_row_stride = LAYERS * TAILS,
                .state_row_stride = LAYERS * STATES,
                .eps = 1e-6,
                .scale = 0.17677669529663687};
    }

    vlm::Layer layer(int64_t index) {
        const bool attends = index == 1;
        const int64_t values = VALUE_HEADS * DELTA_DIM;
        const int64_t columns =
            attends ? 2 * (HEADS + KV_HEADS) * DIM : CHANNELS + values + 2 * VALUE_HEADS;
        return {.kind = attends ? vlm::ATTENTION : vlm::GATED_DELTA,
                .input_norm = vector(HIDDEN, 0.5f, 1.0f),
                .post_norm = vector(HIDDEN, 0.5f, 1.0f),
                .in_proj = matrix(columns, HIDDEN),
                .out_proj = matrix(HIDDEN, attends ? HEADS * DIM : values),
                .conv = vector(KERNEL * CHANNELS, 1.0f, 0.0f),
                .neg_decay = vector(VALUE_HEADS, 0.5f, -0.5f),
                .dt_bias = vector(VALUE_HEADS, 2.0f, -2.0f),
                .gated_norm = vector(DELTA_DIM, 0.5f, 1.0f),
                .tails = nullptr,
                .states = nullptr,
                .q_norm = vector(DIM, 0.5f, 1.0f),
                .k_norm = vector(DIM, 0.5f, 1.0f),
                .k_pages = nullptr,
                .v_pages = nullptr,
                .gate = matrix(INNER, HIDDEN),
                .up = matrix(INNER, HIDDEN),
                .down = matrix(HIDDEN, INNER),
                .router = matrix(experts_ + 1, HIDDEN),
                .expert_gate_up = gate_up_.data() + 2 * experts_ * index,
                .expert_down = down_.data() + experts_ * index};
    }

    static constexpr int32_t axes_[HALF] = {0, 1, 2, 0, 1, 2, 0, 0};

    Random& random_;
    int64_t type_, experts_;
    Table<T> x_;
    std::deque<std::vector<float>> vectors_;
    std::deque<Matrix> matrices_;
    std::vector<vlm::Weight> gate_up_, down_;
    std::vector<vlm::Layer> layers_;
    vlm::Weight head_;
    const float *final_norm_, *inv_freq_;
    std::vector<int32_t> blocks_;
};

template <typename T>
typename Tiny<T>::Result Tiny<T>::run(const vlm::Model& model, const std::vector<Slice>& slices,
                                      int64_t threads, bool ids) const {
    const Sequences sequences(slices);
    const std::vector<T> x = x_.of(slices);
    const int64_t tokens = sequences.tokens(), count = (int64_t)slices.size();
    std::vector<int64_t> positions(3 * tokens), slots, start, first_block, last;
    for (const Slice& slice : slices) {
        start.push_back(slice.first);
        first_block.push_back(slice.sequence * BLOCKS);
        for (int64_t t = slice.first; t < slice.first + slice.count; ++t) {
            const int64_t own = (int64_t)slots.size(), table = slice.sequence * BLOCKS;
            for (int64_t axis = 0; axis < 3; ++axis)
                positions[axis * tokens + own] = t / (axis + 1) + 100000 * slice.sequence;
            slots.push_back(blocks_[table + t / BLOCK] * BLOCK + t % BLOCK);
        }
        last.push_back((int64_t)slots.size() - 1);
    }
    Result result{std::vector<float>(count * VOCAB),
                  std::vector<int64_t>(ids ? tokens * LAYERS * TOP_K : 0)};
    const vlm::Step step{.tokens = tokens,
                         .sequences = count,
                         .rows = count,
                         .threads = threads,
                         .x = x.data(),
                         .positions = positions.data(),
                         .slots = slots.data(),
                         .first_token = sequences.begins.data(),
                         .start = start.data(),
                         .src_rows = sequences.src.data(),
                         .dst_rows = sequences.dst.data(),
                         .first_block = first_block.data(),
                         .blocks = blocks_.data(),
                         .snapshot_rows = sequences.snapshots.data(),
                         .logit_rows = last.data(),
                         .logits = result.logits.data(),
                         .expert_ids = ids ? result.expert_ids.data() : nullptr};
    must(vlm_step(&model, &step, BITS<T>), "vlm_step");
    return result;
}

template <typename T>
static void steps(const std::string& name, int64_t type, int64_t experts) {
    Random random(name);
    const StepState<T> state(random);
    const Tiny<T> model(random, type, experts);
    report(BITS<T>, name, [&](int64_t threads) {
        StepState<T> own = state;
        const auto result = model.run(WHOLE, threads, own, experts > 0);
        return Digest()
            .add(result.logits)
            .add(result.expert_ids)
            .add(own.tails)
            .add(own.states)
            .add(own.pages);
    });
    StepState<T> company = state, alone = state, cut = state;
    const std::vector<float> logits = model.run(WHOLE, 1, company, false).logits;
    for (size_t i = 0; i < WHOLE.size(); ++i)
        expect(alike(model.run({WHOLE[i]}, 2, alone, experts > 0).logits,
                     part(logits, i * VOCAB, VOCAB)),
               BITS<T>, name, "sequence " + std::to_string(i) + " alone");
    expect(alike(alone, company), BITS<T>, name, "the state after sequences alone");
    model.run(FIRST, 3, cut, false);
    const std::vector<float> second = model.run(SECOND, 3, cut, false).logits;
    for (size_t i = 0; i < SECOND.size(); ++i)
        expect(
            alike(part(second, i * VOCAB, VOCAB), part(logits, SECOND[i].sequence * VOCAB, VOCAB)),
            BITS<T>, name, "sequence " + std::to_string(SECOND[i].sequence) + " in two steps");
    expect(alike(cut, company), BITS<T>, name, "the state after two steps");
}

template <typename T>
static void all_steps() {
    steps<T>("vlm_step/dense-float32", vlm::FLOAT32, 0);
    steps<T>("vlm_step/dense-bfloat16", vlm::BFLOAT16, 0);
    steps<T>("vlm_step/experts-float32", vlm::FLOAT32, 6);
    steps<T>("vlm_step/experts-bfloat16", vlm::BFLOAT16, 6);
}

void step_cases() {
    all_steps<float>();
    all_steps<bf16>();
}

}  // namespace cases
