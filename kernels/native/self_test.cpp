// Runs fixed inputs through the building blocks of every kernel. Digests of the results identify
// this library's arithmetic; see kernels/native_self_test.py.
#include <vector>

#include "calls.h"
#include "codes/byte_products.h"
#include "gated_delta/convolution.h"
#include "gated_delta/gated_delta.h"
#include "products/experts.h"
#include "products/low_rank.h"
#include "products/product.h"
#include "rows/rows.h"

namespace vlm {

namespace {

// FNV-1a of 32-bit words.
struct Digest {
    uint64_t value = 0xcbf29ce484222325u;

    void add(const void* words, int64_t count) {
        const char* from = (const char*)words;
        for (int64_t i = 0; i < count; ++i) {
            uint32_t word;
            std::memcpy(&word, from + 4 * i, sizeof word);
            value = (value ^ word) * 0x100000001b3u;
        }
    }
    void add(const Vec& v) { add(&v, LANES); }
    void add(float x) { add(&x, 1); }
};

// Pseudo-random numbers, the same everywhere: multiples of 2^-23.
struct Draw {
    uint32_t state;

    float one(float scale) {
        state = state * 1664525u + 1013904223u;
        return scale * ((float)(state >> 8) * 0x1p-23f - 1.0f);
    }
    Vec lanes(float scale) {
        float values[LANES];
        for (float& value : values) value = one(scale);
        return load(values);
    }
    // `count` is a multiple of LANES.
    template <typename T>
    std::vector<T> many(int64_t count, float scale) {
        std::vector<T> values(count);
        for (int64_t i = 0; i < count; i += LANES) store(values.data() + i, lanes(scale));
        return values;
    }
};

void functions(Digest& digest) {
    Draw draw{1};
    for (float scale : {0.01f, 1.0f, 8.0f, 100.0f}) {
        for (int i = 0; i < 32; ++i) {
            const Vec x = draw.lanes(scale);
            for (const Vec& y : {exponential(x), sigmoid(x), silu(x), softplus(x), gelu(x),
                                 gelu_tanh(x), exp2_nonpositive(-magnitude(x))})
                digest.add(y);
            digest.add(logarithm(magnitude(x) + all(1e-6f)));
            digest.add(sum(x));
            digest.add(reduce_max(x));
            float angle[2];
            cosine_and_sine(draw.one(scale * 100.0f), angle, angle + 1);
            digest.add(angle, 2);
            float halves[LANES];
            store((bf16*)halves, x);
            store((f16*)halves + LANES, x);
            digest.add(halves, LANES);
        }
    }
    float scores[64];
    int64_t ids[8];
    float weights[8];
    for (float& score : scores) score = draw.one(4.0f);
    choose_experts(scores, 60, 8, ids, weights);
    for (int64_t id : ids) digest.add((float)id);
    digest.add(weights, 8);
}

void rows(Digest& digest) {
    constexpr int64_t WIDE = 64, HALF = 8;
    Draw draw{2};
    const std::vector<float> x = draw.many<float>(WIDE, 2.0f), gate = draw.many<float>(WIDE, 4.0f),
                             factors = draw.many<float>(WIDE, 1.0f);
    float cos[HALF], sin[HALF], out[WIDE];
    for (int64_t i = 0; i < HALF; ++i) cosine_and_sine(1000.0f / (i + 1), cos + i, sin + i);
    norm_and_rotate(x.data(), out, factors.data(), cos, sin, WIDE, HALF, 1e-6f);
    digest.add(out, WIDE);
    gated_norm_row(x.data(), gate.data(), out, WIDE, factors.data(), 1e-6f);
    digest.add(out, WIDE);
    times_sigmoid_row(x.data(), gate.data(), out, WIDE);
    digest.add(out, WIDE);
}

// Rows of X times a packed weight of W: few rows, more, and more than stay in registers. Any
// numbers are a valid packed weight.
template <typename X, typename W>
void products(Digest& digest, int64_t type) {
    constexpr int64_t DEEP = 304, COLUMNS = 72, MAX_COUNT = 50;
    Draw draw{3};
    const int64_t panels = (COLUMNS + PANEL - 1) / PANEL;
    const std::vector<W> packed = draw.many<W>(panels * PANEL * DEEP, 0.1f);
    const std::vector<float> bias = draw.many<float>(panels * PANEL, 1.0f);
    const std::vector<X> x = draw.many<X>(MAX_COUNT * DEEP, 1.0f);
    const Weight weight{packed.data(), bias.data(), COLUMNS, DEEP, type,
                        nullptr,       nullptr,     0,       0,    0,
                        nullptr,       nullptr,     nullptr, 0,    nullptr};
    thread_workspace().reserve(DEEP);
    std::vector<float> out(MAX_COUNT * COLUMNS);
    LoopScheduler scheduler;
    for (int64_t count : {(int64_t)1, (int64_t)5, MAX_COUNT}) {
        project<X>(
            weight, count, scheduler, [&](int64_t r) { return x.data() + r * DEEP; },
            [&](int64_t row, int64_t column, int64_t wide, const float* results) {
                std::memcpy(out.data() + row * COLUMNS + column, results, wide * sizeof(float));
            });
        digest.add(out.data(), count * COLUMNS);
    }
}

// Rows times a weight of codes, with and without zero points (e2m1 has none). Any words are valid
// codes, and any bytes valid one-byte scales except for e8m0.
template <typename X, int64_t GROUP = 48>
void coded_products(Digest& digest, int64_t type, int64_t dynamic, int64_t scale_type = FLOAT16) {
    const bool two_level = scale_type == TWO_LEVEL;
    constexpr int64_t DEEP = 384, COLUMNS = 72, MAX_COUNT = 50;
    Draw draw{6};
    const int64_t panels = (COLUMNS + PANEL - 1) / PANEL, groups = panels * (DEEP / GROUP) * PANEL;
    std::vector<uint32_t> words(panels * panel_bytes(DEEP, type) / 4);
    for (uint32_t& word : words) {
        draw.one(1.0f);
        word = draw.state ^ draw.state >> 16;
    }
    std::vector<f16> scales = draw.many<f16>(groups, 0.1f);
    if (scale_type == E8M0)
        for (f16& two : scales) two.bits = (two.bits & 0x1f1f) + 0x6060;
    const std::vector<float> factors(panels * PANEL, 0x1p-16f);
    const bool bytes = bytes_of(scale_type) == 1;
    const std::vector<X> x = draw.many<X>(MAX_COUNT * DEEP, 1.0f);
    std::vector<uint8_t> zeros(groups);
    for (uint8_t& zero : zeros) zero = (uint8_t)(draw.one(7.5f) + 8.0f);
    thread_workspace().reserve(DEEP);
    std::vector<float> out(MAX_COUNT * COLUMNS);
    LoopScheduler scheduler;
    const std::vector<f16> outer = draw.many<f16>(two_level ? groups / 2 : 0, 0.001f);
    uint8_t table[16];
    for (int i = 0; i < 16; ++i) table[i] = (uint8_t)(1 + i * 17 % 255);
    for (const uint8_t* zero : {(const uint8_t*)nullptr, (const uint8_t*)zeros.data()}) {
        if (zero && (type == FLOAT4 || is_table(type))) continue;
        const Weight weight{words.data(),
                            nullptr,
                            COLUMNS,
                            DEEP,
                            type,
                            scales.data(),
                            zero,
                            GROUP,
                            scale_type,
                            dynamic,
                            bytes && !two_level ? factors.data() : nullptr,
                            two_level ? outer.data() : nullptr,
                            two_level && zero ? outer.data() : nullptr,
                            2 * GROUP,
                            table};
        for (int64_t count : {(int64_t)1, (int64_t)5, MAX_COUNT}) {
            project<X>(
                weight, count, scheduler, [&](int64_t r) { return x.data() + r * DEEP; },
                [&](int64_t row, int64_t column, int64_t wide, const float* results) {
                    std::memcpy(out.data() + row * COLUMNS + column, results, wide * sizeof(float));
                });
            digest.add(out.data(), count * COLUMNS);
        }
    }
}

// Changes of two modules, which meet within a panel, by an adapter in a type of W.
template <typename X, typename W>
void low_ranks(Digest& digest, int64_t type) {
    constexpr int64_t DEEP = 304, COLUMNS = 2 * PANEL, RANK = 5, COUNT = 5;
    Draw draw{7};
    const std::vector<W> packed = draw.many<W>(PANEL * DEEP, 0.1f);
    const std::vector<float> scales = draw.many<float>(PANEL, 2.0f),
                             up = draw.many<float>(2 * RANK * PANEL, 0.3f);
    const std::vector<X> x = draw.many<X>(COUNT * DEEP, 1.0f);
    const LowRankPart parts[] = {{0, 2, 0, RANK, up.data()}, {1, 2, RANK, RANK, up.data()}};
    const Weight down{packed.data(), nullptr, 2 * RANK, DEEP, type,   nullptr, nullptr, 0, 0, 0,
                      nullptr,       nullptr, nullptr,  0,    nullptr};
    const LowRankChange change{down, scales.data(), 2, parts};
    thread_workspace().reserve(DEEP);
    std::vector<float> u(COUNT * PANEL), out = draw.many<float>(COUNT * COLUMNS, 1.0f);
    LoopScheduler scheduler;
    project<X>(
        down, COUNT, scheduler, [&](int64_t r) { return x.data() + r * DEEP; },
        [&](int64_t row, int64_t column, int64_t wide, const float* results) {
            scale_columns(change, column, wide, results, u.data() + row * PANEL);
        });
    for (int64_t row = 0; row < COUNT; ++row)
        for (int64_t column = 0; column < COLUMNS; column += PANEL)
            extend_columns(change, column, u.data() + row * PANEL,
                           out.data() + row * COLUMNS + column);
    digest.add(out.data(), COUNT * COLUMNS);
}

// States of S.
template <typename S>
void recurrences(Digest& digest) {
    constexpr int64_t KEY = 32, VALUE = 48, TOKENS = 20;
    Draw draw{4};
    std::vector<float> qk = draw.many<float>(TOKENS * 2 * KEY, 1.0f),
                       v = draw.many<float>(TOKENS * VALUE, 1.0f), gates(TOKENS * 4),
                       memory(KEY * VALUE + 2 * LANES * KEY);
    std::vector<S> state = draw.many<S>(KEY * VALUE, 0.3f), last(KEY * VALUE);
    for (int64_t t = 0; t < TOKENS; ++t) {
        const Vec a = draw.lanes(4.0f), bias = draw.lanes(1.0f);  // fixes the order of evaluation
        const Vec decay = log_decay(a, bias, all(-0.5f));
        gates[4 * t] = exponential(decay.a[0]);
        gates[4 * t + 1] = sigmoid(draw.one(3.0f));
    }
    prepare(qk.data(), TOKENS, KEY, gates.data());
    HeadState<S> head(KEY, VALUE, memory.data());
    head.begin(state.data());
    head.advance(TOKENS, qk.data(), gates.data(), v.data(), VALUE, last.data());
    digest.add(v.data(), TOKENS * VALUE);
    digest.add(last.data(), KEY * VALUE * sizeof(S) / 4);
}

void convolutions(Digest& digest) {
    constexpr int64_t TOKENS = 20, HISTORY = 3;
    Draw draw{6};
    const std::vector<float> taps = draw.many<float>((HISTORY + 1) * LANES, 1.0f),
                             x = draw.many<float>(TOKENS * LANES, 1.0f);
    Vec window[HISTORY] = {draw.lanes(1.0f), draw.lanes(1.0f), draw.lanes(1.0f)};
    std::vector<float> y(TOKENS * LANES);
    convolve(x.data(), LANES, TOKENS, taps.data(), nullptr, LANES, HISTORY, window, y.data(),
             LANES);
    digest.add(y.data(), TOKENS * LANES);
}

// Queries at the end of a cache whose keys fill one part and begin another. The parts of a tile are
// computed separately, as threads would, and one after another.
template <typename T>
void attentions(Digest& digest, int64_t form) {
    constexpr int64_t OWN_HEADS = 4, KV_HEADS = 2, DIM = 32, BLOCK = 16, BLOCKS = 36, TOKENS = 11;
    constexpr int64_t ROWS_OF_ALL = BLOCKS * BLOCK * KV_HEADS;
    Draw draw{5};
    std::vector<float> k(ROWS_OF_ALL * DIM), v(k.size());  // large enough for every form
    std::vector<f16> scales(4 * ROWS_OF_ALL);
    Pages pages{};
    pages.form = form;
    pages.block_size = BLOCK;
    pages.block_stride = BLOCK * KV_HEADS * DIM;
    pages.token_stride = KV_HEADS * DIM;
    pages.head_stride = DIM;
    pages.scale_block_stride = BLOCK * KV_HEADS;
    pages.scale_token_stride = KV_HEADS;
    pages.scale_head_stride = 1;
    pages.k = k.data();
    pages.v = v.data();
    pages.k_scales = scales.data();
    pages.k_zeros = scales.data() + ROWS_OF_ALL;
    pages.v_scales = scales.data() + 2 * ROWS_OF_ALL;
    pages.v_zeros = scales.data() + 3 * ROWS_OF_ALL;
    for (bool value : {false, true})
        for (int64_t row = 0; row < ROWS_OF_ALL; ++row)
            store_row(pages, value, row / KV_HEADS, row % KV_HEADS,
                      draw.many<float>(DIM, 1.0f).data(), DIM);
    const std::vector<T> q = draw.many<T>(TOKENS * OWN_HEADS * DIM, 3.0f);
    std::vector<T> out(q.size());
    digest.add(k.data(), (int64_t)k.size());
    digest.add(scales.data(), (int64_t)scales.size() / 2);
    std::vector<int32_t> blocks(BLOCKS);
    for (int64_t i = 0; i < BLOCKS; ++i) blocks[i] = (int32_t)(i * 5 % BLOCKS);
    const int64_t offsets[] = {0, TOKENS}, starts[] = {BLOCKS * BLOCK - TOKENS};
    const int32_t* tables[] = {blocks.data()};
    attention_scratch().get(attention_scratch_floats(DIM));
    for (int64_t threads : {1, 64}) {
        Attention job{};
        job.sequences = 1;
        job.threads = threads;
        job.heads = OWN_HEADS;
        job.kv_heads = KV_HEADS;
        job.head_dim = DIM;
        job.q_stride = OWN_HEADS * DIM;
        job.q_head = DIM;
        job.pages = pages;
        job.scale = 0.17677669;
        job.offsets = offsets;
        job.starts = starts;
        job.tables = tables;
        job.q = q.data();
        job.out = out.data();
        AttentionPlan plan;
        plan.make(job);
        LoopScheduler scheduler;
        attend<T>(job, plan, scheduler);
        digest.add(out.data(), out.size() * sizeof(T) / 4);
    }
}

void self_test(uint64_t* digests) {
    Digest digest;
    functions(digest);
    rows(digest);
    products<float, float>(digest, FLOAT32);
    products<float, bf16>(digest, BFLOAT16);
    products<float, f16>(digest, FLOAT16);
    coded_products<float>(digest, INT8, 0);
    coded_products<float>(digest, INT4, 0);
    coded_products<float>(digest, FLOAT8, 0);
    coded_products<bf16>(digest, INT8, 1);
    coded_products<float>(digest, INT4, 1);
    for (int64_t dynamic : {0, 1}) {
        coded_products<float>(digest, INT6, dynamic, ROOTS);
        coded_products<float>(digest, INT4, dynamic, ROOTS);
        coded_products<float>(digest, FLOAT4, dynamic, FLOAT8);
        coded_products<float>(digest, FLOAT4, dynamic, E8M0);
        coded_products<float>(digest, INT4, dynamic, TWO_LEVEL);
        coded_products<float, 16>(digest, INT6, dynamic, TWO_LEVEL);
    }
    low_ranks<float, float>(digest, FLOAT32);
    low_ranks<float, bf16>(digest, BFLOAT16);
    recurrences<float>(digest);
    recurrences<bf16>(digest);
    convolutions(digest);
    for (int64_t form : {KV_FLOAT32, KV_BFLOAT16, KV_FLOAT16, KV_FLOAT8, KV_INT8})
        attentions<float>(digest, form);
    // Products of pairs follow the digest without tables, so that its name stays as it was.
    Digest with_tables = digest;
    for (int64_t type : {TABLE4, TABLE3, TABLE2})
        for (int64_t dynamic : {0, 1})
            coded_products<float, 16>(with_tables, type, dynamic, TWO_LEVEL);
    digests[0] = with_tables.value;
    digests[1] = 0;
    digests[2] = HAS_DOT4 || HAS_DOT2;
    digests[3] = HAS_AMX;
    if (!HAS_BF16_DOT) return;
    // Includes the digest so far, because the rest is computed in float32.
    products<bf16, bf16>(digest, BFLOAT16);
    low_ranks<bf16, bf16>(digest, BFLOAT16);
    coded_products<bf16, 96>(digest, FLOAT8, 0);
    for (int64_t form : {KV_BFLOAT16, KV_FLOAT8, KV_INT8}) attentions<bf16>(digest, form);
    digests[1] = digest.value;
}

}  // namespace

}  // namespace vlm

extern "C" int64_t vlm_self_test(uint64_t* digests) {
    return vlm::guarded([=] { vlm::self_test(digests); });
}
