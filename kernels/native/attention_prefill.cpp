// Attention of a prefill step; see attention_prefill.h.
#include "attention_prefill.h"

#include "guard.h"

// `bits` is 32 for float32 inputs, 16 for bfloat16. Arguments are checked by the caller. Returns
// what `guarded` does.
extern "C" int64_t vlm_attention_prefill(const vlm::PrefillAttention* job, int64_t bits) {
    return vlm::guarded([=] {
        bits == 32 ? vlm::attend_packed<float>(*job) : vlm::attend_packed<vlm::bf16>(*job);
    });
}
