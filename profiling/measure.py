"""One pass of a model over a document: prompt, held-out tokens, generated tokens; each call timed.

tokens    [ document ............ | held out, teacher forced | generated, greedy ]
calls       one                     one a token                one a token
gives       prefill_s               perplexity, trace          step_ms
"""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from clusterkv_ops.profiling.compile_clock import CompileClock

# Of the held-out steps: the first ones compile, then a few run under the profiler.
FIRST_PROFILED_STEP, NUM_PROFILED_STEPS = 4, 8

Progress = Callable[[str, int, int], None]


@dataclass
class RunResult:
    """What one pass took and gave.

    Attributes:
        prefill_s: the call over the document, compilation excluded.
        compile_s: compilation in all calls.
        step_ms: the calls of the generated tokens, those that compiled excluded.
        profiled_ms: the calls that ran under the profiler, if any did.
        num_compiled_steps: calls of generated tokens that were excluded.
        perplexity: of the held-out tokens.
        tokens: the generated ones.
        kv_bytes_per_token: keys and values read a generated token, over all layers.
        cache: the model's cache at the end.
        profiles: finished profilers, of the prompt and of a few held-out steps.
    """

    prefill_s: float = 0.0
    compile_s: float = 0.0
    step_ms: list[float] = field(default_factory=list)
    profiled_ms: list[float] = field(default_factory=list)
    num_compiled_steps: int = 0
    perplexity: float = math.nan
    tokens: list[int] = field(default_factory=list)
    kv_bytes_per_token: float = 0.0
    cache: Any = None
    profiles: list[profile] = field(default_factory=list)

    @property
    def ms_per_token(self) -> float:
        return median(self.step_ms)


class _Pass:
    """A model, the cache of its one sequence, and the clock."""

    def __init__(self, model: Any, clock: CompileClock) -> None:
        from transformers import DynamicCache

        self.model = model
        self.clock = clock
        self.cache: Any = DynamicCache(config=model.config)
        # transformers renames the argument: `past_key_values` is deprecated since 5.24.
        takes = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in takes else "past_key_values"
        self.device = next(model.parameters()).device

    def feed(self, tokens: list[int]) -> tuple[Tensor, float, float]:
        """Next-token logits `[vocab]`, seconds without compilation, seconds of compilation."""
        compiled, start = self.clock.seconds, time.perf_counter()
        output = self.model(
            input_ids=torch.tensor([tokens], device=self.device),
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_argument: self.cache},
        )
        logits = output.logits[0, -1].float().cpu()  # waits for the device
        compile_s = self.clock.seconds - compiled
        return logits, time.perf_counter() - start - compile_s, compile_s

    def expect_growth(self) -> None:
        """Tell Dynamo that the cache will grow, which saves compiling for its first length."""
        for layer in self.cache.layers:
            torch._dynamo.maybe_mark_dynamic(layer.keys, 2)
            torch._dynamo.maybe_mark_dynamic(layer.values, 2)


@torch.no_grad()
def run_model(
    model: Any,
    tokens: list[int],
    *,
    num_context: int,
    num_new: int,
    is_profiled: bool = False,
    count_kv_bytes: Callable[[], int] | None = None,
    on_progress: Progress = lambda stage, done, total: None,
) -> RunResult:
    """Read `num_context` tokens, predict the rest of `tokens` one by one, generate `num_new`.

    Args:
        model: a causal language model, compiled in place or not.
        tokens: of the document, held-out ones included.
        num_context: tokens that the first call reads.
        num_new: tokens to generate greedily behind `tokens`.
        is_profiled: run the prompt and a few held-out steps under the profiler.
        count_kv_bytes: the bytes of keys and values that were read so far. Without it every step
            counts as reading the whole cache once.
        on_progress: called as ``on_progress(stage, done, total)`` before and after each call.
    """
    result = RunResult()
    with CompileClock() as clock:
        one = _Pass(model, clock)
        result.cache = one.cache
        logits = _read_prompt(one, tokens[:num_context], result, is_profiled, on_progress)
        one.expect_growth()
        logits = _predict(one, tokens[num_context:], logits, result, is_profiled, on_progress)
        _generate(one, num_new, logits, result, count_kv_bytes, on_progress)
        result.compile_s = clock.seconds
    return result


def _read_prompt(
    one: _Pass, tokens: list[int], result: RunResult, is_profiled: bool, on_progress: Progress
) -> Tensor:
    on_progress("prefill", 0, 1)
    if is_profiled:
        # The trace begins when the graph is compiled, so that it shows the graph's run alone.
        one.clock.on_compiled = lambda: None if result.profiles else _start_profiler(one, result)
    logits, result.prefill_s, _ = one.feed(tokens)
    one.clock.on_compiled = lambda: None
    for profiler in result.profiles:
        profiler.stop()
    on_progress("prefill", 1, 1)
    return logits


def _predict(
    one: _Pass,
    tokens: list[int],
    logits: Tensor,
    result: RunResult,
    is_profiled: bool,
    on_progress: Progress,
) -> Tensor:
    """Feed the document's own next tokens; their perplexity is measured on the way."""
    loss, num_tokens = 0.0, len(tokens)
    profiled = range(FIRST_PROFILED_STEP, FIRST_PROFILED_STEP + NUM_PROFILED_STEPS)
    profiled = profiled[: max(0, num_tokens - FIRST_PROFILED_STEP)] if is_profiled else range(0)
    for step in range(num_tokens):
        on_progress("held-out tokens", step, num_tokens)
        loss -= float(logits.log_softmax(-1)[tokens[step]])
        if profiled and step == profiled[0]:
            _start_profiler(one, result)
        logits, seconds, _ = one.feed([tokens[step]])
        if step in profiled:
            result.profiled_ms.append(1e3 * seconds)
            if step == profiled[-1]:
                result.profiles[-1].stop()
    on_progress("held-out tokens", num_tokens, num_tokens)
    if num_tokens:
        result.perplexity = math.exp(loss / num_tokens)
    return logits


def _generate(
    one: _Pass,
    num_new: int,
    logits: Tensor,
    result: RunResult,
    count_kv_bytes: Callable[[], int] | None,
    on_progress: Progress,
) -> None:
    counted = count_kv_bytes() if count_kv_bytes else 0
    for step in range(num_new):
        on_progress("generated tokens", step, num_new)
        token = int(logits.argmax())
        result.tokens.append(token)
        logits, seconds, compile_s = one.feed([token])
        if compile_s:
            result.num_compiled_steps += 1
        else:
            result.step_ms.append(1e3 * seconds)
        if count_kv_bytes is None:
            counted += _cache_bytes(one.cache)
    on_progress("generated tokens", num_new, num_new)
    total = count_kv_bytes() - counted if count_kv_bytes else counted
    result.kv_bytes_per_token = total / num_new


def _cache_bytes(cache: Any) -> int:
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _start_profiler(one: _Pass, result: RunResult) -> None:
    """Start one that sees every thread, the lanes of asynchronous work included."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to stderr, into the bars
    activities = [ProfilerActivity.CPU]
    if one.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    config = _ExperimentalConfig(profile_all_threads=True)
    result.profiles.append(profile(activities=activities, experimental_config=config))
    result.profiles[-1].start()


@contextmanager
def compiled_in_place(model: Any, backend: Any) -> Iterator[None]:
    """`model.compile(backend=...)` for a while; `backend` None leaves the model as it is."""
    torch._dynamo.reset()
    if backend is not None:
        model.compile(backend=backend)
    try:
        yield
    finally:
        model._compiled_call_impl = None
        torch._dynamo.reset()
