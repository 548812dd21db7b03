// vlm_step on a small made-up vision tower: pictures whose patches see all of each other, squares
// of patches that become tokens, and features of an early block. Heads of 12 dims are not whole
// vectors.
#include <deque>

#include "cases.h"
#include "step_model.h"

namespace cases {

namespace {

constexpr int64_t PATCHES = 48, TOWER_HEADS = 4, TOWER_DIM = 12, PADDED_DIM = 16, TOWER_INNER = 80;
constexpr int64_t AREA = 4, MERGED = AREA * PATCHES, OUT = 32;
constexpr int64_t PICTURES[] = {8, 72, 4, 72, 600};  // patches of each

template <typename T>
class Tower {
  public:
    Tower(Random& random, int64_t type) : random_(random), type_(type) {
        for (int64_t size : PICTURES) pictures_.push_back(random.numbers<T>(size * PATCHES));
        inv_freq_ = random.numbers(TOWER_DIM / 2, 0.5f, 0.5f);
        to_.add(vlm::ROTATIONS, vlm::Rotations{.cos = cos_,
                                               .sin = sin_,
                                               .half = TOWER_DIM / 2,
                                               .inv_freq = inv_freq_.data(),
                                               .axis = axes_,
                                               .scale = 1.0});
        attention();
        mlp();
        merger(1, true);
        attention();
        mlp();
        merger(0, false);
    }

    // Embeddings and features of the pictures of these numbers.
    std::vector<T> run(const std::vector<int64_t>& chosen, int64_t threads) const {
        std::vector<T> x;
        std::vector<int64_t> begins{0}, starts(chosen.size());
        for (int64_t picture : chosen) {
            x.insert(x.end(), pictures_[picture].begin(), pictures_[picture].end());
            begins.push_back(begins.back() + PICTURES[picture]);
        }
        const int64_t patches = begins.back();
        std::vector<int32_t> blocks(patches);
        std::vector<double> positions(2 * patches);
        std::vector<const int32_t*> tables;
        for (size_t i = 0; i < chosen.size(); ++i) {
            tables.push_back(blocks.data() + begins[i]);
            for (int64_t t = begins[i]; t < begins[i + 1]; ++t) {
                blocks[t] = (int32_t)t;
                positions[t] = (double)((t - begins[i]) / 8);
                positions[patches + t] = (double)((t - begins[i]) % 8);
            }
        }
        std::vector<T> out(patches / AREA * 2 * OUT);
        vlm::Step step{};
        step.tokens = patches;
        step.sequences = (int64_t)chosen.size();
        step.threads = threads;
        step.x = x.data();
        step.positions = positions.data();
        step.first_token = begins.data();
        step.start = starts.data();
        step.tables = tables.data();
        step.hidden = out.data();
        vlm::Program program{};
        program.ops = to_.ops().data();
        program.widths = WIDTHS;
        program.count = (int64_t)to_.ops().size();
        program.buffers = BUFFERS;
        program.hidden = PATCHES;
        program.residual = RESIDUAL;
        program.deepest = MERGED;
        must(vlm_step(&program, &step, BITS<T>), "vlm_step");
        return out;
    }

  private:
    enum Buffer : int64_t { RESIDUAL, NORMED, WIDE, TURNED, MIXED, COS, SIN, BUFFERS };
    static constexpr int64_t WIDTHS[BUFFERS] = {PATCHES * 4,
                                                PATCHES * sizeof(T),
                                                MERGED * sizeof(T),
                                                3 * TOWER_HEADS * PADDED_DIM * sizeof(T),
                                                TOWER_HEADS * PADDED_DIM * sizeof(T),
                                                TOWER_DIM / 2 * 4,
                                                TOWER_DIM / 2 * 4};
    static constexpr vlm::View residual_{RESIDUAL, 0, PATCHES}, normed_{NORMED, 0, PATCHES};
    static constexpr vlm::View turned_{TURNED, 0, 3 * TOWER_HEADS * PADDED_DIM};
    static constexpr vlm::View mixed_{MIXED, 0, TOWER_HEADS * PADDED_DIM};
    static constexpr vlm::View cos_{COS, 0, TOWER_DIM / 2}, sin_{SIN, 0, TOWER_DIM / 2};
    static constexpr int32_t axes_[TOWER_DIM / 2] = {0, 0, 0, 1, 1, 1};

    static constexpr vlm::View wide(int64_t width) { return {WIDE, 0, width}; }

    void product(int64_t columns, int64_t depth, vlm::View x, vlm::View out, int64_t use) {
        matrices_.emplace_back(random_, type_, columns, depth, true);
        to_.add(
            vlm::PRODUCT,
            vlm::Product{
                .weight = matrices_.back().weight(), .x = x, .out = out, .use = use, .site = 0});
    }

    void norm(vlm::View x, vlm::View out, int64_t width) {
        const float* factors[2];
        for (int i = 0; i < 2; ++i) {
            vectors_.push_back(random_.numbers(width, 0.5f, 1.0f - i));
            factors[i] = vectors_.back().data();
        }
        to_.add(vlm::LAYER_NORM, vlm::LayerNorm{.x = x,
                                                .out = out,
                                                .width = width,
                                                .factors = factors[0],
                                                .offsets = factors[1],
                                                .eps = EPS});
    }

    void attention() {
        norm(residual_, normed_, PATCHES);
        product(3 * PATCHES, PATCHES, normed_, wide(3 * PATCHES), vlm::STORE);
        to_.add(vlm::TURN, vlm::Turn{.x = wide(3 * PATCHES),
                                     .cos = cos_,
                                     .sin = sin_,
                                     .out = turned_,
                                     .heads = TOWER_HEADS,
                                     .head_dim = TOWER_DIM,
                                     .padded_dim = PADDED_DIM});
        to_.add(vlm::SEE_ALL, vlm::SeeAll{.x = turned_,
                                          .out = mixed_,
                                          .heads = TOWER_HEADS,
                                          .padded_dim = PADDED_DIM,
                                          .scale = 0.28867513459481287});
        to_.add(vlm::NARROW, vlm::Narrow{.x = mixed_,
                                         .out = normed_,
                                         .heads = TOWER_HEADS,
                                         .head_dim = TOWER_DIM,
                                         .padded_dim = PADDED_DIM});
        product(PATCHES, PATCHES, normed_, residual_, vlm::ADD);
    }

    void mlp() {
        norm(residual_, normed_, PATCHES);
        product(TOWER_INNER, PATCHES, normed_, wide(TOWER_INNER), vlm::STORE_GELU_TANH);
        product(PATCHES, TOWER_INNER, wide(TOWER_INNER), residual_, vlm::ADD);
    }

    // To the given place of a token's row.
    void merger(int64_t place, bool late) {
        const vlm::View squares{NORMED, 0, MERGED}, out{TURNED, 0, OUT};
        if (!late) norm(residual_, normed_, PATCHES);
        to_.add(vlm::SQUARES, vlm::Squares{.size = AREA});
        if (late) norm({RESIDUAL, 0, MERGED}, squares, MERGED);
        product(MERGED, MERGED, squares, wide(MERGED), vlm::STORE_GELU);
        product(OUT, MERGED, wide(MERGED), out, vlm::STORE);
        to_.add(vlm::HIDDEN,
                vlm::Hidden{.x = out, .width = OUT, .column = place * OUT, .stride = 2 * OUT});
        to_.add(vlm::SQUARES, vlm::Squares{.size = 1});
    }

    Random& random_;
    int64_t type_;
    Operations to_;
    std::vector<std::vector<T>> pictures_;
    std::vector<float> inv_freq_;
    std::deque<Matrix> matrices_;
    std::deque<std::vector<float>> vectors_;
};

template <typename T>
void towers(const std::string& name, int64_t type) {
    Random random(name);
    const Tower<T> tower(random, type);
    const std::vector<int64_t> all{0, 1, 2, 3, 4};
    report(BITS<T>, name, [&](int64_t threads) { return Digest().add(tower.run(all, threads)); });
    const std::vector<T> whole = tower.run(all, 1);
    int64_t first = 0;
    for (int64_t picture : all) {
        const int64_t count = PICTURES[picture] / AREA * 2 * OUT;
        expect(alike(tower.run({picture}, 2), part(whole, first, count)), BITS<T>, name,
               "picture " + std::to_string(picture) + " alone");
        first += count;
    }
}

}  // namespace

void tower_cases() {
    towers<float>("vlm_step/tower-float32", vlm::FLOAT32);
    towers<float>("vlm_step/tower-bfloat16", vlm::BFLOAT16);
    towers<bf16>("vlm_step/tower-bfloat16", vlm::BFLOAT16);
}

}  // namespace cases
