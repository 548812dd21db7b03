// The functions that Python calls (kernels/native_library.py), and their arguments; vlm_step is in
// program.h.
//
// The caller checks all arguments. `bits` is 32 for float32 activations, 16 for bfloat16. All
// functions return what `guarded` returns.
#pragma once

#include "attention/attention.h"
#include "gated_delta/packed.h"
#include "products/weight.h"
#include "ranks.h"

namespace vlm {

// The operation fused to a product.
enum FusedOp : int64_t {
    PLAIN = 0,
    TIMES = 1,
    PLUS = 2,
    SILU = 3,
    GELU = 4,
    GELU_TANH = 5,
    RELU2 = 6
};

struct Projection {
    Weight weight;
    int64_t rows, x_stride, other_stride, use, threads;
    const void *x, *other;
    void* out;  // [rows, columns], contiguous
};

// Packs rows of a plain `[rows, depth]` weight as columns of a packed one, both of `type`.
struct Packing {
    const void* source;
    void* packed;  // of `columns` by `depth`, zero where nothing is packed yet
    int64_t rows, stride, depth, first, type, threads;
};

// See kernels/causal_conv.
struct Convolution {
    Packed packed;
    int64_t channels, kernel, x_stride, tail_row_stride;
    const void* x;      // [N, channels]
    const float* taps;  // [kernel, channels]
    const float* bias;  // [channels], or null
    int64_t silu;       // whether SiLU follows
    void* tails;        // [rows, channels, kernel - 1]
    void* out;          // [N, channels], contiguous
};

// See kernels/gated_delta, also for gates.
struct Delta {
    Packed packed;
    int64_t key_heads, value_heads, key_dim, value_dim;
    int64_t q_stride, q_head, k_stride, k_head, v_stride, v_head;  // strides of tokens and heads
    int64_t state_row_stride, state_type;
    const void *q, *k, *v;
    const float *g, *beta;  // [N, value_heads], contiguous
    const float* skip;      // [value_heads] for Mamba2's recurrence, or null
    void* states;
    void* out;  // [N, value_heads, value_dim], contiguous
};

// Computes write strength and log decay, [tokens, heads] each, from b and a, which are adjacent.
struct Gates {
    int64_t tokens, heads, stride, threads;
    const void* raw;
    const float *neg_decay, *dt_bias;
    float *beta, *decay;
};

// Rows of `width` numbers: [tokens, heads, width], with strides of tokens and of heads.
struct Rows {
    int64_t tokens, heads, width, stride, head_stride, threads;
    const void* x;
    void* out;  // contiguous
};

}  // namespace vlm

extern "C" {

int64_t vlm_attention(const vlm::Attention* job, int64_t bits);
int64_t vlm_causal_conv(const vlm::Convolution* job, int64_t bits);
int64_t vlm_gated_delta(const vlm::Delta* job, int64_t bits);
int64_t vlm_gates(const vlm::Gates* job, int64_t bits);

// A product with its fused operation, and the packing of a weight.
int64_t vlm_linear(const vlm::Projection* job, int64_t bits);
int64_t vlm_pack(const vlm::Packing* job);

// Row-wise ops.
int64_t vlm_rms_norm(const vlm::Rows* rows, const float* factors, double eps, int64_t bits);
int64_t vlm_gated_rms_norm(const vlm::Rows* rows, const vlm::Rows* gates, const float* factors,
                           double eps, int64_t bits);
int64_t vlm_times_sigmoid(const vlm::Rows* rows, const vlm::Rows* gates, int64_t bits);
int64_t vlm_silu_times(const vlm::Rows* gates, const vlm::Rows* rows, int64_t bits);
int64_t vlm_norm_rope(const vlm::Rows* rows, const float* factors, const float* cos,
                      const float* sin, int64_t half, double eps, int64_t bits);
int64_t vlm_rotations(int64_t tokens, int64_t half, int64_t threads, const double* positions,
                      const float* inv_freq, const int32_t* axis, double scale, float* cos,
                      float* sin);

// begin: start a step, after all ranks have finished the step before. barrier: wait for the other
// ranks. give_up: abandon a step that other ranks are in.
int64_t vlm_ranks_begin(vlm::Ranks* ranks, int64_t step);
int64_t vlm_ranks_barrier(vlm::Ranks* ranks);
int64_t vlm_ranks_give_up(const vlm::Ranks* ranks, int64_t step);

// Writes four words: a digest of float32 arithmetic; a digest that also covers products of bfloat16
// pairs, or 0 without such an instruction; whether there are dot products of bytes; whether there
// are AMX tiles.
int64_t vlm_self_test(uint64_t* digests);
}
