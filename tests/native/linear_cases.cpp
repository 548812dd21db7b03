// vlm_linear and vlm_pack.
#include <cmath>

#include "calls.h"
#include "cases.h"
#include "matrix.h"

namespace cases {

static const char* TYPES[] = {"float32", "bfloat16", "float16", "",     "",          "",
                              "float8",  "",         "roots",   "e8m0", "two_levels"};
static const char* CODES[] = {"int8", "int6", "int4",   "float8", "float4", "",
                              "",     "",     "table4", "table3", "table2"};
static const char* USES[] = {"plain", "times", "plus", "silu", "gelu", "gelu_tanh", "relu2"};

// Values below 1 in magnitude; those of float16 also below its least normal number. Roots and
// float8 are any bytes.
static void put(Random& random, int64_t type, void* to) {
    const float number = random.number(0.5f);
    if (type == vlm::FLOAT32) std::memcpy(to, &number, sizeof number);
    if (type == vlm::BFLOAT16) vlm::store_one((bf16*)to, number);
    if (type == vlm::FLOAT16)
        *(uint16_t*)to = random.below(2) << 15 | random.below(15) << 10 | random.below(1 << 10);
    const bool bytes = type == vlm::ROOTS || type == vlm::TWO_LEVEL;
    if (bytes || type == vlm::FLOAT8) *(uint8_t*)to = random.below(256);
    if (type == vlm::E8M0) *(uint8_t*)to = 97 + random.below(30);
}

Matrix::Matrix(Random& random, int64_t type, int64_t columns, int64_t depth, bool biased)
    : type_(type), columns_(columns), depth_(depth), stride_(depth + 3) {
    const int64_t size = vlm::bytes_of(type) / 2;
    plain_.resize(columns * stride_ * size);
    for (int64_t i = 0; i < columns * stride_; ++i) put(random, type, &plain_[i * size]);
    packed_ = packed(1, 0);
    if (biased) bias_ = random.numbers(columns);
}

vlm::Weight Matrix::weight() const {
    return {.packed = packed_.data(),
            .bias = bias_.empty() ? nullptr : bias_.data(),
            .columns = columns_,
            .depth = depth_,
            .type = type_,
            .scales = nullptr,
            .zeros = nullptr,
            .group = 0,
            .scale_type = 0,
            .dynamic = 0,
            .factors = nullptr,
            .outer = nullptr,
            .floors = nullptr,
            .outer_group = 0,
            .table = nullptr};
}

std::vector<int64_t> Matrix::packed(int64_t threads, int64_t cut) const {
    const int64_t panels = (columns_ + vlm::PANEL - 1) / vlm::PANEL;
    std::vector<int64_t> to(panels * vlm::panel_bytes(depth_, type_) / 8);
    auto pack = [&](int64_t first, int64_t rows) {
        const vlm::Packing job{.source = &plain_[first * stride_ * vlm::bytes_of(type_) / 2],
                               .packed = to.data(),
                               .rows = rows,
                               .stride = stride_,
                               .depth = depth_,
                               .first = first,
                               .type = type_,
                               .threads = threads};
        must(vlm_pack(&job), "vlm_pack");
    };
    if (cut) pack(0, cut);
    pack(cut, columns_ - cut);
    return to;
}

template <typename T>
struct Product {
    Matrix matrix;
    int64_t use, columns, x_stride, other_stride;
    std::vector<T> x, other;

    Product(Random& random, int64_t type, int64_t use_, int64_t rows, int64_t columns_,
            int64_t depth)
        : matrix(random, type, columns_, depth, use_ % 2),
          use(use_),
          columns(columns_),
          x_stride(depth + 5),
          other_stride(columns_ + 7),
          x(random.numbers<T>(rows * x_stride, 2.0f)),
          other(random.numbers<T>(rows * other_stride, 2.0f)) {}

    std::vector<T> run(int64_t first, int64_t rows, int64_t threads) const {
        std::vector<T> out(rows * columns);
        const bool joins = use == vlm::TIMES || use == vlm::PLUS;
        const vlm::Projection job{.weight = matrix.weight(),
                                  .rows = rows,
                                  .x_stride = x_stride,
                                  .other_stride = other_stride,
                                  .use = use,
                                  .threads = threads,
                                  .x = &x[first * x_stride],
                                  .other = joins ? &other[first * other_stride] : nullptr,
                                  .out = out.data()};
        must(vlm_linear(&job, BITS<T>), "vlm_linear");
        return out;
    }
};

template <typename T>
static void product(int64_t type, int64_t use, int64_t rows, int64_t columns, int64_t depth) {
    const std::string name = std::string("vlm_linear/") + TYPES[type] + "/" + USES[use] + "/" +
                             std::to_string(rows) + "x" + std::to_string(columns) + "x" +
                             std::to_string(depth);
    Random random(name);
    const Product<T> own(random, type, use, rows, columns, depth);
    report(BITS<T>, name, [&](int64_t threads) { return Digest().add(own.run(0, rows, threads)); });
    const std::vector<T> company = own.run(0, rows, 1);
    for (int64_t some : {1, 4}) {
        const int64_t count = std::min(some, rows), first = rows - count;
        expect(alike(own.run(first, count, 1), part(company, first * columns, count * columns)),
               BITS<T>, name, "its last " + std::to_string(count) + " rows alone");
    }
}

// Any words are codes, and so are any bytes zero points.
template <typename T>
static void coded_product(int64_t type, int64_t scale_type, bool zeros, bool dynamic,
                          int64_t rows) {
    constexpr int64_t COLUMNS = 77, DEEP = 192, GROUP = 64, OUTER = DEEP;
    const bool bytes = vlm::bytes_of(scale_type) == 1 && scale_type != vlm::TWO_LEVEL;
    const std::string name = std::string("vlm_linear/") + CODES[type - vlm::INT8] + "/" +
                             TYPES[scale_type] + (zeros ? "/zeros" : "") +
                             (dynamic ? "/dynamic/" : "/") + std::to_string(rows);
    Random random(name);
    const int64_t panels = (COLUMNS + vlm::PANEL - 1) / vlm::PANEL;
    const int64_t count = panels * DEEP / GROUP * vlm::PANEL;
    std::vector<uint32_t> words(panels * vlm::panel_bytes(DEEP, type) / 4);
    for (uint32_t& word : words) word = random.below(1 << 16) << 16 | random.below(1 << 16);
    std::vector<char> scales(4 * count);
    for (int64_t i = 0; i < count; ++i)
        put(random, scale_type, &scales[i * vlm::bytes_of(scale_type)]);
    std::vector<float> factors(panels * vlm::PANEL);
    for (float& each : factors) each = std::ldexp(1.0f, -(int)random.below(20) - 8);
    std::vector<uint8_t> zero(count);
    for (uint8_t& each : zero) each = random.below(16);
    const bool two_level = scale_type == vlm::TWO_LEVEL;
    std::vector<char> outer(two_level ? count * GROUP / OUTER * 2 : 0);
    for (size_t i = 0; i < outer.size(); i += 2) put(random, vlm::FLOAT16, &outer[i]);
    uint8_t table[16];
    for (uint8_t& each : table) each = 1 + random.below(255);
    const std::vector<T> x = random.numbers<T>(rows * DEEP, 2.0f);
    auto run = [&](int64_t first, int64_t some, int64_t threads) {
        std::vector<T> out(some * COLUMNS);
        const vlm::Projection job{.weight = {.packed = words.data(),
                                             .bias = nullptr,
                                             .columns = COLUMNS,
                                             .depth = DEEP,
                                             .type = type,
                                             .scales = scales.data(),
                                             .zeros = zeros ? zero.data() : nullptr,
                                             .group = GROUP,
                                             .scale_type = scale_type,
                                             .dynamic = dynamic,
                                             .factors = bytes ? factors.data() : nullptr,
                                             .outer = two_level ? outer.data() : nullptr,
                                             .floors = zeros && two_level ? outer.data() : nullptr,
                                             .outer_group = OUTER,
                                             .table = table},
                                  .rows = some,
                                  .x_stride = DEEP,
                                  .other_stride = 0,
                                  .use = vlm::PLAIN,
                                  .threads = threads,
                                  .x = &x[first * DEEP],
                                  .other = nullptr,
                                  .out = out.data()};
        must(vlm_linear(&job, BITS<T>), "vlm_linear");
        return out;
    };
    report(BITS<T>, name, [&](int64_t threads) { return Digest().add(run(0, rows, threads)); });
    expect(alike(run(rows - 1, 1, 1), part(run(0, rows, 1), (rows - 1) * COLUMNS, COLUMNS)),
           BITS<T>, name, "its last row alone");
}

template <typename T>
static void coded_products() {
    for (int64_t type : {vlm::INT8, vlm::INT6, vlm::INT4, vlm::FLOAT8})
        for (int64_t scales : {vlm::FLOAT32, vlm::BFLOAT16, vlm::FLOAT16, vlm::ROOTS})
            for (bool zeros : {false, true})
                for (bool dynamic : {false, true})
                    for (int64_t rows : {1, 5, 13, 100})
                        if (type != vlm::FLOAT8 || !(zeros || dynamic))
                            coded_product<T>(type, scales, zeros, dynamic, rows);
    for (int64_t type : {vlm::INT8, vlm::INT6, vlm::INT4})
        for (bool zeros : {false, true})
            for (bool dynamic : {false, true})
                for (int64_t rows : {1, 5, 13, 100})
                    if (type != vlm::INT8 || !zeros)
                        coded_product<T>(type, vlm::TWO_LEVEL, zeros, dynamic, rows);
    for (int64_t scales : {vlm::FLOAT8, vlm::E8M0})
        for (bool dynamic : {false, true})
            for (int64_t rows : {1, 5, 13, 100})
                coded_product<T>(vlm::FLOAT4, scales, false, dynamic, rows);
    for (int64_t type : {vlm::TABLE4, vlm::TABLE3, vlm::TABLE2})
        for (int64_t scales : {vlm::FLOAT16, vlm::TWO_LEVEL})
            for (bool dynamic : {false, true})
                for (int64_t rows : {1, 5, 13, 100})
                    coded_product<T>(type, scales, false, dynamic, rows);
}

template <typename T>
static void products() {
    for (int64_t type : {vlm::FLOAT32, vlm::BFLOAT16, vlm::FLOAT16}) {
        for (int64_t use = vlm::PLAIN; use <= vlm::RELU2; ++use)
            for (int64_t rows : {1, 3, 5, 9, 13, 200}) product<T>(type, use, rows, 77, 131);
        for (int64_t rows : {1, 13, 200}) product<T>(type, vlm::PLAIN, rows, 33, 1029);
        for (int64_t rows : {1, 2, 12, 24}) product<T>(type, vlm::SILU, rows, 32, 1);
    }
}

// A sum of products of tiles as amx_products.h describes it, number by number.
static float in_tiles(const bf16* x, const bf16* weight, int64_t depth) {
    float total = 0.0f;
    for (int64_t block = 0; block < depth; block += vlm::TILE_DEPTH) {
        float even_odd[2] = {};
        for (int64_t k = block; k < std::min(depth, block + vlm::TILE_DEPTH); ++k)
            even_odd[k % 2] =
                std::fma(vlm::load_one(x + k), vlm::load_one(weight + k), even_odd[k % 2]);
        total += even_odd[0] + even_odd[1];
    }
    return total;
}

static void tile_products() {
    for (int64_t depth : {1, 31, 32, 300, 1029})
        for (int64_t rows : {1, 16, 17, 33, 500}) {
            const std::string name = "tiles/" + std::to_string(rows) + "x" + std::to_string(depth);
            Random random(name);
            const Product<bf16> own(random, vlm::BFLOAT16, vlm::PLAIN, rows, 33, depth);
            std::vector<bf16> wanted(rows * 33);
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t c = 0; c < 33; ++c)
                    vlm::store_one(&wanted[r * 33 + c],
                                   in_tiles(&own.x[r * own.x_stride], own.matrix.row(c), depth));
            expect(alike(own.run(0, rows, 2), wanted), 16, name, "from the definition");
        }
}

// A sum of products of pairs, pair by pair.
static float in_pairs(const bf16* x, const bf16* weight, int64_t depth) {
    vlm::Floats total = {};
    for (int64_t k = 0; k < depth; k += 2) {
        uint32_t pair;
        std::memcpy(&pair, weight + k, sizeof pair);
        total = vlm::fma_broadcast<true>((const float*)(x + k), (vlm::Floats)(pair + vlm::Words{}),
                                         total);
    }
    return total[0];
}

// Products of groups of e4m3 codes as grouped.h describes them where bfloat16 meets them in pairs.
static void float8_pair_products() {
    const auto sum_of = vlm::HAS_AMX ? in_tiles : in_pairs;
    constexpr int64_t COLUMNS = 45, DEEP = 384, GROUP = 96;
    const int64_t panels = (COLUMNS + vlm::PANEL - 1) / vlm::PANEL, groups = DEEP / GROUP;
    for (int64_t rows : {1, 7, 16, 17, 32, 33, 300}) {
        const std::string name = "pairs/float8/" + std::to_string(rows);
        Random random(name);
        std::vector<uint8_t> codes(panels * vlm::PANEL * DEEP);
        for (uint8_t& code : codes) code = random.below(256);
        const std::vector<float> scales = random.numbers(panels * groups * vlm::PANEL);
        const std::vector<bf16> x = random.numbers<bf16>(rows * DEEP, 2.0f);
        const vlm::Weight weight{.packed = codes.data(),
                                 .bias = nullptr,
                                 .columns = COLUMNS,
                                 .depth = DEEP,
                                 .type = vlm::FLOAT8,
                                 .scales = scales.data(),
                                 .zeros = nullptr,
                                 .group = GROUP,
                                 .scale_type = vlm::FLOAT32,
                                 .dynamic = 0,
                                 .factors = nullptr,
                                 .outer = nullptr,
                                 .floors = nullptr,
                                 .outer_group = 0,
                                 .table = nullptr};
        std::vector<bf16> got(rows * COLUMNS), wanted(rows * COLUMNS);
        const vlm::Projection job{.weight = weight,
                                  .rows = rows,
                                  .x_stride = DEEP,
                                  .other_stride = 0,
                                  .use = vlm::PLAIN,
                                  .threads = 2,
                                  .x = x.data(),
                                  .other = nullptr,
                                  .out = got.data()};
        must(vlm_linear(&job, 16), "vlm_linear");
        for (int64_t c = 0; c < COLUMNS; ++c) {
            std::vector<bf16> column(DEEP);
            const uint8_t* panel = &codes[c / vlm::PANEL * vlm::PANEL * DEEP];
            for (int64_t k = 0; k < DEEP; ++k) {
                const int8_t code = panel[k / 4 * 4 * vlm::PANEL + c % vlm::PANEL * 4 + k % 4];
                vlm::store_one(&column[k], vlm::from_float8(vlm::Words{} + (uint32_t)code)[0]);
            }
            const float* scale = &scales[c / vlm::PANEL * groups * vlm::PANEL + c % vlm::PANEL];
            for (int64_t r = 0; r < rows; ++r) {
                float total = 0.0f;
                for (int64_t g = 0; g < groups; ++g)
                    total = std::fma(sum_of(&x[r * DEEP + g * GROUP], &column[g * GROUP], GROUP),
                                     scale[g * vlm::PANEL], total);
                vlm::store_one(&wanted[r * COLUMNS + c], total);
            }
        }
        expect(alike(got, wanted), 16, name, "from the definition");
    }
}

static void packings() {
    for (int64_t type : {vlm::FLOAT32, vlm::BFLOAT16, vlm::FLOAT16}) {
        const std::string name = std::string("vlm_pack/") + TYPES[type];
        Random random(name);
        const Matrix matrix(random, type, 77, 131);
        report(32, name, [&](int64_t threads) { return Digest().add(matrix.packed(threads, 0)); });
        for (int64_t cut : {16, 37})
            expect(alike(matrix.packed(2, cut), matrix.packed(1, 0)), 32, name,
                   "in two parts from column " + std::to_string(cut));
    }
}

void linear_cases() {
    packings();
    products<float>();
    products<bf16>();
    if (vlm::HAS_AMX) tile_products();
    if (vlm::HAS_BF16_DOT) float8_pair_products();
    coded_products<float>();
    coded_products<bf16>();
}

}  // namespace cases
