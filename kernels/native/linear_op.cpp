// A projection of a few rows by a packed weight; see kernels/linear.py.
#include "guard.h"
#include "layout.h"
#include "linear.h"

namespace vlm {

// What follows the product: nothing, a product or a sum with `other`.
enum Use : int64_t { PLAIN = 0, TIMES = 1, PLUS = 2 };

struct Projection {
    Weight weight;
    int64_t rows, x_stride, other_stride, use, threads;
    const void *x, *other;
    void* out;  // [rows, columns], contiguous
};

template <typename T>
void finish(const Projection& job, int64_t row, int64_t column, int64_t count, float* sums) {
    const T* other = (const T*)job.other + row * job.other_stride + column;
    T* out = (T*)job.out + row * job.weight.columns + column;
    for (int64_t c = 0; c < count; ++c) {
        if (job.use == TIMES) sums[c] *= load_one(other + c);
        if (job.use == PLUS) sums[c] += load_one(other + c);
        store_one(out + c, sums[c]);
    }
}

template <typename T>
void project(const Projection& job) {
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)job.threads)
    for (int64_t block = 0; block < blocks_of(job.weight); ++block) {
        float sums[MOST_PRODUCT_ROWS * BLOCK];
        const T* x[MOST_PRODUCT_ROWS];
        for (int64_t r = 0; r < job.rows; ++r) x[r] = (const T*)job.x + r * job.x_stride;
        block_product(job.weight, block, x, job.rows, sums);
        const int64_t column = block * BLOCK;
        const int64_t rest = job.weight.columns - column, count = rest < BLOCK ? rest : BLOCK;
        for (int64_t r = 0; r < job.rows; ++r) finish<T>(job, r, column, count, sums + r * BLOCK);
    }
}

VLM_STRUCT(Weight, packed, bias, columns, depth);
VLM_STRUCT(Projection, weight, rows, x_stride, other_stride, use, threads, x, other, out);
VLM_CONSTANT(PLAIN);
VLM_CONSTANT(TIMES);
VLM_CONSTANT(PLUS);
VLM_CONSTANT(BLOCK);
VLM_CONSTANT(MOST_PRODUCT_ROWS);

}  // namespace vlm

extern "C" {

// `bits` is 32 for float32, 16 for bfloat16; at most MOST_PRODUCT_ROWS rows.
int64_t vlm_linear(const vlm::Projection* job, int64_t bits) {
    return vlm::guarded(
        [=] { bits == 32 ? vlm::project<float>(*job) : vlm::project<vlm::bf16>(*job); });
}
}
