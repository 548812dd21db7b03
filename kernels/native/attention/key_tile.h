// Parts of attention over one tile of keys that do not depend on what the lanes of vectors are.
#pragma once

#include "attention/attention.h"

namespace vlm {

// Offsets of a tile's keys in the pages. Keys from `end` on repeat the last key.
struct KeyOffsets {
    int64_t at[TILE_KEYS], scale_at[TILE_KEYS];

    void find(const Pages& pages, int64_t first_key, const int32_t* blocks, int64_t first,
              int64_t end) {
        const int32_t* block = blocks + (first_key + first) / pages.block_size;
        int64_t token = (first_key + first) % pages.block_size;
        for (int64_t j = 0; j < TILE_KEYS; ++j) {
            at[j] = *block * pages.block_stride + token * pages.token_stride;
            scale_at[j] = *block * pages.scale_block_stride + token * pages.scale_token_stride;
            if (first + j + 1 < end && ++token == pages.block_size) token = 0, ++block;
        }
    }
};

// Prefetches a tile's keys and values while the tile before it is computed. Into L2, because two
// tiles exceed L1; a few lines per step, because processors drop bursts of prefetches. The rows of
// a head are too short for the hardware prefetcher.
template <typename P>
class KeyPrefetcher {
  public:
    // Prefetches nothing if `tile` is null.
    void start(const P* keys, const P* values, const KeyOffsets* tile, int64_t dim) {
        keys_ = keys, values_ = values, tile_ = tile, dim_ = dim;
    }

    // Distributes the prefetches over this many calls of `step`.
    void spread_over(int64_t steps) {
        const int64_t lines = 2 * TILE_KEYS * ((dim_ + LINE - 1) / LINE);
        lines_per_step_ = tile_ ? (lines + steps - 1) / steps : 0;
        next_ = 0;
        at_ = dim_;
    }

    VLM_INLINE void step() {
        for (int64_t i = 0; i < lines_per_step_; ++i, at_ += LINE) {
            if (at_ >= dim_) {
                if (next_ == 2 * TILE_KEYS) return;
                row_ = (next_ < TILE_KEYS ? keys_ : values_) + tile_->at[next_ % TILE_KEYS];
                ++next_, at_ = 0;
            }
            __builtin_prefetch(row_ + at_, 0, L2_CACHE);
        }
    }

  private:
    static constexpr int64_t LINE = 64 / (int64_t)sizeof(P);

    const P *keys_ = nullptr, *values_ = nullptr, *row_ = nullptr;
    const KeyOffsets* tile_ = nullptr;
    int64_t dim_ = 0, lines_per_step_ = 0, next_ = 0, at_ = 0;
};

// Scales and zero points of int8 codes. Scales multiply the scores of keys and the weights of
// values; zero points are subtracted from codes.
struct CodeScales {
    float scale[TILE_KEYS], zero[TILE_KEYS];

    void find(const KeyOffsets& offsets, const void* scales, const void* zeros, int64_t head) {
        gather(offsets, (const f16*)scales + head, scale);
        gather(offsets, (const f16*)zeros + head, zero);
    }

  private:
    static void gather(const KeyOffsets& offsets, const f16* from, float* to) {
        f16 halves[TILE_KEYS];
        for (int64_t j = 0; j < TILE_KEYS; ++j) halves[j] = from[offsets.scale_at[j]];
        for (int64_t j = 0; j < TILE_KEYS; j += LANES) store(to + j, load(halves + j));
    }
};

// The running state of an online softmax. `output` is [dim, QUERIES], for few queries [queries,
// dim].
struct OnlineSoftmax {
    Vec max_score[QUERY_VECS], weight_sum[QUERY_VECS];
    float* output;

    void begin(int64_t count) {
        for (int c = 0; c < QUERY_VECS; ++c) max_score[c] = all(-INFINITY), weight_sum[c] = zero();
        std::memset(output, 0, count * sizeof(float));
    }

    void save(float* partial) const {
        for (int c = 0; c < QUERY_VECS; ++c) {
            store(partial + c * LANES, max_score[c]);
            store(partial + QUERIES + c * LANES, weight_sum[c]);
        }
    }

    void read(const float* partial) {
        for (int c = 0; c < QUERY_VECS; ++c) {
            max_score[c] = load(partial + c * LANES);
            weight_sum[c] = load(partial + QUERIES + c * LANES);
        }
    }

    // Merges the state of the next part; `add_values(mine, its)` does so for the output.
    template <int C, typename Mix>
    void merge(const OnlineSoftmax& part, const Mix& add_values) {
        Vec mine[C], its[C];
        for (int c = 0; c < C; ++c) {
            const Vec top = maximum(part.max_score[c], max_score[c]), base = finite(top);
            mine[c] = exp2_nonpositive(max_score[c] - base);
            its[c] = exp2_nonpositive(part.max_score[c] - base);
            max_score[c] = top;
            weight_sum[c] = fma(part.weight_sum[c], its[c], weight_sum[c] * mine[c]);
        }
        add_values(mine, its);
    }

    // Raises the maximum to `top` and adds `its`, a tile's weights; `base` is the finite `top`.
    // Returns the factor by which the output so far must be rescaled.
    Vec update(int c, const Vec& top, const Vec& base, const Vec& its) {
        const Vec rescale = exp2_nonpositive(max_score[c] - base);
        weight_sum[c] = fma(weight_sum[c], rescale, its);
        max_score[c] = top;
        return rescale;
    }

    // Returns a finite maximum: a query that has seen no key has weights of 0, not 2^(inf - inf).
    static Vec finite(const Vec& peak) { return where_less(all(-INFINITY), peak, peak, zero()); }
};

// Values of T are multiplied as pairs of bfloat16, else as float32.
template <typename T>
constexpr bool PAIRED = HAS_BF16_DOT && sizeof(T) == 2;

// 2 * WIDTH values of two keys, interleaved to pairs.
struct Interleaved {
    Floats lower, upper;

    VLM_INLINE Interleaved(const bf16* even, const bf16* odd) {
        typedef uint16_t Whole __attribute__((vector_size(4 * WIDTH)));
        struct First {
            static constexpr int of(int lane) { return lane / 2 + lane % 2 * 2 * WIDTH; }
        };
        struct Second {
            static constexpr int of(int lane) { return First::of(lane) + WIDTH; }
        };
        const Whole low = read<Whole>(even), high = read<Whole>(odd);
        lower = (Floats)shuffle<First>(low, high);
        upper = (Floats)shuffle<Second>(low, high);
    }
};

}  // namespace vlm
