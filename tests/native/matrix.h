// A seeded weight, packed by `vlm_pack`.
#pragma once

#include "cases.h"
#include "products/product.h"

namespace cases {

class Matrix {
  public:
    Matrix(Random& random, int64_t type, int64_t columns, int64_t depth, bool biased = false);

    vlm::Weight weight() const;

    // Of bfloat16, as it was before it was packed.
    const bf16* row(int64_t column) const { return (const bf16*)&plain_[column * stride_]; }

    // The packed values, packed again by so many threads, the columns from `cut` on on their own.
    std::vector<int64_t> packed(int64_t threads, int64_t cut) const;

  private:
    int64_t type_, columns_, depth_, stride_;
    std::vector<uint16_t> plain_;  // [columns, stride], float32 in two of them
    std::vector<int64_t> packed_;
    std::vector<float> bias_;
};

}  // namespace cases
