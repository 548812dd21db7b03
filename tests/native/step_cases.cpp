// vlm_step on small made-up models. Layers are gated delta rule, attention, gated delta rule unless
// stated otherwise.
#include <algorithm>
#include <numeric>

#include "cases.h"
#include "sequences.h"
#include "step_model.h"

namespace cases {

template <typename T, typename P, typename S>
typename Tiny<T, P, S>::Result Tiny<T, P, S>::run(const vlm::Program& given,
                                                  const std::vector<Slice>& slices, int64_t threads,
                                                  bool ids, const Drafts& drafts) const {
    const Sequences sequences(slices);
    const std::vector<T> x = x_.of(slices);
    const int64_t tokens = sequences.tokens(), count = (int64_t)slices.size();
    std::vector<double> positions(3 * tokens);
    std::vector<int64_t> slots, start, last;
    std::vector<const int32_t*> tables;
    const std::vector<T> features = features_.of(slices);
    std::vector<int64_t> media_first, media_tokens;
    std::vector<const void*> media_rows;
    for (const Slice& slice : slices) {
        start.push_back(slice.first);
        tables.push_back(blocks_.data() + slice.sequence * BLOCKS);
        media_first.push_back((int64_t)slots.size());
        media_tokens.push_back(slice.count);
        media_rows.push_back(features.data() + slots.size() * FEATURES_WIDTH);
        for (int64_t t = slice.first; t < slice.first + slice.count; ++t) {
            const int64_t own = (int64_t)slots.size(), table = slice.sequence * BLOCKS;
            for (int64_t axis = 0; axis < 3; ++axis)
                positions[axis * tokens + own] = (double)(t / (axis + 1) + 100000 * slice.sequence);
            slots.push_back(blocks_[table + t / BLOCK] * BLOCK + t % BLOCK);
        }
        last.push_back((int64_t)slots.size() - 1);
    }
    Result result{std::vector<float>(count * VOCAB),
                  std::vector<int64_t>(ids ? tokens * LAYERS * TOP_K : 0)};
    // A slice alone comes without embeddings.
    std::vector<int64_t> numbers(tokens);
    std::iota(numbers.begin(), numbers.end(), 0);
    vlm::Program program = given;
    program.embeddings = x.data();
    program.known = tokens;
    std::vector<int64_t> best(count);
    const vlm::Step step{.tokens = tokens,
                         .sequences = count,
                         .rows = tokens ? count : 0,
                         .threads = threads,
                         .x = count == 1 ? nullptr : x.data(),
                         .token_ids = numbers.data(),
                         .positions = positions.data(),
                         .slots = slots.data(),
                         .first_token = sequences.begins.data(),
                         .start = start.data(),
                         .src_rows = sequences.src.data(),
                         .dst_rows = sequences.dst.data(),
                         .tables = tables.data(),
                         .snapshot_rows = sequences.snapshots.data(),
                         .updates = drafts.updates.empty() ? nullptr : drafts.updates.data(),
                         .folded = drafts.updates.empty() ? nullptr : drafts.folded.data(),
                         .logit_rows = last.data(),
                         .logits = result.logits.data(),
                         .best = best.data(),
                         .hidden = nullptr,
                         .expert_ids = ids ? result.expert_ids.data() : nullptr,
                         .media = count,
                         .media_stride = FEATURES_WIDTH,
                         .media_first = media_first.data(),
                         .media_tokens = media_tokens.data(),
                         .media_rows = media_rows.data(),
                         .adapters = 0,
                         .widest = 0,
                         .adapter_of = nullptr,
                         .changes = nullptr};
    must(vlm_step(&program, &step, BITS<T>), "vlm_step");
    for (int64_t r = 0; r < step.rows; ++r) {
        const float* row = &result.logits[r * VOCAB];
        expect(best[r] == std::max_element(row, row + VOCAB) - row, BITS<T>, "step", "its best");
    }
    return result;
}

// The rest of two sequences as drafts: more than a tile of tokens, with the same logits, while
// their rows stay as they are; then one more slice that folds a part of them, and the rest.
template <typename T, typename P, typename S>
static void drafted(const std::string& name, const Tiny<T, P, S>& model,
                    const StepState<T, P, S>& state, const StepState<T, P, S>& whole,
                    const std::vector<float>& logits) {
    StepState<T, P, S> own = state;
    model.run(FIRST, 1, own, false);
    const StepState<T, P, S> before = own;
    const std::vector<Slice> rest{{1, 67, 83, 1, 1}, {0, 1, 4, 0, 0}};
    const std::vector<float> found = model.run(rest, 2, own, false, {{0, 90}, {0, 0}}).logits;
    for (size_t i = 0; i < rest.size(); ++i)
        expect(alike(part(found, i * VOCAB, VOCAB), part(logits, rest[i].sequence * VOCAB, VOCAB)),
               BITS<T>, name, "drafts of sequence " + std::to_string(rest[i].sequence));
    expect(alike(own.states, before.states) && alike(own.tails, before.tails), BITS<T>, name,
           "the state before drafts hold");
    model.run({{1, 70, 5, 1, 1}}, 3, own, false, {{0}, {3}});
    model.run({{1, 75, 0, 1, 1}, {0, 5, 0, 0, 0}}, 2, own, false, {{0, 90}, {5, 4}});
    const std::vector<Slice> last{{1, 75, 75, 1, 1}};
    const std::vector<float> end = model.run(last, 1, own, false).logits;
    expect(alike(end, part(logits, VOCAB, VOCAB)), BITS<T>, name, "what follows drafts that hold");
    for (int64_t row = 0; row < 2; ++row)
        expect(alike(part(own.states, row * LAYERS * STATES, LAYERS * STATES),
                     part(whole.states, row * LAYERS * STATES, LAYERS * STATES)) &&
                   alike(part(own.tails, row * LAYERS * TAILS, LAYERS * TAILS),
                         part(whole.tails, row * LAYERS * TAILS, LAYERS * TAILS)),
               BITS<T>, name, "row " + std::to_string(row) + " once its drafts are folded");
}

template <typename T, typename P = T, typename S = float>
static void steps(const std::string& name, int64_t type, const Shape& shape) {
    Random random(name);
    const StepState<T, P, S> state(random);
    const Tiny<T, P, S> model(random, type, shape);
    const bool ids = shape.experts > 0;
    report(BITS<T>, name, [&](int64_t threads) {
        StepState<T, P, S> own = state;
        const auto result = model.run(WHOLE, threads, own, ids);
        return Digest()
            .add(result.logits)
            .add(result.expert_ids)
            .add(own.tails)
            .add(own.states)
            .add(own.pages)
            .add(own.scales);
    });
    StepState<T, P, S> company = state, alone = state, cut = state;
    const std::vector<float> logits = model.run(WHOLE, 1, company, false).logits;
    for (size_t i = 0; i < WHOLE.size(); ++i)
        expect(alike(model.run({WHOLE[i]}, 2, alone, ids).logits, part(logits, i * VOCAB, VOCAB)),
               BITS<T>, name, "sequence " + std::to_string(i) + " alone");
    expect(alike(alone, company), BITS<T>, name, "the state after sequences alone");
    model.run(FIRST, 3, cut, false);
    const std::vector<float> second = model.run(SECOND, 3, cut, false).logits;
    for (size_t i = 0; i < SECOND.size(); ++i)
        expect(
            alike(part(second, i * VOCAB, VOCAB), part(logits, SECOND[i].sequence * VOCAB, VOCAB)),
            BITS<T>, name, "sequence " + std::to_string(SECOND[i].sequence) + " in two steps");
    expect(alike(cut, company), BITS<T>, name, "the state after two steps");
    drafted(name, model, state, company, logits);
}

template <typename T>
static void all_steps() {
    steps<T>("vlm_step/dense-float32", vlm::FLOAT32, {});
    steps<T>("vlm_step/dense-bfloat16", vlm::BFLOAT16, {});
    steps<T>("vlm_step/experts-float32", vlm::FLOAT32, {.experts = 6});
    steps<T>("vlm_step/experts-bfloat16", vlm::BFLOAT16, {.experts = 6});
    steps<T>("vlm_step/experts-by-sigmoids", vlm::FLOAT32, {.experts = 6, .sigmoid = true});
    steps<T, float8>("vlm_step/pages-of-float8", vlm::BFLOAT16, {});
    steps<T, code8>("vlm_step/pages-of-int8", vlm::BFLOAT16, {});
    steps<T, code8, bf16>("vlm_step/pages-of-int8-and-states-of-bfloat16", vlm::FLOAT32,
                          {.attends = {true, false, false}});
    steps<T, T, bf16>("vlm_step/states-of-bfloat16", vlm::BFLOAT16, {});
    steps<T>("vlm_step/attention-alone", vlm::BFLOAT16, {.attends = {true, true, true}});
    steps<T>("vlm_step/features-of-media", vlm::BFLOAT16, {.features = true});
    steps<T>("vlm_step/states-and-routed-experts-alone", vlm::BFLOAT16,
             {.experts = 6, .shared = false, .attends = {false, false, false}});
}

void step_cases() {
    all_steps<float>();
    all_steps<bf16>();
}

}  // namespace cases
