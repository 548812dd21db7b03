"""Sizes of captured steps: which there are, what the largest ones hold, and the memory of results.

A step is padded to the next size. Larger steps keep a GPU busy without graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlm_serve.engine.core.slicing import max_drafts
from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.options.config import EngineConfig

DENSE = 256
"""Up to here a batch of decode tokens is padded to a multiple of 8. Above, to one of four sizes an
octave: a fifth of a step is padding at most, and a graph takes seconds and memory."""
LARGEST = 256
"""Decoding sequences beside prompts, at most. Larger such batches keep a GPU busy without graphs,
and each row keeps its logits."""
LARGEST_ROWS = 256
"""Drafted tokens of the largest captured step, padding included; for the same reasons."""
FEW_DECODES = 8
"""Sequences without drafts beside others, in the smaller of two sizes."""
TOKENS = (64, 128, 256, 512, 768, 1024, 1536, 2048)
"""Prompt tokens of the captured steps."""
PROMPTS = 4
"""Maximum number of prefill slices in a step."""
DECODES = 32
"""Decoding sequences of most steps with prompts. Steps with more of them have graphs of their own,
since each takes the time of all that it has room for."""


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Limits of the sequences in every step.

    Attributes:
        block_size: tokens per KV block.
        max_blocks: blocks of the longest sequence.
        scratch_row: state row that padding writes to; any number without state layers.
    """

    block_size: int
    max_blocks: int
    scratch_row: int

    @property
    def longest(self) -> int:
        """Keys of the longest sequence."""
        return self.max_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class StepSize:
    """Room of a captured step, which may have drafts or prompts, beside sequences that decode.

    Attributes:
        decodes: sequences of one token.
        drafted: sequences with drafts.
        room: tokens of each of these, its sampled one included.
        prompts: prefill slices.
        tokens: prompt tokens of all slices together.
    """

    decodes: int = 0
    drafted: int = 0
    room: int = 0
    prompts: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        parts = {
            f"{self.decodes} decode tokens": self.decodes,
            f"{self.drafted} times {self.room} tokens": self.drafted,
            f"{self.tokens} prompt tokens": self.tokens,
        }
        return " and ".join(text for text, count in parts.items() if count)

    @property
    def rows(self) -> int:
        """Tokens, padding included."""
        return self.decodes + self.drafted * self.room + self.tokens

    @property
    def logits(self) -> int:
        """Maximum number of tokens whose logits a step needs."""
        return self.decodes + self.prompts if self.prompts else self.rows

    @property
    def chunks(self) -> int:
        """Maximum number of chunks of prefills: whole ones, and three per slice, whose
        chunks also end at blocks and snapshots."""
        return self.tokens // MAX_CHUNK + 3 * self.prompts

    @property
    def tails(self) -> int:
        """Maximum number of stored states, including those at the ends of slices."""
        return 3 * self.prompts


def decode_sizes(most: int) -> tuple[StepSize, ...]:
    """Return the sizes of decode steps of up to `most` sequences, ascending."""
    sizes, size = [1, 2, 4, *range(8, DENSE, 8)], DENSE
    while size < most:
        sizes += range(size, 2 * size, size // 4)
        size *= 2
    return tuple(map(StepSize, (*(size for size in sizes if size < most), most)))


def verify_sizes(max_num_seqs: int, drafts: int) -> tuple[StepSize, ...]:
    """Return the sizes of steps with drafts, ascending by their rows.

    Args:
        max_num_seqs: maximum number of sequences in a step.
        drafts: maximum number per sequence, unless few run; see `max_drafts`.
    """
    few = max(1, max_num_seqs // 4)
    sizes = set[StepSize]()
    for room, most in (
        (drafts + 1, max_num_seqs),
        (max_drafts(drafts, 1, max_num_seqs) + 1, few),
    ):
        decode_counts = {0, min(FEW_DECODES, most - 1), most - 1}
        sizes |= {
            StepSize(decodes, count, room)
            for count in _powers_up_to(most)
            for decodes in decode_counts
            if count == 1 or count * room <= LARGEST_ROWS
        }
    return tuple(sorted(sizes, key=lambda size: (size.rows, size.decodes, size.room)))


def prefill_sizes(max_num_seqs: int, most_tokens: int) -> tuple[StepSize, ...]:
    """Return the sizes of steps with up to `most_tokens` prompt tokens, ascending."""
    return tuple(
        StepSize(decodes, prompts=min(PROMPTS, max_num_seqs), tokens=tokens)
        for tokens, less in zip(TOKENS, (0, *TOKENS), strict=False)
        if less < most_tokens
        for decodes in sorted({min(DECODES, max_num_seqs), min(LARGEST, max_num_seqs)})
    )


def pass_sizes(max_num_seqs: int, drafts: int) -> tuple[StepSize, ...]:
    """Return the sizes of passes of the multi-token-prediction layer, ascending by their rows.

    A pass reads one token behind a draft, two behind a decode token, and two more than were drafted
    behind drafts: the verified tokens, and those that were sampled before and behind them.
    """
    sizes = {
        StepSize(0, count, room)
        for count in _powers_up_to(max_num_seqs)
        for room in (1, 2, drafts + 2)
        if count * room <= LARGEST_ROWS or room == 1
    }
    return tuple(sorted(sizes, key=lambda size: (size.rows, size.drafted, size.room)))


def _powers_up_to(most: int) -> tuple[int, ...]:
    """Return the powers of two below `most`, and `most`."""
    return (*(2**power for power in range(most.bit_length()) if 2**power < most), most)


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """Sizes of an engine's largest captured steps.

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
        prefill = prefill_sizes(most, config.max_num_batched_tokens)[-1]
        return cls(
            sequences=decode_sizes(most)[-1].decodes,
            prompt=prefill.tokens,
            prompt_logits=prefill.logits,
            drafts=max((size.drafted for size in sizes), default=0),
            draft_rows=max((size.rows for size in sizes), default=0),
            draft_tables=max((size.decodes + size.drafted for size in sizes), default=0),
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
        return 2 * 4 * rows * max_blocks  # as they are sent, and as they are read

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
