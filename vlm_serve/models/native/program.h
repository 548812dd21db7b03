// A forward as data: a program of operations over buffers that hold every token's intermediate
// results. models/program.py mirrors these structs with ctypes, once for a model and its pools, and
// models/compiled_step.py a step. Nothing here knows an architecture.
#pragma once

#include "attention/kv_pages.h"
#include "gated_delta/gated_delta.h"
#include "products/product.h"
#include "ranks.h"

namespace vlm {

// What an operation is, and the struct that its `args` point to.
enum Kind : int64_t {
    NORM = 0,         // Norm
    ROTATIONS = 1,    // Rotations
    PRODUCT = 2,      // Product
    GATED = 3,        // Gated
    DELTA_NET = 4,    // DeltaNet
    HEADS = 5,        // Heads
    ATTEND = 6,       // Attend
    SIGMOID = 7,      // Sigmoid
    KEEP = 8,         // Keep
    EXPERTS = 9,      // Experts
    FEATURES = 10,    // Features
    HIDDEN = 11,      // Hidden
    REDUCE = 12,      // Reduce
    LAYER_NORM = 13,  // LayerNorm
    TURN = 14,        // Turn
    SEE_ALL = 15,     // SeeAll
    NARROW = 16,      // Narrow
    SQUARES = 17,     // Squares
};

// Rows of a buffer, one for each token: elements `column` and on, `stride` elements apart, which is
// at most the buffer's width. What is read and written as vectors has a multiple of LANES elements.
struct View {
    int64_t buffer, column, stride;
};

// Vectors are float32 and contiguous; norm factors have the 1 of a zero-centred norm added.

// x in float32 (the residual), `out` in the type of activations.
struct Norm {
    View x, out;
    int64_t width;
    const float* factors;
    double eps;
};

// The same of x less its mean; `offsets` are added.
struct LayerNorm {
    View x, out;
    int64_t width;
    const float *factors, *offsets;
    double eps;
};

// Cosine and sine of every token's angles, float32 [half] each.
struct Rotations {
    View cos, sin;
    int64_t half;
    const float* inv_freq;
    const int32_t* axis;  // the row of `positions` that a frequency takes
};

// Where a product goes.
enum Destination : int64_t {
    STORE = 0,            // to `out`, in the type of activations
    ADD = 1,              // is added to `out`, float32
    SCORES = 2,           // to `out`, float32
    LOGITS = 3,           // to the step's logits
    SHARED = 4,           // float32, to this rank's slot, [tokens, columns]
    STORE_GELU = 5,       // to `out`, as gelu has it
    STORE_GELU_TANH = 6,  // likewise, as gelu_tanh has it
};

struct Product {
    Weight weight;
    View x, out;
    int64_t use;
};

// silu(gate . x) * (up . x)
struct Gated {
    Weight gate, up;
    View x, out;
};

// Convolution, gated delta rule and gated norm. A row of x has query, key, value, z, b and a of all
// heads; one of `out` [value_heads, value_dim]. Strides of the pools are in elements.
struct DeltaNet {
    View x, out;
    int64_t key_heads, value_heads, key_dim, value_dim, taps;
    int64_t tail_stride, state_stride;               // from row to row of the pools
    int64_t state_type;                              // FLOAT32 or BFLOAT16
    const float *conv, *neg_decay, *dt_bias, *norm;  // conv is [taps, channels]
    void* tails;   // first row of this layer, [channels, taps - 1]
    void* states;  // first row of this layer, [value_heads, key_dim, value_dim]
    double eps;
    Updates updates;  // those of this layer; none are kept or folded if there are no pools for them
};

// Norms and rotates the heads of queries (in place) and keys (into their pages), and copies values
// into their pages. A row of x has queries, keys and values of all heads.
struct Heads {
    View x, cos, sin;
    int64_t heads, kv_heads, head_dim, half;
    Pages pages;  // from the first block of this layer on
    const float *q_norm, *k_norm;
    double eps;
};

// Attention of the queries over their sequences' pages, from slot `first_key` of their tables on;
// `out` is [tokens, heads, head_dim], contiguous.
struct Attend {
    View q, out;
    int64_t heads, kv_heads, head_dim;
    Pages pages;
    int64_t first_key;
    double scale;
};

// Of rows of queries, keys and values of all heads, rotates the first two. A head's dims come to
// `out` with zeros behind them, `room` in all.
struct Turn {
    View x, cos, sin, out;
    int64_t heads, head_dim, room;
};

// Attention of every token to all of its sequence: x as Turn leaves it; `out` is [tokens, heads,
// room], contiguous.
struct SeeAll {
    View x, out;
    int64_t heads, room;
    double scale;
};

// [heads, room] to [heads, head_dim].
struct Narrow {
    View x, out;
    int64_t heads, head_dim, room;
};

// From here on so many tokens, next to each other, are one row; `size` 1: each is its own.
struct Squares {
    int64_t size;
};

// x * sigmoid(gate) in place.
struct Sigmoid {
    View x, gate;
    int64_t width;
};

// From here on only the rows with wanted logits matter: of the residual and of x (width 0: of the
// residual alone). Done only in steps that report experts (`reporting` 1) or only in others (0),
// behind all that takes tokens by their sequences or slots.
struct Keep {
    View residual, x;
    int64_t residual_width, width, reporting;
};

// Routed experts by float32 scores, and the shared one if its `shared_down` has columns: x of that
// is what `shared` holds, and the score behind the experts' is the logit of its gate. All are added
// to `out`, float32.
struct Experts {
    View x, scores, shared, out;
    int64_t experts, top_k, hidden, index;  // `index` of this layer in the step's expert ids
    const Weight *gate_up, *down;           // gate and up of expert 0, of expert 1, ...
    Weight shared_down;
    int64_t apart;  // 1: they go to this rank's slot instead, [tokens, hidden]

    bool has_shared() const { return shared_down.columns > 0; }
};

// Adds media's features to the rows of their tokens in `out`, float32: elements `column` and on.
struct Features {
    View out;
    int64_t column, width;
};

// Rows of x are the step's hidden states, of which each has `stride` elements: those from `column`
// on.
struct Hidden {
    View x;
    int64_t width, column, stride;
};

// Adds what the ranks' slots hold, [tokens, width] each, in the order of the ranks, to `out`,
// float32.
struct Reduce {
    View out;
    int64_t width;
};

struct Op {
    int64_t kind;
    const void* args;
};

struct Program {
    const Op* ops;
    const int64_t* widths;  // [buffers] bytes of a token's row
    int64_t count, buffers;
    int64_t hidden, vocab;
    int64_t residual;        // the buffer that the embeddings are widened into, float32
    const void* embeddings;  // [tokens known, hidden], in the type of activations, or null
    int64_t known;
    int64_t deepest;               // of all weights
    int64_t expert_layers, top_k;  // of the expert ids that a step reports; 0 without experts
    Ranks* ranks;                  // null: there is one
};

// T tokens of S sequences, a sequence's tokens next to each other and in order.
struct Step {
    int64_t tokens, sequences, rows, threads;
    const void* x;                 // [T, hidden] embeddings, or null: the program has those of
    const int64_t* token_ids;      // [T]
    const int64_t* positions;      // [3, T]
    const int64_t* slots;          // [T], -1 for none
    const int64_t* first_token;    // [S + 1]
    const int64_t* start;          // [S] keys before the sequence's first token
    const int64_t* src_rows;       // [S], -1 for the zero state
    const int64_t* dst_rows;       // [S]
    const int32_t** tables;        // [S] its blocks in their order
    const int64_t* snapshot_rows;  // [T] row that receives the state after this token, -1 for none
    // [S] or null: where the updates of a sequence with drafts begin, -1 for others, and how many
    // are folded into its row (src and dst are one) before its tokens leave theirs there. The row
    // stays at what was folded.
    const int64_t *updates, *folded;
    const int64_t* logit_rows;    // [R] tokens
    float* logits;                // [R, vocab]
    int64_t* best;                // [R] the first of a row's largest logits, or null: not wanted
    void* hidden;                 // what the program's HIDDEN ops leave
    int64_t* expert_ids;          // [T, expert_layers, top_k] or null: none are wanted
    int64_t media, media_stride;  // M runs of tokens with features, a row of them so many elements
    const int64_t* media_first;   // [M] first token
    const int64_t* media_tokens;  // [M] how many there are
    const void** media_rows;      // [M] their features
};

}  // namespace vlm

// Both checked by the caller. `bits` is 32 for float32 activations, 16 for bfloat16. Returns what
// `guarded` does.
extern "C" int64_t vlm_step(const vlm::Program* program, const vlm::Step* step, int64_t bits);
