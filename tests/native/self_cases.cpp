// vlm_self_test.
#include "calls.h"
#include "cases.h"

namespace cases {

void self_cases() {
    uint64_t digests[4];
    must(vlm_self_test(digests), "vlm_self_test");
    report(32, "vlm_self_test",
           [&](int64_t) { return Digest().add(std::vector<int64_t>{(int64_t)digests[0]}); });
}

}  // namespace cases
