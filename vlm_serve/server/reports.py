"""Usage and cache report in the form in which responses carry them."""

from __future__ import annotations

import dataclasses

from vlm_serve.engine.outputs import CacheReport, Usage
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.server.responses import CacheReportBody, PromptTokensDetails, UsageBody


def usage_body(usage: Usage, *prompts: Prompt) -> UsageBody:
    """Token counts; placeholder tokens of the prompts' media are counted by modality."""
    spans = [span for prompt in prompts for span in prompt.spans]
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=usage.cached_tokens,
            image_tokens=sum(span.end - span.start for span in spans if span.modality == "image"),
            video_tokens=sum(span.end - span.start for span in spans if span.modality == "video"),
        ),
    )


def add_usage(parts: list[Usage]) -> Usage:
    """The usage of several prompts that one request carried."""
    return Usage(
        sum(part.prompt_tokens for part in parts),
        sum(part.completion_tokens for part in parts),
        sum(part.cached_tokens for part in parts),
    )


def cache_report_body(report: CacheReport | None) -> CacheReportBody | None:
    return None if report is None else CacheReportBody(**dataclasses.asdict(report))
