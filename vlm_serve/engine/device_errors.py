"""What an error inside a step says about the device: it goes on, or nothing on it ever will."""

from __future__ import annotations

import traceback

import torch


def after_failure(error: BaseException, device: torch.device) -> str | None:
    """Make a GPU ready for the next step behind a failed one.

    CUDA keeps some errors for good (an illegal address, a failed assertion, a card that fell off
    the bus): every later call of the process reports them again. Which ones is no list: the device
    is asked. Memory that ran out is given back, since torch keeps freed blocks in sizes that a
    smaller step may not fit into.

    Args:
        error: what the step raised; the frames of its traceback are cleared.
        device: of the model.

    Returns:
        A sentence if no step can follow, else None.
    """
    if device.type != "cuda":
        return None
    # The tensors of the failed step live as long as its frames.
    traceback.clear_frames(error.__traceback__)
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    except Exception as problem:
        return f"{device} can compute nothing more: {_first_line(problem)}"
    return None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
