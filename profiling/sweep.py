"""Measures one model at several context lengths, dense and with ClusterKV, without a profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clusterkv_ops.config import ClusterKVConfig
from clusterkv_ops.graphs.backend import Inner, clusterkv_backend
from clusterkv_ops.profiling.breakeven import Point
from clusterkv_ops.profiling.demo import Subject, document
from clusterkv_ops.profiling.measure import compiled_in_place, run_model

# Steps before the measured ones, so that compilation falls there.
_NUM_WARM_UP = 3

OnContext = Callable[[str, int, int], None]


def measure_points(
    subject: Subject,
    contexts: Sequence[int],
    *,
    config: ClusterKVConfig,
    num_new: int,
    inner: Inner = "inductor",
    on_context: OnContext = lambda what, done, total: None,
) -> list[Point]:
    """Milliseconds a token at each context, medians over `num_new` tokens.

    Args:
        subject: model and tokenizer; the document is Python's reference manual.
        contexts: tokens to read before the measured ones, shortest first.
        config: of the sparse passes.
        num_new: tokens to generate at each context.
        inner: what compiles the graphs of both ways.
        on_context: called as ``on_context(what, done, total)`` before each pass and at the end.
    """
    tokens = document(subject.tokenizer, max(contexts) + _NUM_WARM_UP)
    total = 2 * len(contexts)
    points = []
    for i, context in enumerate(contexts):
        times = []
        for j, name in enumerate(("dense", "ClusterKV")):
            on_context(f"{name} at {context:,} tokens", 2 * i + j, total)
            backend = inner if name == "dense" else clusterkv_backend(config=config, inner=inner)
            with compiled_in_place(subject.model, backend):
                result = run_model(
                    subject.model,
                    tokens[: context + _NUM_WARM_UP],
                    num_context=context,
                    num_new=num_new,
                )
            times.append(result.ms_per_token)
        points.append(Point(context, *times))
    on_context("done", total, total)
    return points
