// The recurrence of Mamba2 in a step: one head of one sequence, one tile of tokens at a time.
#pragma once

#include <cstring>

#include "gated_delta/gated_delta.h"
#include "run.h"

namespace vlm {

// Activations are of T, states of S.
template <typename T, typename S>
class ScanHead {
  public:
    ScanHead(const Scan& op, int64_t head, Strided<T> x, Strided<T> raw, Strided<T> out)
        : op_(op),
          head_(head),
          group_(head * op.groups / op.heads),
          x_(x),
          raw_(raw),
          out_(out),
          state_(op.state_dim, op.head_dim, scratch()) {
        qk_ = scratch() + state_size();
        v_ = qk_ + TOKEN_TILE * 2 * op_.state_dim;
        gates_ = v_ + TOKEN_TILE * op_.head_dim;
    }

    void run(const Packed& packed, int64_t sequence) {
        state_.begin(row(packed.src_rows[sequence]));
        for_token_tiles(packed, sequence, [&](int64_t begin, int64_t n, int64_t index) {
            tile(begin, n, row(index), -1);
        });
        state_.finish(row(packed.dst_rows[sequence]));
    }

    // Folds `count` updates, from number `first` on, into a row of the pool.
    void fold_into(int64_t index, int64_t first, int64_t count) const {
        fold(row(index), op_.state_dim, op_.head_dim, count, keys(first), changes(first),
             decays(first), op_.updates);
    }

    // Processes drafted tokens, whose updates go to the numbers from `first` on; the row stays as
    // it is. No other head may still have to fold what was there.
    void verify(const Packed& packed, int64_t sequence, int64_t first) {
        const int64_t begun = packed.offsets[sequence];
        state_.begin(row(packed.src_rows[sequence]));
        for_token_tiles(packed, sequence, [&](int64_t begin, int64_t n, int64_t) {
            tile(begin, n, nullptr, first + begin - begun);
        });
    }

  private:
    int64_t state_size() const { return op_.state_dim * op_.head_dim; }

    float* scratch() const {
        return delta_scratch().get(delta_scratch_floats(op_.state_dim, op_.head_dim, 1));
    }

    S* row(int64_t index) const {
        if (index < 0) return nullptr;
        return (S*)op_.states + index * op_.state_stride + head_ * state_size();
    }

    float* keys(int64_t entry) const {
        return op_.updates.keys + entry * op_.updates.key_stride + group_ * op_.state_dim;
    }

    float* changes(int64_t entry) const {
        return op_.updates.changes + entry * op_.updates.change_stride + head_ * op_.head_dim;
    }

    float* decays(int64_t entry) const {
        return op_.updates.decays + entry * op_.updates.decay_stride + head_;
    }

    // Saves the tokens' updates from number `first` on, unless that is -1.
    void tile(int64_t begin, int64_t n, S* to, int64_t first) {
        const int64_t N = op_.state_dim, P = op_.head_dim;
        const int64_t b = op_.heads * P + group_ * N, c = b + op_.groups * N;
        for (int64_t t = 0; t < n; ++t) {
            const T* x = x_(begin + t);
            float *query = qk_ + 2 * t * N, *key = query + N;
            for (int64_t d = 0; d < N; d += LANES) {
                store(query + d, load(x + c + d));
                store(key + d, load(x + b + d));
            }
            for (int64_t d = 0; d < P; d += LANES) store(v_ + t * P + d, load(x + head_ * P + d));
            if (first >= 0 && head_ * op_.groups % op_.heads == 0)
                std::memcpy(keys(first + t), key, N * sizeof(float));
        }
        make_gates(begin, n);
        overlap_keys(qk_, n, N, gates_);
        state_.advance(n, qk_, gates_, v_, P, to, first < 0 ? nullptr : changes(first),
                       op_.updates.change_stride);
        for (int64_t t = 0; t < n; ++t) {
            if (first >= 0) *decays(first + t) = gates_[4 * t];
            const T* x = x_(begin + t) + head_ * P;
            T* out = out_(begin + t) + head_ * P;
            for (int64_t d = 0; d < P; d += LANES)
                store(out + d, fma(op_.skip[head_], load(x + d), load(v_ + t * P + d)));
        }
    }

    // Computes decays and lengths of steps, 16 tokens at a time.
    void make_gates(int64_t begin, int64_t n) {
        const Vec bias = all(op_.dt_bias[head_]), neg_decay = all(op_.neg_decay[head_]);
        const Vec low = all((float)op_.low), high = all((float)op_.high);
        for (int64_t t = 0; t < n; t += LANES) {
            const int64_t some = std::min<int64_t>(LANES, n - t);
            float lengths[LANES] = {}, decays[LANES];
            for (int64_t i = 0; i < some; ++i) lengths[i] = load_one(raw_(begin + t + i) + head_);
            Vec length = softplus(load(lengths) + bias);
            length = where_less(length, low, low, length);
            length = where_less(high, length, high, length);
            store(lengths, length);
            store(decays, exponential(neg_decay * length));
            for (int64_t i = 0; i < some; ++i) {
                gates_[4 * (t + i)] = decays[i];
                gates_[4 * (t + i) + 1] = lengths[i];
            }
        }
    }

    const Scan& op_;
    int64_t head_, group_;
    Strided<T> x_, raw_, out_;
    HeadState<S, false> state_;
    float *qk_, *v_, *gates_;
};

template <typename T, typename S>
void run_scan(const Run& run, const Scan& op) {
    const Step& step = run.step;
    const Packed packed{step.sequences, step.threads,  step.first_token,
                        step.src_rows,  step.dst_rows, step.snapshot_rows};
    const Strided<T> x = run.rows<T>(op.x), raw = run.rows<T>(op.raw), out = run.rows<T>(op.out);
    auto each_head = [&](const auto& work) {
        run.memory.scheduler.for_each(step.sequences * op.heads, [&](int64_t i) {
            ScanHead<T, S> head(op, i % op.heads, x, raw, out);
            const int64_t sequence = i / op.heads;
            work(head, sequence, step.updates ? step.updates[sequence] : -1);
        });
    };
    // Heads of a group share keys of updates: all have folded the old ones before there are others.
    if (step.updates)
        each_head([&](const ScanHead<T, S>& head, int64_t sequence, int64_t first) {
            if (first >= 0 && step.folded[sequence])
                head.fold_into(step.src_rows[sequence], first, step.folded[sequence]);
        });
    each_head([&](ScanHead<T, S>& head, int64_t sequence, int64_t first) {
        first < 0 ? head.run(packed, sequence) : head.verify(packed, sequence, first);
    });
}

template <typename T>
void perform(const Run& run, const Scan& op) {
    op.state_type == BFLOAT16 ? run_scan<T, bf16>(run, op) : run_scan<T, float>(run, op);
}

}  // namespace vlm
