// A forward of few tokens through all layers, in one parallel region: its work is shared out in
// pieces that threads take as they come, and every stage ends with a barrier.
#include <omp.h>

#include "attention.h"
#include "experts.h"
#include "gated_delta.h"
#include "guard.h"
#include "program.h"
#include "step_memory.h"

namespace vlm {

template <typename T>
struct Runner : Memory<T> {
    using Own = Memory<T>;
    using Own::longest, Own::delta_size, Own::seen_size;
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
            for (int64_t i = 0; i < s.rotary_half; ++i) {
                int64_t position = step.positions[model.rope_axis[i] * step.tokens + t];
                float angle = (float)position * model.inv_freq[i];
                cos[t * s.rotary_half + i] = std::cos(angle);
                sin[t * s.rotary_half + i] = std::sin(angle);
            }
        }
    }

    void norm(const float* factors) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            const float* x = residual + t * s.hidden;
            Vec squares{};
            for (int64_t c = 0; c < s.hidden; c += LANES) squares += load(x + c) * load(x + c);
            const float scale = 1.0f / std::sqrt(sum(squares) / s.hidden + (float)s.eps);
            for (int64_t c = 0; c < s.hidden; c += LANES)
                store(normed + t * normed_stride + c, load(x + c) * scale * load(factors + c));
        }
    }

    // What happens to 64 columns of a product; the last block may be narrower.
    struct Put {
        float* out;
        int64_t stride;
        void operator()(int64_t row, int64_t column, int64_t count, const float* sums) const {
            std::memcpy(out + row * stride + column, sums, count * sizeof(float));
        }
    };
    struct Add {
        float* out;
        int64_t stride;
        void operator()(int64_t row, int64_t column, int64_t count, const float* sums) const {
            float* to = out + row * stride + column;
            for (int64_t c = 0; c < count; ++c) to[c] += sums[c];
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
        const int64_t dim = s.head_dim, group = s.heads / s.kv_heads;
        const int64_t heads = s.heads + s.kv_heads;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tokens * heads; ++i) {
            const int64_t t = i / heads, head = i % heads;
            float* x = wide + t * wide_stride + head * dim;
            const float *c = cos + t * s.rotary_half, *n = sin + t * s.rotary_half;
            if (head < s.heads) {
                norm_and_rotate(x, layer.q_norm, c, n, dim, s.rotary_half, (float)s.eps);
                // Rows of one sequence and key head lie together: [S][kv_heads][n * group][dim].
                for (int64_t d = 0; d < dim; d += LANES)
                    store(queries + query_row(t, head) * dim + d, load(x + d));
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
        int64_t pieces = 0;
        for (int64_t i = 0; i < step.sequences; ++i) pieces += parts(i);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pieces; ++i) {
            int64_t sequence = 0, part = i;
            while (part >= parts(sequence)) part -= parts(sequence++);
            attend_part(layer, sequence, part, group);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tokens * s.heads; ++i) {
            const int64_t t = i / s.heads, head = i % s.heads;
            const int64_t row = query_row(t, head), sequence = sequence_of(t);
            float out[MOST_DIM];
            merge(partials + row, mixed + row * dim, parts(sequence), step.tokens * s.heads, dim,
                  out);
            const float* gate = wide + t * wide_stride + (s.heads + 2 * s.kv_heads + head) * dim;
            for (int64_t d = 0; d < dim; d += LANES)
                store(mixer_out + t * mixer_stride + head * dim + d,
                      load(out + d) * sigmoid(load(gate + d)));
        }
    }

    int64_t sequence_of(int64_t token) const {
        int64_t sequence = 0;
        while (token >= step.first_token[sequence + 1]) ++sequence;
        return sequence;
    }

    int64_t keys(int64_t sequence) const {
        return step.start[sequence] + step.first_token[sequence + 1] - step.first_token[sequence];
    }

    int64_t parts(int64_t sequence) const { return parts_of(keys(sequence)); }

    int64_t query_row(int64_t token, int64_t head) const {
        const int64_t sequence = sequence_of(token), group = s.heads / s.kv_heads;
        const int64_t first = step.first_token[sequence];
        const int64_t own = step.first_token[sequence + 1] - first;
        return first * s.heads + head / group * own * group + (token - first) * group +
               head % group;
    }

    void attend_part(const Layer& layer, int64_t sequence, int64_t part, int64_t group) {
        const int64_t first = step.first_token[sequence],
                      rows = step.first_token[sequence + 1] - first;
        const int64_t size = part_size(keys(sequence)), begin = part * size;
        int64_t visible[MOST_QUERIES];
        for (int64_t r = 0; r < rows * group; ++r)
            visible[r] = step.start[sequence] + r / group + 1;
        Pages<T> pages{(const T*)layer.k_pages,
                       (const T*)layer.v_pages,
                       step.blocks + step.first_block[sequence],
                       s.block_size,
                       s.kv_block_stride,
                       s.kv_token_stride};
        const int64_t row = first * s.heads, at = part * step.tokens * s.heads + row;
        attend(pages, queries + row * s.head_dim, s.kv_heads, rows * group, visible, s.head_dim,
               begin, std::min(begin + size, keys(sequence)),
               seen + omp_get_thread_num() * seen_size, partials + at, mixed + at * s.head_dim);
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
                store(out[r] + column + c,
                      silu(load(left + r * BLOCK + c)) * load(right + r * BLOCK + c));
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

}  // namespace vlm

extern "C" {

// Both arguments checked by the caller. `bits` is 32 for float32 weights, 16 for bfloat16. Returns
// what `guarded` does.
int64_t vlm_small_step(const vlm::Model* model, const vlm::Step* step, int64_t bits) {
    return vlm::guarded(
        [=] { bits == 32 ? vlm::run<float>(*model, *step) : vlm::run<vlm::bf16>(*model, *step); });
}
}
