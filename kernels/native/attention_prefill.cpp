// Attention of a prefill step; see attention_prefill.h.
#include "attention_prefill.h"

#include "guard.h"
#include "layout.h"

namespace vlm {

VLM_STRUCT(PrefillAttention, sequences, threads, heads, kv_heads, head_dim, q_stride, q_head,
           block_size, kv_block_stride, kv_token_stride, kv_head_stride, scale, offsets, starts,
           first_block, blocks, q, k, v, out);

}  // namespace vlm

// `bits` is 32 for float32 inputs, 16 for bfloat16. Arguments are checked by the caller. Returns
// what `guarded` does.
extern "C" int64_t vlm_attention_prefill(const vlm::PrefillAttention* job, int64_t bits) {
    return vlm::guarded([=] {
        bits == 32 ? vlm::attend_packed<float>(*job) : vlm::attend_packed<vlm::bf16>(*job);
    });
}
