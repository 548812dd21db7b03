"""Most rows of an engine's captured steps, and the memory of their results."""

from __future__ import annotations

from dataclasses import dataclass

from vlm_serve.engine.decode_graphs import padded_sizes
from vlm_serve.engine.prefill_graphs import SEQUENCES, decode_sizes, token_sizes
from vlm_serve.engine.verify_graphs import verify_sizes
from vlm_serve.options.config import EngineConfig


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """Sizes of the largest captured steps.

    Attributes:
        sequences: sequences of a decode step.
        prompt: prompt tokens of a step with a prefill.
        prompt_logits: rows of logits of such a step.
        drafts: sequences with drafts; 0 without drafts.
        draft_rows: tokens of a step with drafts.
        draft_tables: block tables of such a step: of sequences with drafts and of others.
        passes: sequences of a pass of the MTP layer.
    """

    sequences: int
    prompt: int
    prompt_logits: int
    drafts: int = 0
    draft_rows: int = 0
    draft_tables: int = 0
    passes: int = 0

    @classmethod
    def of(cls, config: EngineConfig) -> CapturedRows:
        """Return the sizes for the options of an engine."""
        # On a GPU "auto" is "off".
        most, off = config.max_num_seqs, config.speculative in ("auto", "off")
        sizes = () if off else verify_sizes(most, config.speculative_tokens)
        return cls(
            sequences=padded_sizes(most)[-1],
            prompt=token_sizes(config.max_num_batched_tokens)[-1],
            prompt_logits=decode_sizes(most)[-1] + min(SEQUENCES, most),
            drafts=max((each.sequences for each in sizes), default=0),
            draft_rows=max((each.rows for each in sizes), default=0),
            draft_tables=max((each.decodes + each.sequences for each in sizes), default=0),
            passes=most if "mtp" in config.speculative else 0,
        )

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest step, padding included."""
        return max(self.prompt + self.prompt_logits, self.draft_rows, self.sequences)

    @property
    def most_logits(self) -> int:
        """Most rows of logits of a step."""
        return max(self.sequences, self.prompt_logits, self.draft_rows)

    def table_bytes(self, max_blocks: int, sets: int = 1) -> int:
        """Return the bytes of block tables: all sizes of a kind of steps share the largest's.

        Args:
            max_blocks: KV blocks of the longest sequence.
            sets: of graphs of decode steps and drafts; each has its own.
        """
        prompts = self.prompt_logits + 1  # There is an empty sequence behind the prompts.
        rows = sets * (self.sequences + self.draft_tables) + prompts + self.passes
        return 4 * rows * max_blocks

    def result_bytes(self, vocab_size: int, hidden_bytes: int) -> int:
        """Return the bytes of all results. Kinds of steps share theirs; passes of the MTP layer
        read a step's and have their own.

        Args:
            vocab_size: columns of logits.
            hidden_bytes: bytes of a token's hidden state.
        """
        logits = self.most_logits + self.passes
        hidden = self.most_tokens + self.passes + self.draft_rows if self.passes else 0
        return 4 * vocab_size * logits + hidden_bytes * hidden
