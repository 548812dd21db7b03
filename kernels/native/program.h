// What Python hands over (models/compiled_program.py and compiled_step.py mirror these with
// ctypes): a model, once, and a step.
#pragma once

#include "product.h"

namespace vlm {

enum Kind : int64_t { GATED_DELTA = 0, ATTENTION = 1 };

struct Sizes {
    int64_t hidden, vocab, layers;
    int64_t heads, kv_heads, head_dim, rotary_half;
    int64_t key_heads, value_heads, key_dim, value_dim, conv_kernel;
    int64_t experts, top_k;  // 0 without experts
    int64_t block_size;
    int64_t kv_block_stride, kv_token_stride;  // in elements, as all strides
    int64_t conv_row_stride, state_row_stride;
    double eps, scale;  // of norms; of attention's scores
};

// Vectors are float32 and contiguous; norm factors have the 1 of a zero-centred norm added.
struct Layer {
    int64_t kind;
    const float* input_norm;
    const float* post_norm;
    Weight in_proj, out_proj;
    // Gated delta rule; `conv` is [kernel, channels].
    const float *conv, *neg_decay, *dt_bias, *gated_norm;
    void* tails;    // first row of this layer, [channels, kernel - 1]
    float* states;  // first row of this layer, [value_heads, key_dim, value_dim]
    // Attention.
    const float *q_norm, *k_norm;
    void *k_pages, *v_pages;  // first block of this layer, [block_size, kv_heads, head_dim]
    // The MLP, or the shared expert; the router's last row is the shared expert's gate.
    Weight gate, up, down;
    Weight router;
    const Weight* expert_gate_up;  // gate and up of expert 0, of expert 1, ...
    const Weight* expert_down;
};

struct Model {
    Sizes sizes;
    const Layer* layers;
    const float* final_norm;
    Weight head;
    const float* inv_freq;     // [rotary_half]
    const int32_t* rope_axis;  // [rotary_half], the row of `positions` a frequency takes
};

// T tokens of S sequences, a sequence's tokens next to each other and in order.
struct Step {
    int64_t tokens, sequences, rows, threads;
    const void* x;               // [T, hidden] embeddings
    const int64_t* positions;    // [3, T]
    const int64_t* slots;        // [T], -1 for none
    const int64_t* first_token;  // [S + 1]
    const int64_t* start;        // [S] keys before the sequence's first token
    const int64_t* src_rows;     // [S], -1 for the zero state
    const int64_t* dst_rows;     // [S]
    const int64_t* first_block;  // [S] where its table begins in `blocks`
    const int32_t* blocks;
    const int64_t* snapshot_rows;  // [T] row that receives the state after this token, -1 for none
    const int64_t* logit_rows;     // [R] tokens
    float* logits;                 // [R, vocab]
    int64_t* expert_ids;           // [T, layers, top_k] or null: then only the rows of the logits
                                   // go through what follows the last token mixer
};

}  // namespace vlm
