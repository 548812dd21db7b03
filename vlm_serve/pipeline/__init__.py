"""The Python interface: one object answers messages, token ids or (text, media) pairs."""

from vlm_serve.pipeline.output import Choice as Choice
from vlm_serve.pipeline.output import Output as Output
from vlm_serve.pipeline.pipeline import Answer as Answer
from vlm_serve.pipeline.pipeline import Pipeline as Pipeline
