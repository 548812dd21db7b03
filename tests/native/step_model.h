// A small made-up model as a program of operations, and the state that its steps change.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <memory>

#include "cases.h"
#include "matrix.h"
#include "program.h"
#include "sequences.h"

namespace cases {

constexpr int64_t HIDDEN = 64, VOCAB = 99, LAYERS = 3, HEADS = 4, KV_HEADS = 2, DIM = 32, HALF = 8;
constexpr int64_t KEY_HEADS = 2, VALUE_HEADS = 4, DELTA_DIM = 32, KERNEL = 4, INNER = 80;
constexpr int64_t TOP_K = 2, EXPERT_INNER = 48, BLOCK = 16, BLOCKS = 10;  // of a sequence
constexpr int64_t CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DELTA_DIM;
constexpr int64_t TAILS = CHANNELS * (KERNEL - 1), STATES = VALUE_HEADS * DELTA_DIM * DELTA_DIM;
constexpr int64_t SCALES = BLOCK * KV_HEADS;  // of a page: of keys or values, or zero points
constexpr int64_t PAGE = BLOCK * KV_HEADS * DIM, VALUES = VALUE_HEADS * DELTA_DIM;
constexpr int64_t WIDEST =
    (CHANNELS + VALUES + 2 * VALUE_HEADS + 15) / 16 * 16;  // of projected rows
constexpr int64_t SCORES_WIDTH = 16;
constexpr int64_t FEATURES_WIDTH = 2 * HIDDEN;  // of a token that stands for media
constexpr double EPS = 1e-6;

constexpr int64_t KEYS = KEY_HEADS * DELTA_DIM, ENTRIES = 100;  // of updates

// What a step changes: [rows, layers, ...] of tails and states, [blocks, layers, keys or values,
// ...] of pages, and of their scales and zero points. Pages are of P, states of S.
template <typename T, typename P, typename S>
struct StepState {
    std::vector<T> tails;
    std::vector<P> pages;
    std::vector<vlm::f16> scales;
    std::vector<S> states;
    // Of drafted tokens: [entries, layers, ...].
    std::vector<float> keys, changes, decays;
    std::vector<T> inputs;

    explicit StepState(Random& random)
        : tails(random.numbers<T>(STATE_ROWS * LAYERS * TAILS)),
          pages(stored<P>(random, 3 * BLOCKS * LAYERS * 2 * PAGE)),
          scales(FORM<P> == vlm::KV_INT8 ? 3 * BLOCKS * LAYERS * 4 * SCALES : 0),
          states(random.numbers<S>(STATE_ROWS * LAYERS * STATES)),
          keys(ENTRIES * LAYERS * KEYS),
          changes(ENTRIES * LAYERS * VALUES),
          decays(ENTRIES * LAYERS * VALUE_HEADS),
          inputs(ENTRIES * LAYERS * CHANNELS) {}
};

// Where the updates of each slice begin, and how many are folded before; empty: none are drafted.
struct Drafts {
    std::vector<int64_t> updates, folded;
};

template <typename T, typename P, typename S>
bool alike(const StepState<T, P, S>& a, const StepState<T, P, S>& b) {
    return alike(a.tails, b.tails) && alike(a.pages, b.pages) && alike(a.scales, b.scales) &&
           alike(a.states, b.states);
}

// Operations of a program, and what they point to.
class Operations {
  public:
    template <typename Record>
    void add(vlm::Kind kind, const Record& record) {
        records_.push_back(std::make_shared<Record>(record));
        ops_.push_back({.kind = kind, .args = records_.back().get()});
    }

    const std::vector<vlm::Op>& ops() const { return ops_; }

  private:
    std::vector<std::shared_ptr<void>> records_;
    std::vector<vlm::Op> ops_;
};

// What a model has in each of its layers.
struct Shape {
    int64_t experts = 0;
    bool shared = true;    // is there an expert beside those?
    bool sigmoid = false;  // are experts chosen by sigmoids?
    std::array<bool, LAYERS> attends{false, true, false};
    bool features = false;  // are those of media added after the first layer?
};

struct Layer {
    const float *input_norm, *post_norm;
    vlm::Weight in_proj, out_proj;
    const float *conv, *neg_decay, *dt_bias, *gated_norm, *q_norm, *k_norm;
    vlm::Weight gate, up, down, router;
};

// A model and the embeddings of three sequences' tokens.
template <typename T, typename P, typename S>
class Tiny {
  public:
    using State = StepState<T, P, S>;

    Tiny(Random& random, int64_t type, const Shape& shape)
        : random_(random),
          type_(type),
          shape_(shape),
          x_(random, 3, SEQUENCE_TOKENS, HIDDEN),
          features_(random, 3, SEQUENCE_TOKENS, FEATURES_WIDTH) {
        for (int64_t i = 0; i < 2 * shape.experts * LAYERS; ++i)
            gate_up_.push_back(matrix(EXPERT_INNER, HIDDEN));
        for (int64_t i = 0; i < shape.experts * LAYERS; ++i)
            down_.push_back(matrix(HIDDEN, EXPERT_INNER));
        for (bool attends : shape.attends) layers_.push_back(layer(attends));
        head_ = matrix(VOCAB, HIDDEN);
        final_norm_ = vector(HIDDEN, 0.5f, 1.0f);
        inv_freq_ = vector(HALF, 0.5f, 0.5f);
        choice_bias_ = vector(shape.experts, 0.25f, 0.0f);
        for (int64_t i = 0; i < 3 * BLOCKS; ++i) blocks_.push_back((int32_t)(i * 7 % (3 * BLOCKS)));
    }

    struct Result {
        std::vector<float> logits;        // of the last token of every slice
        std::vector<int64_t> expert_ids;  // of all tokens, if requested
    };

    Result run(const std::vector<Slice>& slices, int64_t threads, State& state, bool ids,
               const Drafts& drafts = {}) const {
        const Operations operations = all_of(state);
        std::vector<vlm::Op> ops = operations.ops();
        // Without tokens all there is to do is to fold.
        if (offsets(slices).back() == 0)
            ops.erase(std::remove_if(ops.begin(), ops.end(),
                                     [](const vlm::Op& op) { return op.kind != vlm::DELTA_NET; }),
                      ops.end());
        const vlm::Program program{.ops = ops.data(),
                                   .widths = WIDTHS,
                                   .count = (int64_t)ops.size(),
                                   .buffers = BUFFERS,
                                   .hidden = HIDDEN,
                                   .vocab = VOCAB,
                                   .residual = RESIDUAL,
                                   .embeddings = nullptr,
                                   .known = 0,
                                   .deepest = VALUES,
                                   .expert_layers = LAYERS,
                                   .top_k = TOP_K,
                                   .ranks = nullptr};
        return run(program, slices, threads, ids, drafts);
    }

  private:
    enum Buffer : int64_t { RESIDUAL, NORMED, WIDE, MIXED, INSIDE, COS, SIN, SCORES, BUFFERS };
    static constexpr int64_t WIDTHS[BUFFERS] = {
        HIDDEN * 4,        HIDDEN * sizeof(T), WIDEST * sizeof(T), VALUES * sizeof(T),
        INNER * sizeof(T), HALF * 4,           HALF * 4,           SCORES_WIDTH * 4};
    static constexpr vlm::View residual_{RESIDUAL, 0, HIDDEN}, normed_{NORMED, 0, HIDDEN};
    static constexpr vlm::View inside_{INSIDE, 0, INNER}, scores_{SCORES, 0, SCORES_WIDTH};
    static constexpr vlm::View cos_{COS, 0, HALF}, sin_{SIN, 0, HALF}, none_{0, 0, 0};

    static constexpr vlm::View wide(int64_t column) { return {WIDE, column, WIDEST}; }
    static constexpr vlm::View mixed(int64_t width) { return {MIXED, 0, width}; }

    Result run(const vlm::Program& program, const std::vector<Slice>& slices, int64_t threads,
               bool ids, const Drafts& drafts) const;

    const float* vector(int64_t count, float scale, float centre) {
        vectors_.push_back(random_.numbers(count, scale, centre));
        return vectors_.back().data();
    }

    vlm::Weight matrix(int64_t columns, int64_t depth) {
        matrices_.emplace_back(random_, type_, columns, depth);
        return matrices_.back().weight();
    }

    Layer layer(bool attends) {
        const int64_t columns =
            attends ? 2 * (HEADS + KV_HEADS) * DIM : CHANNELS + VALUES + 2 * VALUE_HEADS;
        return {.input_norm = vector(HIDDEN, 0.5f, 1.0f),
                .post_norm = vector(HIDDEN, 0.5f, 1.0f),
                .in_proj = matrix(columns, HIDDEN),
                .out_proj = matrix(HIDDEN, attends ? HEADS * DIM : VALUES),
                .conv = vector(KERNEL * CHANNELS, 1.0f, 0.0f),
                .neg_decay = vector(VALUE_HEADS, 0.5f, -0.5f),
                .dt_bias = vector(VALUE_HEADS, 2.0f, -2.0f),
                .gated_norm = vector(DELTA_DIM, 0.5f, 1.0f),
                .q_norm = vector(DIM, 0.5f, 1.0f),
                .k_norm = vector(DIM, 0.5f, 1.0f),
                .gate = matrix(INNER, HIDDEN),
                .up = matrix(INNER, HIDDEN),
                .down = matrix(HIDDEN, INNER),
                .router = matrix(shape_.experts + shape_.shared, HIDDEN)};
    }

    Operations all_of(State& state) const {
        Operations to;
        to.add(vlm::ROTATIONS, vlm::Rotations{.cos = cos_,
                                              .sin = sin_,
                                              .half = HALF,
                                              .inv_freq = inv_freq_,
                                              .axis = axes_,
                                              .scale = 1.0});
        for (int64_t i = 0; i < LAYERS; ++i) {
            const Layer& own = layers_[i];
            norm(to, own.input_norm);
            project(to, own.in_proj, normed_, wide(0), vlm::STORE);
            shape_.attends[i] ? attention(to, i, state) : delta_net(to, i, state);
            const vlm::View x = mixed(own.out_proj.depth);
            if (i + 1 == LAYERS) keep(to, x, own.out_proj.depth, 0);
            project(to, own.out_proj, x, residual_, vlm::ADD);
            norm(to, own.post_norm);
            shape_.experts ? experts(to, i) : mlp(to, own);
            if (shape_.features && i == 0)
                to.add(vlm::FEATURES,
                       vlm::Features{.out = residual_, .column = HIDDEN, .width = HIDDEN});
        }
        keep(to, none_, 0, 1);
        norm(to, final_norm_);
        project(to, head_, normed_, none_, vlm::LOGITS);
        return to;
    }

    void norm(Operations& to, const float* factors) const {
        to.add(
            vlm::NORM,
            vlm::Norm{
                .x = residual_, .out = normed_, .width = HIDDEN, .factors = factors, .eps = EPS});
    }

    void project(Operations& to, const vlm::Weight& weight, vlm::View x, vlm::View out,
                 int64_t use) const {
        to.add(vlm::PRODUCT,
               vlm::Product{.weight = weight, .x = x, .out = out, .use = use, .site = 0});
    }

    void keep(Operations& to, vlm::View x, int64_t width, int64_t reporting) const {
        to.add(vlm::KEEP, vlm::Keep{.residual = residual_,
                                    .x = x,
                                    .residual_width = HIDDEN,
                                    .width = width,
                                    .reporting = reporting});
    }

    void delta_net(Operations& to, int64_t index, State& state) const {
        to.add(vlm::DELTA_NET,
               vlm::DeltaNet{.x = wide(0),
                             .out = mixed(VALUES),
                             .key_heads = KEY_HEADS,
                             .value_heads = VALUE_HEADS,
                             .key_dim = DELTA_DIM,
                             .value_dim = DELTA_DIM,
                             .taps = KERNEL,
                             .tail_stride = LAYERS * TAILS,
                             .state_stride = LAYERS * STATES,
                             .state_type = sizeof(S) == 2 ? vlm::BFLOAT16 : vlm::FLOAT32,
                             .conv = layers_[index].conv,
                             .neg_decay = layers_[index].neg_decay,
                             .dt_bias = layers_[index].dt_bias,
                             .norm = layers_[index].gated_norm,
                             .tails = &state.tails[index * TAILS],
                             .states = &state.states[index * STATES],
                             .eps = EPS,
                             .updates = {.key_stride = LAYERS * KEYS,
                                         .change_stride = LAYERS * VALUES,
                                         .decay_stride = LAYERS * VALUE_HEADS,
                                         .input_stride = LAYERS * CHANNELS,
                                         .keys = &state.keys[index * KEYS],
                                         .changes = &state.changes[index * VALUES],
                                         .decays = &state.decays[index * VALUE_HEADS],
                                         .inputs = &state.inputs[index * CHANNELS]}});
    }

    static vlm::Pages pages_of(int64_t index, State& state) {
        P* keys = &state.pages[2 * index * PAGE];
        vlm::f16* scales = state.scales.empty() ? nullptr : &state.scales[4 * index * SCALES];
        auto part = [&](int64_t i) { return scales ? scales + i * SCALES : nullptr; };
        return {.form = FORM<P>,
                .block_size = BLOCK,
                .block_stride = LAYERS * 2 * PAGE,
                .token_stride = KV_HEADS * DIM,
                .head_stride = DIM,
                .scale_block_stride = LAYERS * 4 * SCALES,
                .scale_token_stride = KV_HEADS,
                .scale_head_stride = 1,
                .k = keys,
                .v = keys + PAGE,
                .k_scales = part(0),
                .k_zeros = part(1),
                .v_scales = part(2),
                .v_zeros = part(3)};
    }

    void attention(Operations& to, int64_t index, State& state) const {
        const vlm::Pages pages = pages_of(index, state);
        to.add(vlm::HEADS, vlm::Heads{.x = wide(0),
                                      .cos = cos_,
                                      .sin = sin_,
                                      .heads = HEADS,
                                      .kv_heads = KV_HEADS,
                                      .head_dim = DIM,
                                      .half = HALF,
                                      .pages = pages,
                                      .q_norm = layers_[index].q_norm,
                                      .k_norm = layers_[index].k_norm,
                                      .eps = EPS});
        const vlm::View out = mixed(HEADS * DIM);
        to.add(vlm::ATTEND, vlm::Attend{.q = wide(0),
                                        .out = out,
                                        .heads = HEADS,
                                        .kv_heads = KV_HEADS,
                                        .head_dim = DIM,
                                        .pages = pages,
                                        .first_key = 0,
                                        .scale = 0.17677669529663687});
        to.add(vlm::SIGMOID,
               vlm::Sigmoid{
                   .x = out, .gate = wide((HEADS + 2 * KV_HEADS) * DIM), .width = HEADS * DIM});
    }

    void gated(Operations& to, const Layer& own) const {
        to.add(vlm::GATED, vlm::Gated{.gate = own.gate,
                                      .up = own.up,
                                      .x = normed_,
                                      .out = inside_,
                                      .gate_site = 0,
                                      .up_site = 0});
    }

    void mlp(Operations& to, const Layer& own) const {
        gated(to, own);
        project(to, own.down, inside_, residual_, vlm::ADD);
    }

    void experts(Operations& to, int64_t index) const {
        const Layer& own = layers_[index];
        project(to, own.router, normed_, scores_, vlm::SCORES);
        if (shape_.shared) gated(to, own);
        to.add(vlm::EXPERTS, vlm::Experts{.x = normed_,
                                          .scores = scores_,
                                          .shared = inside_,
                                          .out = residual_,
                                          .experts = shape_.experts,
                                          .top_k = TOP_K,
                                          .hidden = HIDDEN,
                                          .index = index,
                                          .gate_up = &gate_up_[2 * shape_.experts * index],
                                          .down = &down_[shape_.experts * index],
                                          .ungated = 0,
                                          .shared_down = shape_.shared ? own.down : vlm::Weight{},
                                          .apart = 0,
                                          .shared_site = 0,
                                          .gate_up_sites = nullptr,
                                          .down_sites = nullptr,
                                          .sigmoid = shape_.sigmoid,
                                          .bias = shape_.sigmoid ? choice_bias_ : nullptr,
                                          .scale = shape_.sigmoid ? 2.5 : 1.0,
                                          .floor = shape_.sigmoid ? 1e-20 : 0.0});
    }

    static constexpr int32_t axes_[HALF] = {0, 1, 2, 0, 1, 2, 0, 0};

    Random& random_;
    int64_t type_;
    Shape shape_;
    Table<T> x_, features_;
    std::deque<std::vector<float>> vectors_;
    std::deque<Matrix> matrices_;
    std::vector<vlm::Weight> gate_up_, down_;
    std::vector<Layer> layers_;
    vlm::Weight head_;
    const float *final_norm_, *inv_freq_, *choice_bias_;
    std::vector<int32_t> blocks_;
};

}  // namespace cases
