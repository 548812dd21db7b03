// A forward of few tokens through all layers, in one parallel region: its work is shared out in
// pieces that threads take as they come, and every stage ends with a barrier.
#include <omp.h>

#include "attention.h"
#include "experts.h"
#include "gated_delta.h"
#include "guard.h"
#include "layout.h"
#include "program.h"
#include "step_memory.h"

namespace vlm {

template <typename T>
struct Runner : Memory<T> {
    using Own = Memory<T>;
    using Own::longest, Own::delta_size, Own::seen_size, Own::attended, Own::packed_head;
    using Own::mixer_stride, Own::hidden_stride, Own::expert_stride, Own::wide_stride;
    using Own::residual, Own::wide, Own::cos, Own::sin, Own::mixed, Own::delta, Own::results;
    using Own::routing, Own::queries, Own::normed, Own::mixer_out, Own::hidden, Own::expert_hidden;
    using Own::snapshots, Own::ids, Own::partials, Own::seen, Own::normed_stride;

    const Model& model;
    const Step& step;
    const Sizes& s;
    Assignment& assignment;
    int64_t tokens;  // rows that go through a stage: all tokens, at the end the logits' rows

    void run() {
#pragma omp parallel num_threads((int)step.threads)
        {
            begin();
            for (int64_t i = 0; i < s.layers; ++i) {
                const Layer& layer = model.layers[i];
                norm(layer.input_norm);
                layer.kind == GATED_DELTA ? gated_delta(layer) : attention(layer);
                if (i + 1 == s.layers && !step.expert_ids) keep_rows(layer);
                project(layer.out_proj, mixer_out, mixer_stride, Add{residual, s.hidden});
                norm(layer.post_norm);
                s.experts ? experts(layer, i) : mlp(layer);
            }
            if (step.expert_ids) keep_rows(model.layers[s.layers - 1]);
            norm(model.final_norm);
            project(model.head, normed, normed_stride, Put{step.logits, s.vocab});
        }
    }

    void begin() {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < step.tokens; ++t) {
            const T* from = (const T*)step.x + t * s.hidden;
            for (int64_t c = 0; c < s.hidden; ++c) residual[t * s.hidden + c] = load_one(from + c);
            rotations(step.positions + t, step.tokens, model.inv_freq, model.rope_axis,
                      s.rotary_half, cos + t * s.rotary_half, sin + t * s.rotary_half);
        }
    }

    void norm(const float* factors) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            const float* x = residual + t * s.hidden;
            const float scale = inverse_rms(x, s.hidden, (float)s.eps);
            for (int64_t c = 0; c < s.hidden; c += LANES)
                store(normed + t * normed_stride + c, load(x + c) * scale * load(factors + c));
        }
    }

    // What happens to 64 columns of a product, rounded as an op would store them; the last block
    // may be narrower.
    struct Put {
        float* out;
        int64_t stride;
        void operator()(int64_t row, int64_t column, int64_t count, float* sums) const {
            for (int64_t c = 0; c < BLOCK; c += LANES) store(sums + c, rounded<T>(load(sums + c)));
            std::memcpy(out + row * stride + column, sums, count * sizeof(float));
        }
    };
    struct Add {
        float* out;
        int64_t stride;
        void operator()(int64_t row, int64_t column, int64_t count, float* sums) const {
            float* to = out + row * stride + column;
            for (int64_t c = 0; c < count; c += LANES)
                store(to + c, rounded<T>(load(to + c) + load(sums + c)));
        }
    };

    template <typename Use>
    void project(const Weight& weight, const T* x, int64_t stride, const Use& use) {
        const int64_t rows = tokens;
#pragma omp for schedule(dynamic, 1)
        for (int64_t block = 0; block < blocks_of(weight); ++block) {
            float sums[MOST_TOKENS * BLOCK];
            const T* inputs[MOST_TOKENS];
            for (int64_t r = 0; r < rows; ++r) inputs[r] = x + r * stride;
            block_product(weight, block, inputs, rows, sums);
            const int64_t column = block * BLOCK;
            const int64_t count = std::min<int64_t>(BLOCK, weight.columns - column);
            for (int64_t r = 0; r < rows; ++r) use(r, column, count, sums + r * BLOCK);
        }
    }

    void gated_delta(const Layer& layer) {
        project(layer.in_proj, normed, normed_stride, Put{wide, wide_stride});
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < step.sequences * s.key_heads; ++i) {
            const int64_t sequence = i / s.key_heads, first = step.first_token[sequence];
            const int64_t thread = omp_get_thread_num();
            DeltaTask<T> task{&s,
                              &layer,
                              wide + first * wide_stride,
                              wide_stride,
                              mixer_out + first * mixer_stride,
                              mixer_stride,
                              step.first_token[sequence + 1] - first,
                              step.src_rows[sequence],
                              step.dst_rows[sequence],
                              step.snapshot_rows + first};
            gated_delta_head(task, i % s.key_heads, delta + thread * delta_size,
                             snapshots + thread * longest);
        }
    }

    void attention(const Layer& layer) {
        project(layer.in_proj, normed, normed_stride, Put{wide, wide_stride});
        const int64_t dim = s.head_dim, heads = s.heads + s.kv_heads;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tokens * heads; ++i) {
            const int64_t t = i / heads, head = i % heads;
            float* x = wide + t * wide_stride + head * dim;
            const float *c = cos + t * s.rotary_half, *n = sin + t * s.rotary_half;
            if (head < s.heads) {
                norm_and_rotate(x, layer.q_norm, c, n, dim, s.rotary_half, (float)s.eps);
                for (int64_t d = 0; d < dim; d += LANES)
                    store(queries + (t * s.heads + head) * dim + d, load(x + d));
                continue;
            }
            norm_and_rotate(x, layer.k_norm, c, n, dim, s.rotary_half, (float)s.eps);
            const int64_t slot = step.slots[t];
            if (slot < 0) continue;
            const int64_t place = slot / s.block_size * s.kv_block_stride +
                                  slot % s.block_size * s.kv_token_stride + (head - s.heads) * dim;
            const float* v = x + s.kv_heads * dim;
            for (int64_t d = 0; d < dim; d += LANES) {
                store((T*)layer.k_pages + place + d, load(x + d));
                store((T*)layer.v_pages + place + d, load(v + d));
            }
        }
        attend_decodes(layer);
        if (step.decodes < step.sequences) attend_prefills(layer);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tokens * s.heads; ++i) {
            const int64_t t = i / s.heads, head = i % s.heads;
            float out[MOST_DIM];
            if (t < step.decodes)
                merge(partials + i, mixed + i * dim, parts_of(step.start[t] + 1),
                      step.decodes * s.heads, dim, out);
            else
                for (int64_t d = 0; d < dim; d += LANES)
                    store(out + d, load(attended + i * dim + d));
            const float* gate = wide + t * wide_stride + (s.heads + 2 * s.kv_heads + head) * dim;
            for (int64_t d = 0; d < dim; d += LANES)
                store(mixer_out + t * mixer_stride + head * dim + d,
                      load(out + d) * sigmoid(load(gate + d)));
        }
    }

    Pages<T> pages(const Layer& layer, int64_t sequence) const {
        return {(const T*)layer.k_pages,
                (const T*)layer.v_pages,
                step.blocks + step.first_block[sequence],
                s.block_size,
                s.kv_block_stride,
                s.kv_token_stride};
    }

    // A decode token is a sequence of its own: the first ones, in the order of the tokens.
    void attend_decodes(const Layer& layer) {
        int64_t pieces = 0;
        for (int64_t i = 0; i < step.decodes; ++i) pieces += parts_of(step.start[i] + 1);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pieces; ++i) {
            int64_t token = 0, part = i;
            while (part >= parts_of(step.start[token] + 1))
                part -= parts_of(step.start[token++] + 1);
            const int64_t keys = step.start[token] + 1, begin = part * part_size(keys);
            const int64_t group = s.heads / s.kv_heads, row = token * s.heads;
            const int64_t at = part * step.decodes * s.heads + row;
            int64_t visible[MOST_SHARED];
            std::fill(visible, visible + group, keys);
            attend(pages(layer, token), queries + row * s.head_dim, s.kv_heads, group, visible,
                   s.head_dim, begin, std::min(begin + part_size(keys), keys),
                   seen + omp_get_thread_num() * seen_size, partials + at, mixed + at * s.head_dim);
        }
    }

    // As the op of longer prefills does it, so that a token's bits do not depend on its slice.
    void attend_prefills(const Layer& layer) {
        PrefillAttention job{};
        job.heads = s.heads;
        job.kv_heads = s.kv_heads;
        job.head_dim = s.head_dim;
        job.q_stride = s.heads * s.head_dim;
        job.q_head = s.head_dim;
        job.kv_head_stride = s.head_dim;
        job.scale = std::pow((double)s.head_dim, -0.5);
        job.offsets = step.first_token;
        job.starts = step.start;
        job.q = queries;
        job.out = attended;
        QueryTile<T> tile(s.head_dim);
        for (int64_t i = step.decodes; i < step.sequences; ++i)
            for (int64_t kv_head = 0; kv_head < s.kv_heads; ++kv_head)
                attend_head(job, pages(layer, i), i, kv_head, packed_head, tile);
    }

    // From here on only the wanted rows matter.
    void keep_rows(const Layer& layer) {
#pragma omp single
        {
            // By way of `wide`, whose content has been used: rows may come in any order.
            const int64_t width = layer.out_proj.depth;
            T* rows = (T*)wide;
            for (int64_t r = 0; r < step.rows; ++r)
                std::memcpy(rows + r * width, mixer_out + step.logit_rows[r] * mixer_stride,
                            width * sizeof(T));
            for (int64_t r = 0; r < step.rows; ++r)
                std::memcpy(mixer_out + r * mixer_stride, rows + r * width, width * sizeof(T));
            for (int64_t r = 0; r < step.rows; ++r)
                std::memcpy(wide + r * s.hidden, residual + step.logit_rows[r] * s.hidden,
                            s.hidden * sizeof(float));
            std::memcpy(residual, wide, step.rows * s.hidden * sizeof(float));
            tokens = step.rows;
        }
    }

    // hidden[r] = silu(gate . x[r]) * (up . x[r]) for one block of columns.
    void gated_block(const Weight& gate, const Weight& up, int64_t block, const T* const* x,
                     int64_t rows, T* const* out) {
        float left[MOST_TOKENS * BLOCK], right[MOST_TOKENS * BLOCK];
        block_product(gate, block, x, rows, left);
        block_product(up, block, x, rows, right);
        const int64_t column = block * BLOCK;
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < BLOCK && column + c < gate.columns; c += LANES)
                store(out[r] + column + c, silu(rounded<T>(load(left + r * BLOCK + c))) *
                                               rounded<T>(load(right + r * BLOCK + c)));
    }

    void gated_hidden(const Layer& layer) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t block = 0; block < blocks_of(layer.gate); ++block) {
            const T* x[MOST_TOKENS];
            T* out[MOST_TOKENS];
            for (int64_t r = 0; r < tokens; ++r) {
                x[r] = normed + r * normed_stride;
                out[r] = hidden + r * hidden_stride;
            }
            gated_block(layer.gate, layer.up, block, x, tokens, out);
        }
    }

    void mlp(const Layer& layer) {
        gated_hidden(layer);
        project(layer.down, hidden, hidden_stride, Add{residual, s.hidden});
    }

    void experts(const Layer& layer, int64_t index) {
        const int64_t n = tokens, columns = s.experts + 1;
        float* weights = routing + step.tokens * columns;
        project(layer.router, normed, normed_stride, Put{routing, columns});
#pragma omp single
        {
            for (int64_t t = 0; t < n; ++t)
                choose(routing + t * columns, s.experts, s.top_k, ids + t * s.top_k,
                       weights + t * s.top_k);
            if (step.expert_ids)
                for (int64_t t = 0; t < n; ++t)
                    std::memcpy(step.expert_ids + (t * s.layers + index) * s.top_k,
                                ids + t * s.top_k, s.top_k * sizeof(int64_t));
            assignment.make(ids, n * s.top_k);
        }
        const int64_t used = assignment.experts.size();
        const int64_t wide_blocks = blocks_of(layer.expert_gate_up[0]);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < used * wide_blocks; ++i) {
            const T* x[MOST_TOKENS];
            T* out[MOST_TOKENS];
            const int64_t rows = served(i / wide_blocks, [&](int64_t r, int64_t place) {
                x[r] = normed + place / s.top_k * normed_stride;
                out[r] = expert_hidden + place * expert_stride;
            });
            const Weight* pair = layer.expert_gate_up + 2 * assignment.experts[i / wide_blocks];
            gated_block(pair[0], pair[1], i % wide_blocks, x, rows, out);
        }
        gated_hidden(layer);
        const int64_t out_blocks = blocks_of(layer.expert_down[0]);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < used * out_blocks; ++i) {
            const T* x[MOST_TOKENS];
            int64_t to[MOST_TOKENS];
            const int64_t rows = served(i / out_blocks, [&](int64_t r, int64_t place) {
                x[r] = expert_hidden + place * expert_stride;
                to[r] = place;
            });
            const Weight& down = layer.expert_down[assignment.experts[i / out_blocks]];
            float sums[MOST_TOKENS * BLOCK];
            block_product(down, i % out_blocks, x, rows, sums);
            const int64_t column = i % out_blocks * BLOCK;
            const int64_t count = std::min<int64_t>(BLOCK, s.hidden - column);
            for (int64_t r = 0; r < rows; ++r)
                std::memcpy(results + to[r] * s.hidden + column, sums + r * BLOCK,
                            count * sizeof(float));
        }
        float* shared = results + step.tokens * s.top_k * s.hidden;
        project(layer.down, hidden, hidden_stride, Put{shared, s.hidden});
#pragma omp for schedule(static)
        for (int64_t t = 0; t < n; ++t) {
            const float gate = sigmoid(routing[t * columns + s.experts]);
            for (int64_t c = 0; c < s.hidden; c += LANES) {
                Vec total = load(shared + t * s.hidden + c) * gate;
                for (int64_t j = t * s.top_k; j < (t + 1) * s.top_k; ++j)
                    total += weights[j] * load(results + j * s.hidden + c);
                float* to = residual + t * s.hidden + c;
                store(to, load(to) + total);
            }
        }
    }

    template <typename Each>
    int64_t served(int64_t which, const Each& each) const {
        const int64_t first = assignment.first[which], last = assignment.first[which + 1];
        for (int64_t i = first; i < last; ++i) each(i - first, assignment.places[i]);
        return last - first;
    }
};

thread_local Arena arena;
thread_local Assignment assignment;

template <typename T>
void run(const Model& model, const Step& step) {
    Memory<T> memory;
    do {
        arena.begin();
        memory.take(arena, model, step);
    } while (!arena.settle());
    memory.clear_padding(model.sizes, step);
    Runner<T>{memory, model, step, model.sizes, assignment, step.tokens}.run();
}

VLM_STRUCT(Sizes, hidden, vocab, layers, heads, kv_heads, head_dim, rotary_half, key_heads,
           value_heads, key_dim, value_dim, conv_kernel, experts, top_k, block_size,
           kv_block_stride, kv_token_stride, conv_row_stride, state_row_stride, eps);
VLM_STRUCT(Layer, kind, input_norm, post_norm, in_proj, out_proj, conv, neg_decay, dt_bias,
           gated_norm, tails, states, q_norm, k_norm, k_pages, v_pages, gate, up, down, router,
           expert_gate_up, expert_down);
VLM_STRUCT(Model, sizes, layers, final_norm, head, inv_freq, rope_axis);
VLM_STRUCT(Step, tokens, sequences, decodes, rows, threads, x, positions, slots, first_token, start,
           src_rows, dst_rows, first_block, blocks, snapshot_rows, logit_rows, logits, expert_ids);
VLM_CONSTANT(GATED_DELTA);
VLM_CONSTANT(ATTENTION);
VLM_CONSTANT(MOST_TOKENS);
VLM_CONSTANT(MOST_SHARED);

}  // namespace vlm

extern "C" {

// Both arguments checked by the caller. `bits` is 32 for float32 weights, 16 for bfloat16. Returns
// what `guarded` does.
int64_t vlm_small_step(const vlm::Model* model, const vlm::Step* step, int64_t bits) {
    return vlm::guarded(
        [=] { bits == 32 ? vlm::run<float>(*model, *step) : vlm::run<vlm::bf16>(*model, *step); });
}
}
