// A causal convolution of a step: a stretch of channels of one sequence.
#pragma once

#include <algorithm>

#include "gated_delta/convolution.h"
#include "gated_delta/packed.h"
#include "run.h"

namespace vlm {

constexpr int64_t STRETCH = 16;  // of 16 channels each, per task

template <typename T>
class Stretch {
  public:
    Stretch(const ShortConv& op, int64_t first, Strided<T> x, Strided<T> out)
        : op_(op),
          first_(first),
          count_(std::min(STRETCH, op.channels / LANES - first)),
          history_(op.taps - 1),
          x_(x),
          out_(out) {}

    // Without drafts `update` is -1. With drafts, folds `folded` updates, from number `update` on,
    // into the row; then the tokens' own updates replace them, and the row stays as it is.
    void run(const Packed& packed, int64_t sequence, int64_t update, int64_t folded) {
        const int64_t begun = packed.offsets[sequence];
        const Tails<T> old = tails(packed.src_rows[sequence]);
        each([&](int64_t c, Vec* window) {
            old.load(c, window);
            for (int64_t t = 0; t < folded; ++t)
                shift(window, history_, load(inputs(update + t) + c));
            if (folded) old.store(c, window);
        });
        for_token_tiles(packed, sequence, [&](int64_t begin, int64_t n, int64_t row) {
            const Tails<T> to = tails(update < 0 ? row : -1);
            each([&](int64_t c, Vec* window) {
                for (int64_t t = 0; t < n; ++t)
                    token(begin + t, c, window, update < 0 ? -1 : update + begin + t - begun);
                to.store(c, window);
            });
        });
        const Tails<T> last = tails(update < 0 ? packed.dst_rows[sequence] : -1);
        each([&](int64_t c, Vec* window) { last.store(c, window); });
    }

  private:
    template <typename Work>
    void each(const Work& work) {
        for (int64_t g = 0; g < count_; ++g) work((first_ + g) * LANES, windows_[g]);
    }

    Tails<T> tails(int64_t row) const {
        return {row < 0 ? nullptr : (T*)op_.tails + row * op_.tail_stride, history_};
    }

    T* inputs(int64_t entry) const { return (T*)op_.inputs + entry * op_.input_stride; }

    // Each product is rounded to T, as where it is stored between two operations.
    void token(int64_t t, int64_t c, Vec* window, int64_t update) {
        const T* own = x_(t) + c;
        const Vec input =
            op_.products ? rounded<T>(load(own) * load(own + 2 * op_.channels)) : load(own);
        const Vec total = convolve_token(input, op_.conv + c, op_.bias ? op_.bias + c : nullptr,
                                         op_.channels, history_, window);
        if (update >= 0) store(inputs(update) + c, input);
        store(out_(t) + c,
              op_.products ? load(own + op_.channels) * rounded<T>(total) : silu(total));
    }

    const ShortConv& op_;
    int64_t first_, count_, history_;
    Strided<T> x_, out_;
    Vec windows_[STRETCH][MAX_TAPS];
};

template <typename T>
void perform(const Run& run, const ShortConv& op) {
    const Step& step = run.step;
    const Packed packed{step.sequences, step.threads,  step.first_token,
                        step.src_rows,  step.dst_rows, step.snapshot_rows};
    const Strided<T> x = run.rows<T>(op.x), out = run.rows<T>(op.out);
    const int64_t stretches = (op.channels / LANES + STRETCH - 1) / STRETCH;
    run.memory.scheduler.for_each(step.sequences * stretches, [&](int64_t i) {
        const int64_t sequence = i / stretches;
        const int64_t update = step.updates ? step.updates[sequence] : -1;
        Stretch<T>(op, i % stretches * STRETCH, x, out)
            .run(packed, sequence, update, update < 0 ? 0 : step.folded[sequence]);
    });
}

}  // namespace vlm
