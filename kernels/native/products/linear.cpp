// The linear op and the packing of its weight; see product.h.
#include "calls.h"
#include "functions.h"
#include "products/product.h"
#include "transpose.h"

namespace vlm {

template <int64_t FUSED>
inline Vec fuse(const Vec& sum, const Vec& other) {
    if constexpr (FUSED == TIMES) return sum * other;
    if constexpr (FUSED == PLUS) return sum + other;
    if constexpr (FUSED == SILU) return silu(sum);
    if constexpr (FUSED == GELU) return gelu(sum);
    if constexpr (FUSED == GELU_TANH) return gelu_tanh(sum);
    if constexpr (FUSED == RELU2) return relu2(sum);
    return sum;
}

template <typename T, int64_t FUSED>
void project_as(const Projection& job) {
    constexpr bool JOINS = FUSED == TIMES || FUSED == PLUS;
    auto at = [&](int64_t r) { return (const T*)job.x + r * job.x_stride; };
    auto use = [&](int64_t row, int64_t column, auto count, const float* results) {
        T* out = (T*)job.out + row * job.weight.columns + column;
        const T* other = JOINS ? (const T*)job.other + row * job.other_stride + column : out;
        prefetch_output(out);
        int64_t c = 0;
        for (; c + LANES <= count; c += LANES) {
            const Vec sum = load(results + c);
            store(out + c, fuse<FUSED>(sum, JOINS ? load(other + c) : sum));
        }
        if (c == count) return;
        const Vec sum = load(results + c),
                  reduce = JOINS ? load_partial(other + c, count - c) : sum;
        store_partial(out + c, fuse<FUSED>(sum, reduce), count - c);
    };
    on_all_threads(
        job.threads, [&] { thread_workspace().reserve(job.weight.depth); },
        [&](LoopScheduler& scheduler) { project<T>(job.weight, job.rows, scheduler, at, use); });
}

template <typename T>
void project_all(const Projection& job) {
    void (*const all[])(const Projection&) = {
        project_as<T, PLAIN>, project_as<T, TIMES>,     project_as<T, PLUS>, project_as<T, SILU>,
        project_as<T, GELU>,  project_as<T, GELU_TANH>, project_as<T, RELU2>};
    all[job.use](job);
}

// Returns the address of a column's first value in its panel.
inline char* column_of(const Packing& job, int64_t column) {
    const int64_t size = job.type == FLOAT16 ? 2 : 4;
    return (char*)job.packed + column / PANEL * panel_bytes(job.depth, job.type) +
           column % PANEL * size;
}

// Packs one column, value by value, starting at `k`.
inline void pack_column(const Packing& job, int64_t row, int64_t k) {
    char* to = column_of(job, job.first + row);
    const int64_t size = bytes_of(job.type);
    const char* from = (const char*)job.source + row * job.stride * size;
    for (; k < job.depth; ++k) {
        const int64_t at = job.type == BFLOAT16 ? k / 2 * PANEL * 4 + k % 2 * 2 : k * PANEL * size;
        std::memcpy(to + at, from + k * size, size);
    }
}

// Packs WIDTH columns by transposing squares of words: float32 values, or pairs of 16-bit values,
// which float16 stores apart.
inline void pack_columns(const Packing& job, int64_t row) {
    char* to = column_of(job, job.first + row);
    const int64_t size = bytes_of(job.type), words = job.depth * size / 4;
    const char* from = (const char*)job.source + row * job.stride * size;
    for (int64_t w = 0; w < words; w += WIDTH) {
        const int64_t wide = std::min<int64_t>(WIDTH, words - w);
        Words square[WIDTH] = {};
        for (int64_t i = 0; i < WIDTH; ++i)
            std::memcpy(&square[i], from + i * job.stride * size + 4 * w, 4 * wide);
        transpose(square);
        for (int64_t i = 0; i < wide; ++i) {
            char* place = to + (w + i) * PANEL * 4;
            if (job.type != FLOAT16) {
                std::memcpy(place, &square[i], sizeof square[i]);
                continue;
            }
            to_halves(place, square[i]);
            to_halves(place + PANEL * 2, square[i] >> 16);
        }
    }
    for (int64_t i = 0; i < WIDTH; ++i) pack_column(job, row + i, words * 4 / size);
}

void pack(const Packing& job) {
    // A thread takes whole panels, so that no two threads write to the same word.
    const int64_t shift = job.first % PANEL, last = shift + job.rows;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)job.threads)
    for (int64_t panel = 0; panel < (last + PANEL - 1) / PANEL; ++panel) {
        int64_t row = std::max<int64_t>(0, panel * PANEL - shift);
        const int64_t end = std::min(job.rows, (panel + 1) * PANEL - shift);
        while (row < end) {
            if (row + WIDTH > end || (job.first + row) % WIDTH) {
                pack_column(job, row++, 0);
                continue;
            }
            pack_columns(job, row);
            row += WIDTH;
        }
    }
}

}  // namespace vlm

extern "C" {

int64_t vlm_linear(const vlm::Projection* job, int64_t bits) {
    return vlm::guarded(
        [=] { bits == 32 ? vlm::project_all<float>(*job) : vlm::project_all<vlm::bf16>(*job); });
}

int64_t vlm_pack(const vlm::Packing* job) {
    return vlm::guarded([=] { vlm::pack(*job); });
}
}
