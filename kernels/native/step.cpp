// A forward through all layers in one parallel region: its work is shared out in pieces that
// threads take as they come, and every stage ends with a barrier.
#include <omp.h>

#include "attention.h"
#include "delta_heads.h"
#include "experts.h"
#include "layout.h"
#include "program.h"
#include "rows.h"
#include "step_memory.h"

namespace vlm {

template <typename T>
struct Runner : Memory<T> {
    using Own = Memory<T>;
    using Own::normed, Own::wide, Own::mixed, Own::hidden, Own::expert_hidden, Own::ids;
    using Own::residual, Own::cos, Own::sin, Own::results, Own::routing, Own::factors, Own::kept;
    using Own::wide_stride, Own::hidden_width, Own::deepest;

    const Model& model;
    const Step& step;
    const Sizes& s;
    Assignment& assignment;
    AttentionPlan& plan;
    int64_t tokens;  // rows that go through a stage: all tokens, at the end the logits' rows

    void run() {
        on_all_threads(step.threads, [this] {
            own_workplace().reserve(deepest);
            own_attention_room().of(attention_room(s.head_dim));
            own_delta_room().of(delta_heads_room(s));
        });
        plan.make(attention_job(nullptr));
        assignment.reserve(std::min(step.tokens, EXPERT_TOKENS) * s.top_k, s.experts);
#pragma omp parallel num_threads((int)step.threads)
        {
            begin();
            for (int64_t i = 0; i < s.layers; ++i) {
                const Layer& layer = model.layers[i];
                norm(layer.input_norm);
                layer.kind == GATED_DELTA ? gated_delta(layer) : attention(layer);
                if (i + 1 == s.layers && !step.expert_ids) keep_rows(layer.out_proj.depth);
                project_from(layer.out_proj, mixed, Add{residual, s.hidden});
                norm(layer.post_norm);
                s.experts ? experts(layer, i) : mlp(layer);
            }
            if (step.expert_ids) keep_rows(0);
            norm(model.final_norm);
            project_from(model.head, normed, Put<float>{step.logits, s.vocab});
        }
    }

    void begin() {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < step.tokens; ++t) {
            const T* from = (const T*)step.x + t * s.hidden;
            for (int64_t c = 0; c < s.hidden; c += LANES)
                store(residual + t * s.hidden + c, load(from + c));
            rotations(step.positions + t, step.tokens, model.inv_freq, model.rope_axis,
                      s.rotary_half, cos + t * s.rotary_half, sin + t * s.rotary_half);
        }
    }

    void norm(const float* norm_factors) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t)
            norm_row(residual + t * s.hidden, normed + t * s.hidden, s.hidden, norm_factors,
                     (float)s.eps);
    }

    // What happens to up to 32 columns of a product, rounded as an op would store them.
    template <typename Out>
    struct Put {
        Out* out;
        int64_t stride;
        void operator()(int64_t row, int64_t column, int64_t count, const float* sums) const {
            Out* to = out + row * stride + column;
            for (int64_t c = 0; c < count; c += LANES) {
                const Vec value = rounded<T>(load(sums + c));
                if (count - c >= LANES)
                    store(to + c, value);
                else
                    store_some(to + c, value, count - c);
            }
        }
    };
    struct Add {
        float* out;
        int64_t stride;
        void operator()(int64_t row, int64_t column, int64_t count, const float* sums) const {
            float* to = out + row * stride + column;
            for (int64_t c = 0; c < count; c += LANES)
                store(to + c, rounded<T>(load(to + c) + load(sums + c)));
        }
    };

    // Rows as wide as the weight is deep.
    template <typename Use>
    void project_from(const Weight& weight, const T* x, const Use& use) {
        project<T>(
            weight, tokens, step.threads, [&](int64_t r) { return x + r * weight.depth; }, use);
    }

    void gated_delta(const Layer& layer) {
        project_from(layer.in_proj, normed, Put<T>{wide, wide_stride});
        const Packed packed{step.sequences, step.threads,  step.first_token,
                            step.src_rows,  step.dst_rows, step.snapshot_rows};
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < step.sequences * s.key_heads; ++i)
            DeltaHeads<T>(s, layer, i % s.key_heads, wide, wide_stride, mixed)
                .run(packed, i / s.key_heads);
    }

    Attention attention_job(const Layer* layer) const {
        Attention job{};
        job.sequences = step.sequences;
        job.threads = step.threads;
        job.heads = s.heads;
        job.kv_heads = s.kv_heads;
        job.head_dim = s.head_dim;
        job.q_stride = wide_stride;
        job.q_head = s.head_dim;
        job.block_size = s.block_size;
        job.kv_block_stride = s.kv_block_stride;
        job.kv_token_stride = s.kv_token_stride;
        job.kv_head_stride = s.head_dim;
        job.scale = s.scale;
        job.offsets = step.first_token;
        job.starts = step.start;
        job.first_block = step.first_block;
        job.blocks = step.blocks;
        job.q = wide;
        job.k = layer ? layer->k_pages : nullptr;
        job.v = layer ? layer->v_pages : nullptr;
        job.out = mixed;
        return job;
    }

    void attention(const Layer& layer) {
        project_from(layer.in_proj, normed, Put<T>{wide, wide_stride});
        const int64_t dim = s.head_dim, heads = s.heads + s.kv_heads;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tokens * heads; ++i) {
            const int64_t t = i / heads, head = i % heads;
            T* x = wide + t * wide_stride + head * dim;
            const float *c = cos + t * s.rotary_half, *n = sin + t * s.rotary_half;
            if (head < s.heads) {
                norm_and_rotate(x, x, layer.q_norm, c, n, dim, s.rotary_half, (float)s.eps);
                continue;
            }
            const int64_t slot = step.slots[t];
            if (slot < 0) continue;
            const int64_t place = slot / s.block_size * s.kv_block_stride +
                                  slot % s.block_size * s.kv_token_stride + (head - s.heads) * dim;
            norm_and_rotate(x, (T*)layer.k_pages + place, layer.k_norm, c, n, dim, s.rotary_half,
                            (float)s.eps);
            std::memcpy((T*)layer.v_pages + place, x + s.kv_heads * dim, dim * sizeof(T));
        }
        vlm::attend<T>(attention_job(&layer), plan);
        const int64_t width = s.heads * dim;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            const T* gate = wide + t * wide_stride + width + 2 * s.kv_heads * dim;
            times_sigmoid_row(mixed + t * width, gate, mixed + t * width, width);
        }
    }

    // From here on only the wanted rows matter, of the residual and of `width` mixed columns.
    void keep_rows(int64_t width) {
#pragma omp single
        {
            // By way of memory whose content has been used: rows may come in any order.
            for (int64_t r = 0; r < step.rows; ++r)
                std::memcpy(wide + r * width, mixed + step.logit_rows[r] * width,
                            width * sizeof(T));
            std::memcpy(mixed, wide, step.rows * width * sizeof(T));
            for (int64_t r = 0; r < step.rows; ++r)
                std::memcpy(kept + r * s.hidden, residual + step.logit_rows[r] * s.hidden,
                            s.hidden * sizeof(float));
            std::memcpy(residual, kept, step.rows * s.hidden * sizeof(float));
            tokens = step.rows;
        }
    }

    // silu(gate . x) * (up . x) for one panel of the operand's rows; `out(r)` is where row r goes.
    template <typename Out>
    static void gate_panel(const Weight& gate, const Weight& up, int64_t p, Workplace& own,
                           const Out& out) {
        float *gates = own.sums_of(0), *ups = own.sums_of(1);
        multiply(gate, p, own.operand, gates);
        multiply(up, p, own.operand, ups);
        const int64_t count = std::min<int64_t>(PANEL, gate.columns - p * PANEL);
        for (int64_t r = 0; r < own.operand.rows(); ++r)
            for (int64_t c = 0; c < count; c += LANES)
                store(out(r) + p * PANEL + c, silu(rounded<T>(load(gates + r * PANEL + c))) *
                                                  rounded<T>(load(ups + r * PANEL + c)));
    }

    void gated_hidden(const Layer& layer) {
        for_panels<T>(
            layer.gate, tokens, step.threads, [&](int64_t r) { return normed + r * s.hidden; },
            [&](int64_t first, int64_t p, Workplace& own) {
                gate_panel(layer.gate, layer.up, p, own,
                           [&](int64_t r) { return hidden + (first + r) * layer.gate.columns; });
            });
    }

    void mlp(const Layer& layer) {
        gated_hidden(layer);
        project_from(layer.down, hidden, Add{residual, s.hidden});
    }

    void experts(const Layer& layer, int64_t index) {
        const int64_t columns = s.experts + 1;
        project_from(layer.router, normed, Put<float>{routing, columns});
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            choose(routing + t * columns, s.experts, s.top_k, ids + t * s.top_k,
                   factors + t * s.top_k);
            if (step.expert_ids)
                std::memcpy(step.expert_ids + (t * s.layers + index) * s.top_k, ids + t * s.top_k,
                            s.top_k * sizeof(int64_t));
        }
        gated_hidden(layer);
        for (int64_t first = 0; first < tokens; first += EXPERT_TOKENS)
            some_experts(layer, first, std::min(EXPERT_TOKENS, tokens - first));
    }

    void some_experts(const Layer& layer, int64_t first, int64_t n) {
        const int64_t width = layer.expert_gate_up[0].columns;
#pragma omp single
        assignment.make(ids + first * s.top_k, n * s.top_k, s.experts);
        for_experts<T>(
            assignment, layer.expert_gate_up, 2,
            [&](int64_t place) { return normed + (first + place / s.top_k) * s.hidden; },
            [&](int64_t expert, int64_t p, const int64_t* places, Workplace& own) {
                const Weight* pair = layer.expert_gate_up + 2 * expert;
                gate_panel(pair[0], pair[1], p, own,
                           [&](int64_t r) { return expert_hidden + places[r] * width; });
            });
        for_experts<T>(
            assignment, layer.expert_down, 1,
            [&](int64_t place) { return expert_hidden + place * width; },
            [&](int64_t expert, int64_t p, const int64_t* places, Workplace& own) {
                multiply(layer.expert_down[expert], p, own.operand, own.sums_of(0));
                const int64_t count = std::min<int64_t>(PANEL, s.hidden - p * PANEL);
                for (int64_t r = 0; r < own.operand.rows(); ++r)
                    std::memcpy(results + places[r] * s.hidden + p * PANEL,
                                own.sums_of(0) + r * PANEL, count * sizeof(float));
            });
        float* shared = results + n * s.top_k * s.hidden;
        const T* inner = hidden + first * layer.down.depth;
        project<T>(
            layer.down, n, step.threads, [&](int64_t r) { return inner + r * layer.down.depth; },
            Put<float>{shared, s.hidden});
#pragma omp for schedule(static)
        for (int64_t t = 0; t < n; ++t)
            add_experts(first + t, shared + t * s.hidden, results + t * s.top_k * s.hidden);
    }

    // The shared expert first, then the routed ones in the order of their weights.
    void add_experts(int64_t token, const float* shared, const float* routed) {
        const float gate = sigmoid(routing[token * (s.experts + 1) + s.experts]);
        const float* weights = factors + token * s.top_k;
        for (int64_t c = 0; c < s.hidden; c += LANES) {
            Vec total = load(shared + c) * gate;
            for (int64_t j = 0; j < s.top_k; ++j)
                total = fma(weights[j], load(routed + j * s.hidden + c), total);
            float* to = residual + token * s.hidden + c;
            store(to, rounded<T>(load(to) + total));
        }
    }
};

template <typename T>
void run(const Model& model, const Step& step) {
    static thread_local Arena arena;
    static thread_local Assignment assignment;
    static thread_local AttentionPlan plan;
    Memory<T> memory;
    do {
        arena.begin();
        memory.take(arena, model, step);
    } while (!arena.settle());
    Runner<T>{memory, model, step, model.sizes, assignment, plan, step.tokens}.run();
}

VLM_STRUCT(Sizes, hidden, vocab, layers, heads, kv_heads, head_dim, rotary_half, key_heads,
           value_heads, key_dim, value_dim, conv_kernel, experts, top_k, block_size,
           kv_block_stride, kv_token_stride, conv_row_stride, state_row_stride, eps, scale);
VLM_STRUCT(Layer, kind, input_norm, post_norm, in_proj, out_proj, conv, neg_decay, dt_bias,
           gated_norm, tails, states, q_norm, k_norm, k_pages, v_pages, gate, up, down, router,
           expert_gate_up, expert_down);
VLM_STRUCT(Model, sizes, layers, final_norm, head, inv_freq, rope_axis);
VLM_STRUCT(Step, tokens, sequences, rows, threads, x, positions, slots, first_token, start,
           src_rows, dst_rows, first_block, blocks, snapshot_rows, logit_rows, logits, expert_ids);
VLM_CONSTANT(GATED_DELTA);
VLM_CONSTANT(ATTENTION);
VLM_CONSTANT(MOST_SHARED);

}  // namespace vlm

// Both arguments checked by the caller. `bits` is 32 for float32 activations, 16 for bfloat16.
// Returns what `guarded` does.
extern "C" int64_t vlm_step(const vlm::Model* model, const vlm::Step* step, int64_t bits) {
    return vlm::guarded(
        [=] { bits == 32 ? vlm::run<float>(*model, *step) : vlm::run<vlm::bf16>(*model, *step); });
}
