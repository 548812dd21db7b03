"""Usage and cache reports, in the format of the response bodies."""

from __future__ import annotations

import base64
import dataclasses
import io
from typing import Any

import numpy as np

from vlm_serve.engine.outputs import CacheReport, Delta, Usage
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.server.api.bodies import (
    CacheReportBody,
    CompletionTokensDetails,
    PromptTokensDetails,
    UsageBody,
)


def usage_body(usage: Usage, *prompts: Prompt) -> UsageBody:
    """Return token counts; placeholder tokens of media are counted by modality."""
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
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=usage.accepted_prediction_tokens,
            rejected_prediction_tokens=usage.rejected_prediction_tokens,
        ),
    )


def add_usage(parts: list[Usage]) -> Usage:
    """Return the total usage of a request's prompts."""
    return Usage(*map(sum, zip(*map(dataclasses.astuple, parts), strict=True)))


def routed_experts_fields(delta: Delta) -> dict[str, Any]:
    """Return the routed experts' fields for the end of a choice; empty if not requested.

    The rows are the base64 text of an `.npy` file; a second field lists their gaps, if any.
    """
    if delta.routed_experts is None:
        return {}
    file = io.BytesIO()
    np.save(file, delta.routed_experts, allow_pickle=False)
    fields: dict[str, Any] = {"routed_experts": base64.b64encode(file.getvalue()).decode()}
    if delta.routed_experts_gaps:
        fields["routed_experts_gaps"] = list(delta.routed_experts_gaps)
    return fields


def cache_report_fields(report: CacheReport) -> dict[str, Any]:
    fields = dataclasses.asdict(report)
    if not report.resumed:
        del fields["resumed"]
    return fields


def cache_report_body(report: CacheReport | None) -> CacheReportBody | None:
    return None if report is None else CacheReportBody(**cache_report_fields(report))
