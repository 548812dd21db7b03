"""Which kernels a GPU would compile at start, and which more while it serves: without a GPU.

Started by tests/engine/start/test_warm_up.py, in a process in which Triton does not interpret.
Steps are called on small models and their launches recorded. Triton's own function says which
compilation a launch needs: types, alignments, integers that are 1 or multiples of 16, constants.
First comes what an engine runs before it serves, then random steps. Prints, as JSON, how many
compilations each needs, and which only the second does.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from model_driver import Driver, Sequence_, text_sequence
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from vlm_serve.engine.numerics.arithmetic import Backend, Types, decide
from vlm_serve.engine.start import step_memory
from vlm_serve.engine.start.kernel_check import CheckedSteps
from vlm_serve.engine.start.warm_up import warm_up
from vlm_serve.engine.steps.step_graphs import StepGraphs
from vlm_serve.engine.steps.step_sizes import TOKENS, decode_sizes, prefill_sizes, verify_sizes
from vlm_serve.engine.steps.step_tables import Step
from vlm_serve.kernels.dispatch import triton_everywhere
from vlm_serve.kernels.kv_write import copy_kv_rows
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.paged_attention import FIXED_PART
from vlm_serve.kernels.state_copy import copy_rows
from vlm_serve.kernels.triton_support import Launch, Target, record_launches
from vlm_serve.models import Model, cache_layout, load_model, read_spec
from vlm_serve.models.adapters import LowRank, changes_of
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.models.parts import feed_forward
from vlm_serve.options.config import EngineConfig

TARGET, GPU = Target("cuda", 90), GPUTarget("cuda", 90, 32)
CONFIG = EngineConfig(
    dtype="bfloat16",
    block_size=16,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    max_model_len=4096,
    speculative="suffix",
)
DRAFTED = 4
SPECS = {
    "dense": CheckpointSpec(gdn_key_heads=4, gdn_value_heads=8),
    "moe": CheckpointSpec(gdn_key_heads=4, gdn_value_heads=8, num_experts=8, vision_depth=0),
    "attention alone": CheckpointSpec(family="qwen3_vl"),
    "attention alone, moe": CheckpointSpec(family="qwen3_vl", num_experts=8),
    "next": CheckpointSpec(
        family="qwen3_next", vision_depth=0, num_experts=8, gdn_key_heads=4, gdn_value_heads=8
    ),
    "minicpm": CheckpointSpec(
        family="minicpmv4_6", vision_depth=3, window_layer=1, gdn_key_heads=4, gdn_value_heads=8
    ),
}
"""Models whose rows are whole multiples of 16 bytes, as those of all published ones: where a slice
of a step begins then changes no alignment."""
Key = tuple[str, tuple[tuple[str, str], ...]]


class Recorder:
    """A `GraphDevice` whose steps are called once, to be recorded."""

    def warm_up(self, step: Step) -> None:
        step()

    def capture(self, step: Step) -> Step:
        step()
        return step

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Step:
        target.copy_(source)
        return lambda: None


@cache
def binder(kernel: Any) -> Callable[..., tuple[Any, Any, Any]]:
    """Return the function that Triton's launcher binds a kernel's arguments with."""
    found: Callable[..., tuple[Any, Any, Any]] = create_function_from_signature(
        kernel.signature, kernel.params, make_backend(GPU)
    )
    return found


def key(launch: Launch) -> Key:
    """Return what distinguishes the compilation that a launch needs from others: the kernel, and
    each argument's type and form."""
    _, special, options = binder(launch.kernel)(**launch.arguments, **launch.options)
    names = (each.name for each in launch.kernel.params)
    forms = {**dict(zip(names, special, strict=True)), **options}
    return launch.kernel.__name__, tuple((name, str(form)) for name, form in forms.items())


def keys(run: Callable[[], object]) -> set[Key]:
    """Return the compilations that a run needs."""
    with triton_everywhere(), record_launches(TARGET) as launches, torch.inference_mode():
        run()
    return {key(each) for each in launches}


def describe(missing: Key, known: set[Key]) -> str:
    """Say how a compilation differs from the most similar one of the same kernel."""
    name, forms = missing
    others = [set(forms) - set(other) for kernel, other in known if kernel == name]
    if not others:
        return f"{name}: not compiled at all"
    fewest = min(map(len, others))
    return f"{name}: {next(sorted(own) for own in others if len(own) == fewest)}"


def start(
    model: Model,
    types: Types,
    checkpoint: Path,
    config: EngineConfig,
    given: argparse.Namespace,
) -> None:
    """Run what an engine runs before it serves, in its order."""
    checked = CheckedSteps(model, types, config)
    checked.serve()
    if config.speculative != "off":
        checked.verify()
    spans = step_memory.largest_span(checkpoint, model.spec, config.max_num_batched_tokens)
    with patch.object(step_memory, "_peak", lambda device, run: (run(), 0)[1]):
        step_memory.measure_step_memory(
            model,
            types,
            config,
            span_tokens=spans,
            logit_rows=config.max_num_seqs + step_memory.reported_tokens(config, model.spec),
            with_graphs=given.graphs,
        )
    if not given.cold:
        warm_up(model, types, config)
    if not given.graphs:
        return
    caches = driver_of(model, types, config).caches
    assert config.block_size is not None and config.max_model_len is not None
    limits: dict[str, Any] = {
        "block_size": config.block_size,
        "max_model_len": config.max_model_len,
        "device": Recorder(),
    }
    most = config.max_num_seqs
    kinds = [prefill_sizes(most, TOKENS[-1]), decode_sizes(most)]
    if config.speculative != "off":
        kinds.append(verify_sizes(most, DRAFTED - 1))
    for sizes in kinds:
        StepGraphs(model, caches, sizes, **limits)


def driver_of(model: Model, types: Types, config: EngineConfig) -> Driver:
    """Return a driver over pools as an engine has them."""
    driver = Driver(
        model,
        num_blocks=400,
        num_rows=40,
        scratch_rows=1,
        most_drafts=DRAFTED,
        deterministic=config.deterministic,
    )
    driver.caches = driver.caches.layout.allocate(
        400,
        41,
        driver.block_size,
        types.pools,
        num_updates=40 * DRAFTED if config.speculative != "off" else 0,
    )
    return driver


def serve(model: Model, types: Types, config: EngineConfig, steps: int) -> None:
    """Run random steps by ops, as an engine does where no graph fits; with adapters, if the options
    name any."""
    rng = random.Random(0)
    known = []
    if config.lora_modules:
        experts = config.lora_experts != "none"
        known = [adapter(model, rng, rank, experts=experts) for rank in (3, 16, 40)]
    while steps > 0:
        driver = driver_of(model, types, config)
        if known:
            driver.forward = partial(changed, model, rng, known)
        running = [long_sequence(driver, config.max_num_batched_tokens)]
        while steps > 0 and len(driver._free_blocks) > 60 and len(driver._free_rows) > 6:
            steps -= 1
            one_step(driver, rng, running)
            if model.spec.vision is not None:
                encode(model, rng, known)


def adapter(model: Model, rng: random.Random, rank: int, *, experts: bool) -> AdapterChanges:
    """Return an adapter of some modules."""
    sizes = model.modules.sizes | (model.modules.experts if experts else {})
    named = {
        name: LowRank(torch.zeros(rank, depth), torch.zeros(out, rank).bfloat16(), 1.0)
        for name, (out, depth) in sizes.items()
        if rng.random() < 0.8
    }
    return changes_of(named, model.modules)


def changed(
    model: Model,
    rng: random.Random,
    known: Sequence[AdapterChanges],
    batch: ForwardBatch,
    caches: CacheTensors,
) -> ForwardOutput:
    """Run a step some of whose rows have adapters."""
    chosen = rng.sample([0, 1, 2, -1], rng.randint(1, 3))
    rows = [rng.choice(chosen) for _ in batch.token_ids]
    return model.forward(replace(batch, changes=RowChanges(known, rows)), caches)


def encode(model: Model, rng: random.Random, known: Sequence[AdapterChanges]) -> None:
    """Run the tower over a picture of random size, with an adapter if there is one."""
    vision = model.spec.vision
    assert vision is not None
    merge = vision.merge_size
    grid = 1, merge * rng.randint(1, 9), merge * rng.randint(1, 9)
    changes = rng.choice([None, *known])
    pixels = torch.zeros(grid[1] * grid[2], vision.patch_dim)
    model.encode_media(pixels, [grid], [merge], changes=changes)


def long_sequence(driver: Driver, step_tokens: int) -> Sequence_:
    """Compute a prompt whose keys attention takes in more than one part."""
    one = text_sequence([index % 400 for index in range(FIXED_PART + 40)])
    for first in range(0, len(one.tokens), step_tokens):
        driver.step(prefills=[(one, first, min(first + step_tokens, len(one.tokens)))])
    return one


def one_step(driver: Driver, rng: random.Random, running: list[Sequence_]) -> None:
    """Run one step: some sequences decode, some have drafts, some are prompts or parts of them."""
    chosen = rng.sample(running, rng.randint(0, min(len(running), 8)))
    may_draft = driver.caches.num_updates > 0
    drafted = [one for one in chosen if may_draft and rng.random() < 0.3]
    decodes = [one for one in chosen if one not in drafted]
    for one in decodes:
        one.tokens.append(rng.randrange(400))
    drafts = []
    for one in drafted:
        drafts.append((one, len(one.tokens), 0))
        one.tokens += rng.choices(range(400), k=rng.randint(1, DRAFTED))
    prompts = []
    for _ in range(rng.choice([0, 1, 1, 2, 3]) if chosen else 1):
        length = rng.choice([1, 2, 15, 16, 17, 64, rng.randint(1, 300)])
        prompts.append(text_sequence(rng.choices(range(400), k=length)))
    prefills, second = [], []
    for one in prompts:
        cut = rng.randint(1, len(one.tokens))
        prefills.append((one, 0, cut))
        if cut < len(one.tokens):
            second.append((one, cut, len(one.tokens)))
    options: dict[str, Any] = {
        "all_logits": rng.random() < 0.3,
        "capture_experts": rng.random() < 0.2,
    }
    driver.step(decodes, prefills, drafts=drafts, **options)
    if second:
        driver.step(prefills=second, **options)
    running += prompts
    if driver.caches.num_rows:
        rows = rng.sample(range(driver.caches.num_rows), 4)
        copy_rows(driver.caches.of_unit("row"), rows[:2], rows[2:])
        if drafted:
            driver.fold(drafted[0], 1)
    count = rng.randint(1, driver.block_size)
    scales = driver.caches.tensors.get("kv_scales")
    copy_kv_rows(driver.caches["kv"], scales, [(0, 1, count), (2, 3, 1)])


def as_on_a_gpu(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, swapped: int | None
) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def compilations(config: EngineConfig, given: argparse.Namespace) -> dict[str, Any]:
    """Compare the compilations of an engine's start with those of random steps behind it."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(folder, SPECS[given.name])
        types = decide(
            config, read_spec(checkpoint).dtype, Backend(torch.device("cpu")), None
        ).types
        bits = int(config.quantization[3:]) if config.quantization else None
        model = load_model(checkpoint, torch.bfloat16, "cpu", bits=bits)
        before = keys(lambda: start(model, types, checkpoint, config, given))
        served = keys(lambda: serve(model, types, config, given.steps))
    return {
        "start": len(before),
        "served": len(served),
        "missing": sorted({describe(each, before) for each in served - before}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SPECS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine, as JSON")
    parser.add_argument("--graphs", action="store_true", help="capture graphs at start")
    parser.add_argument("--cold", action="store_true", help="leave the warm-up out")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with (
        patch.object(feed_forward, "stacked_experts", lambda device: True),
        patch.object(cache_layout, "_room", as_on_a_gpu),
    ):
        config = replace(CONFIG, **given.options)
        print(json.dumps(compilations(config, given)))


if __name__ == "__main__":
    main()
