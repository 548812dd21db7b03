// A forward as data: a program of operations over buffers of intermediate results, one row per
// token. models/program.py fills these structs once per model and its pools, and
// models/compiled_step.py once per step. Nothing here depends on an architecture.
#pragma once

#include "attention/kv_pages.h"
#include "gated_delta/gated_delta.h"
#include "products/low_rank.h"
#include "ranks.h"

namespace vlm {

// Kinds of operations, and the structs that their `args` point to.
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
    SHORT_CONV = 18,  // ShortConv
    SCAN = 19,        // Scan
    GATE_NORM = 20,   // GateNorm
};

// A view of a buffer, one row per token: elements from `column` on, rows `stride` elements apart.
// `stride` is at most the buffer's width. Views that are accessed as vectors have a multiple of
// LANES elements.
struct View {
    int64_t buffer, column, stride;
};

// Vectors are float32 and contiguous. Norm factors include the 1 of a zero-centred norm.

// RMS norm: x is float32 (the residual), `out` has the type of activations.
struct Norm {
    View x, out;
    int64_t width;
    const float* factors;
    double eps;
};

// Layer norm: subtracts the mean of x, and adds `offsets`.
struct LayerNorm {
    View x, out;
    int64_t width;
    const float *factors, *offsets;
    double eps;
};

// Computes cosine and sine of every token's angles, float32 [half] each.
struct Rotations {
    View cos, sin;
    int64_t half;
    const float* inv_freq;
    const int32_t* axis;  // the row of `positions` for each frequency
    double scale;         // factor of cosines and sines
};

// Destinations of a product.
enum Destination : int64_t {
    STORE = 0,            // to `out`, in the type of activations
    ADD = 1,              // added to `out`, float32
    SCORES = 2,           // to `out`, float32
    LOGITS = 3,           // to the step's logits
    SHARED = 4,           // float32, to this rank's slot, [tokens, columns]
    STORE_GELU = 5,       // to `out`, after gelu
    STORE_GELU_TANH = 6,  // to `out`, after gelu_tanh
    STORE_RELU2 = 7,      // to `out`, after relu2
};

// `site` numbers the places where adapters change a product, from 1 on; 0 for none.
struct Product {
    Weight weight;
    View x, out;
    int64_t use, site;
};

// silu(gate . x) * (up . x)
struct Gated {
    Weight gate, up;
    View x, out;
    int64_t gate_site, up_site;
};

// Convolution, gated delta rule and gated norm. A row of x holds query, key, value, z, b and a of
// all heads; a row of `out` is [value_heads, value_dim]. Strides of the pools are in elements.
struct DeltaNet {
    View x, out;
    int64_t key_heads, value_heads, key_dim, value_dim, taps;
    int64_t tail_stride, state_stride;               // between rows of the pools
    int64_t state_type;                              // FLOAT32 or BFLOAT16
    const float *conv, *neg_decay, *dt_bias, *norm;  // conv is [taps, channels]
    void* tails;   // first row of this layer, [channels, taps - 1]
    void* states;  // first row of this layer, [value_heads, key_dim, value_dim]
    double eps;
    Updates updates;  // of this layer; without pools for updates, none are saved or folded
};

// A causal convolution: `out` is the SiLU of (bias + sum of taps * x). Or, with `products`, one
// between two products by element: a row of x holds b, c and v of all channels, and `out` is c *
// (bias + sum of taps * (b * v)). Strides of the pools are in elements.
struct ShortConv {
    View x, out;
    int64_t channels, taps, products;
    int64_t tail_stride, input_stride;  // between rows of the pools
    const float *conv, *bias;           // [taps, channels]; [channels], or null
    void* tails;                        // first row of this layer, [channels, taps - 1]
    void* inputs;                       // of updates of this layer, [channels]; null without pools
};

// The recurrence of Mamba2. A row of x holds x, B and C of all heads and groups, one of `raw` the
// length of each head's step before its bias; `out` is [heads, head_dim]. A length is at least
// `low` and at most `high`. Strides of the pools are in elements.
struct Scan {
    View x, raw, out;
    int64_t heads, groups, state_dim, head_dim;
    int64_t state_stride;                     // between rows of the pool
    int64_t state_type;                       // FLOAT32 or BFLOAT16
    const float *neg_decay, *dt_bias, *skip;  // [heads] each
    void* states;  // first row of this layer, [heads, state_dim, head_dim]
    double low, high;
    Updates updates;  // of this layer, see DeltaNet; their inputs are ShortConv's
};

// The norm of x * silu(gate), in groups of adjacent elements. Several adjacent ranks may share one
// group, of which each has `width` elements.
struct GateNorm {
    View x, gate, out;
    int64_t groups, width;  // of a group
    int64_t sharers;        // ranks that share each group; 1: its elements are all here
    const float* factors;   // [groups, width]
    double eps;
};

// Normalises, if there are norms, and rotates the heads of queries (in place) and keys (into their
// pages), and copies values into their pages. A row of x holds queries, keys and values of all
// heads.
struct Heads {
    View x, cos, sin;
    int64_t heads, kv_heads, head_dim, half;
    Pages pages;  // starting at this layer's first block
    const float *q_norm, *k_norm;
    double eps;
};

// Attention of the queries over their sequences' pages, from slot `first_key` of their tables on.
// `out` is [tokens, heads, head_dim], contiguous.
struct Attend {
    View q, out;
    int64_t heads, kv_heads, head_dim;
    Pages pages;
    int64_t first_key;
    double scale;
};

// Rotates queries and keys in rows of queries, keys and values of all heads. Heads are padded with
// zeros to `padded_dim` in `out`.
struct Turn {
    View x, cos, sin, out;
    int64_t heads, head_dim, padded_dim;
};

// Attention of every token over its whole sequence. x is the output of Turn; `out` is [tokens,
// heads, padded_dim], contiguous.
struct SeeAll {
    View x, out;
    int64_t heads, padded_dim;
    double scale;
};

// Removes the padding: [heads, padded_dim] to [heads, head_dim].
struct Narrow {
    View x, out;
    int64_t heads, head_dim, padded_dim;
};

// From here on, `size` adjacent tokens form one row; `size` 1 makes each token a row again.
struct Squares {
    int64_t size;
};

// x * sigmoid(gate) in place.
struct Sigmoid {
    View x, gate;
    int64_t width;
};

// Keeps only the rows whose logits are needed, of the residual and of x (width 0: of the residual
// alone). Runs only in steps that report experts (`reporting` 1), or only in others (0), after all
// operations that look up tokens by sequence or slot.
struct Keep {
    View residual, x;
    int64_t residual_width, width, reporting;
};

// Routed experts by float32 scores, and the shared expert if `shared_down` has columns. The shared
// expert's x is `shared`, and the score after the experts' is the logit of its gate. Adds
// everything to `out`, float32.
struct Experts {
    View x, scores, shared, out;
    int64_t experts, top_k, hidden, index;  // `index` of this layer in the step's expert ids
    const Weight *gate_up, *down;           // gate and up of expert 0, of expert 1, ...
    int64_t ungated;  // 1: `gate_up` has one weight an expert, up, and relu2 follows it
    Weight shared_down;
    int64_t apart;        // 1: the results go to this rank's slot instead, [tokens, hidden]
    int64_t shared_site;  // of `shared_down`
    const int64_t *gate_up_sites, *down_sites;  // of every weight
    int64_t sigmoid;    // 1: experts are chosen by sigmoids, see `choose_by_sigmoid`
    const float* bias;  // [experts] of that choice, or null
    double scale;       // of its weights
    double floor;       // added to their divisor

    bool has_shared() const { return shared_down.columns > 0; }
};

// Adds media features, elements from `column` on, to the rows of their tokens in `out`, float32.
struct Features {
    View out;
    int64_t column, width;
};

// Copies rows of x to the step's hidden states, from `column` on; each state has `stride` elements.
struct Hidden {
    View x;
    int64_t width, column, stride;
};

// Adds the contents of all ranks' slots, [tokens, width] each, to `out`, float32, in the order of
// ranks.
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
    int64_t residual;        // the buffer of the residual, float32
    const void* embeddings;  // [known, hidden], in the type of activations, or null
    int64_t known;
    int64_t deepest;               // the largest depth of all weights
    int64_t expert_layers, top_k;  // of the expert ids that a step reports; 0 without experts
    Ranks* ranks;                  // null for a single rank
};

// T tokens of S sequences, the tokens of a sequence adjacent and in order.
struct Step {
    int64_t tokens, sequences, rows, threads;
    const void* x;                 // [T, hidden] embeddings, or null to look them up in the program
    const int64_t* token_ids;      // [T]
    const double* positions;       // [3, T]
    const int64_t* slots;          // [T], -1 for none
    const int64_t* first_token;    // [S + 1]
    const int64_t* start;          // [S] keys before the sequence's first token
    const int64_t* src_rows;       // [S], -1 for the zero state
    const int64_t* dst_rows;       // [S]
    const int32_t** tables;        // [S] each sequence's blocks in order
    const int64_t* snapshot_rows;  // [T] row that receives the state after this token, or -1
    // [S] or null. `updates`: where the updates of a sequence with drafts start, or -1. `folded`:
    // how many of them to fold into its row (src and dst are the same) before its tokens' updates
    // replace them. The row then stays as it is.
    const int64_t *updates, *folded;
    const int64_t* logit_rows;  // [R] tokens
    float* logits;              // [R, vocab]
    int64_t* best;        // [R] index of the first maximum of the logits, or null if not needed
    void* hidden;         // output of the program's HIDDEN operations
    int64_t* expert_ids;  // [T, expert_layers, top_k], or null if not needed
    int64_t media, media_stride;  // M runs of tokens with features; elements of a row of features
    const int64_t* media_first;   // [M] first token
    const int64_t* media_tokens;  // [M] number of tokens
    const void** media_rows;      // [M] features
    // Adapters of the step, which has A of them. `changes` holds what each changes at every site;
    // `widest` is the most columns of their `down`.
    int64_t adapters, widest;
    const int64_t* adapter_of;      // [T] index of the token's adapter, -1 for none
    const LowRankChange** changes;  // [A]
};

}  // namespace vlm

// The caller checks both. `bits` is 32 for float32 activations, 16 for bfloat16. Returns what
// `guarded` returns.
extern "C" int64_t vlm_step(const vlm::Program* program, const vlm::Step* step, int64_t bits);
