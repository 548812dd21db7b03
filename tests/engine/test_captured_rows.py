"""What captured steps compute at most, and what their results take."""

from __future__ import annotations

from vlm_serve.config import EngineConfig
from vlm_serve.engine.captured_rows import CapturedRows


def test_sizes_follow_the_options() -> None:
    plain = CapturedRows.of(EngineConfig(max_num_seqs=40, max_num_batched_tokens=600))
    assert plain == CapturedRows(sequences=40, prompt=768, prompt_logits=44)
    assert plain.most_logits == 44
    options = EngineConfig(max_num_seqs=8, speculative="mtp", speculative_tokens=3)
    drafting = CapturedRows.of(options)
    # Places of four tokens, beside seven sequences that decode.
    assert (drafting.drafts, drafting.draft_rows, drafting.passes) == (8, 39, 8)
    assert drafting.most_logits == 39


def test_kinds_of_steps_share_their_results() -> None:
    plain = CapturedRows(sequences=2, prompt=64, prompt_logits=3)
    assert plain.result_bytes(100, 8) == 4 * 100 * 3
    drafting = CapturedRows(2, 64, 3, drafts=2, draft_rows=8, passes=2)
    # Passes have logits and hidden states of their own, and the states that they begin with.
    assert drafting.result_bytes(100, 8) == 4 * 100 * (8 + 2) + 8 * (67 + 2 + 8)


def test_decode_steps_reach_as_far_as_sequences_may_run() -> None:
    many = CapturedRows.of(EngineConfig(max_num_seqs=3000, max_num_batched_tokens=4096))
    assert many.sequences == many.most_logits == many.most_tokens == 3000
    # Beside prompts there are 256 at most.
    assert many.prompt_logits == 260
    assert many.table_bytes(32) * 2 == many.table_bytes(32, sets=2) == 4 * 2 * 32 * 3000
