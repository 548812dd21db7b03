// vlm_attention.
#include "calls.h"
#include "cases.h"

namespace cases {

struct Heads {
    const char* name;
    int64_t heads, kv_heads, dim, block_size;
    float scale;  // of queries: the larger, the steeper the softmax
};

// Sequences whose keys and values lie in shuffled pages of P.
template <typename T, typename P>
struct Paged {
    static constexpr int64_t SEQUENCES = 3, TOKENS = 1300;
    const Heads& own;
    int64_t own_blocks;
    Table<T> queries;
    std::vector<P> keys, values;
    std::vector<vlm::f16> k_scales, k_zeros, v_scales, v_zeros;
    std::vector<int32_t> blocks;

    Paged(Random& random, const Heads& heads)
        : own(heads),
          own_blocks((TOKENS + own.block_size - 1) / own.block_size),
          queries(random, SEQUENCES, TOKENS, own.heads * own.dim, own.scale),
          blocks(SEQUENCES * own_blocks) {
        const int64_t rows = (int64_t)blocks.size() * own.block_size * own.kv_heads;
        keys = stored<P>(random, rows * own.dim);
        values = stored<P>(random, rows * own.dim, 2.0f);
        if (FORM<P> == vlm::KV_INT8)
            for (auto* each : {&k_scales, &k_zeros, &v_scales, &v_zeros})
                *each = scales(random, rows);
        for (size_t i = 0; i < blocks.size(); ++i) {
            blocks[i] = (int32_t)i;
            std::swap(blocks[i], blocks[random.below((int64_t)i + 1)]);
        }
    }

    vlm::Pages pages() const {
        const int64_t width = own.kv_heads * own.dim;
        return {.form = FORM<P>,
                .block_size = own.block_size,
                .block_stride = own.block_size * width,
                .token_stride = width,
                .head_stride = own.dim,
                .scale_block_stride = own.block_size * own.kv_heads,
                .scale_token_stride = own.kv_heads,
                .scale_head_stride = 1,
                .k = (void*)keys.data(),
                .v = (void*)values.data(),
                .k_scales = (void*)k_scales.data(),
                .k_zeros = (void*)k_zeros.data(),
                .v_scales = (void*)v_scales.data(),
                .v_zeros = (void*)v_zeros.data()};
    }

    // Keys begin with the table's slot `first_key`, counted from block `first_block` on.
    std::vector<T> run(const std::vector<Slice>& slices, int64_t threads, int64_t first_key = 0,
                       int64_t first_block = 0) const {
        const std::vector<T> q = queries.of(slices);
        std::vector<T> out(q.size());
        std::vector<int64_t> starts;
        std::vector<const int32_t*> tables;
        for (const Slice& slice : slices) {
            starts.push_back(slice.first);
            tables.push_back(blocks.data() + slice.sequence * own_blocks + first_block);
        }
        const std::vector<int64_t> begins = offsets(slices);
        const vlm::Attention job{.sequences = (int64_t)slices.size(),
                                 .threads = threads,
                                 .heads = own.heads,
                                 .kv_heads = own.kv_heads,
                                 .head_dim = own.dim,
                                 .q_stride = own.heads * own.dim,
                                 .q_head = own.dim,
                                 .pages = pages(),
                                 .first_key = first_key,
                                 .whole = 0,
                                 .scale = 0.125,
                                 .offsets = begins.data(),
                                 .starts = starts.data(),
                                 .tables = tables.data(),
                                 .q = q.data(),
                                 .out = out.data()};
        must(vlm_attention(&job, BITS<T>), "vlm_attention");
        return out;
    }
};

template <typename T, typename P>
static void attention(const Heads& heads, const std::string& kind,
                      const std::vector<Slice>& slices) {
    const std::string name = std::string("vlm_attention/") + heads.name + "/" + kind;
    Random random(name);
    const Paged<T, P> paged(random, heads);
    report(BITS<T>, name,
           [&](int64_t threads) { return Digest().add(paged.run(slices, threads)); });
    const std::vector<T> company = paged.run(slices, 1);
    const int64_t width = paged.queries.width, size = heads.block_size;
    int64_t end = 0;
    for (const Slice& slice : slices) {
        const std::string own = " of sequence " + std::to_string(slice.sequence) + " alone";
        const Slice last{slice.sequence, slice.first + slice.count - 1, 1};
        expect(alike(paged.run({slice}, 2), part(company, end * width, slice.count * width)),
               BITS<T>, name, "the slice" + own);
        if (slice.first + slice.count + size + 1 <= paged.own_blocks * size)
            expect(alike(paged.run({slice}, 2, size + 1), paged.run({slice}, 2, 1, 1)), BITS<T>,
                   name, "a first key in the second block" + own);
        end += slice.count;
        expect(alike(paged.run({last}, 2), part(company, (end - 1) * width, width)), BITS<T>, name,
               "the last token" + own);
    }
}

template <typename T, typename P>
static void attentions(const char* pages) {
    const Heads all[] = {{"4x4x32-blocks-of-16", 4, 4, 32, 16, 4.0f},
                         {"8x2x64-blocks-of-64", 8, 2, 64, 64, 4.0f},
                         {"16x2x128-blocks-of-32", 16, 2, 128, 32, 4.0f},
                         {"6x1x48-steep", 6, 1, 48, 16, 64.0f}};
    for (const Heads& heads : all) {
        attention<T, P>(heads, std::string("prefill") + pages,
                        {{0, 0, 70}, {1, 500, 33}, {2, 0, 1}});
        attention<T, P>(heads, std::string("decode") + pages,
                        {{0, 0, 1}, {1, 511, 1}, {1, 512, 1}, {2, 62, 1}, {2, 63, 1}, {2, 64, 1}});
        attention<T, P>(heads, std::string("decode-long") + pages, {{2, 1299, 1}});
        attention<T, P>(heads, std::string("mixed") + pages,
                        {{0, 1100, 19}, {1, 63, 1}, {2, 1024, 1}});
    }
}

void attention_cases() {
    attentions<float, float>("");
    attentions<float, float8>("-over-float8");
    attentions<float, code8>("-over-int8");
    attentions<bf16, bf16>("");
    attentions<bf16, float8>("-over-float8");
    attentions<bf16, code8>("-over-int8");
}

}  // namespace cases
