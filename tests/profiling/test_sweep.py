"""The loop of `breakeven`: which passes it makes, and what becomes of their times."""

from contextlib import contextmanager
from types import SimpleNamespace

from clusterkv_ops.config import ClusterKVConfig
from clusterkv_ops.graphs.backend import ClusterKVBackend
from clusterkv_ops.profiling import sweep
from clusterkv_ops.profiling.breakeven import Point
from clusterkv_ops.profiling.demo import Subject


def bytes_as_tokens(text):
    return {"input_ids": list(text.encode())}


def test_each_context_is_measured_dense_and_sparse(monkeypatch):
    passes, stages = [], []
    current = []

    @contextmanager
    def compiled(model, backend):
        current.append(backend)
        yield

    def run_model(model, tokens, *, num_context, num_new):
        is_sparse = isinstance(current[-1], ClusterKVBackend)
        passes.append((num_context, len(tokens) - num_context, num_new, is_sparse))
        return SimpleNamespace(ms_per_token=2.0 if is_sparse else num_context / 100)

    monkeypatch.setattr(sweep, "compiled_in_place", compiled)
    monkeypatch.setattr(sweep, "run_model", run_model)
    points = sweep.measure_points(
        Subject("small", None, bytes_as_tokens),
        [100, 400],
        config=ClusterKVConfig(budget=64),
        num_new=5,
        inner="eager",
        on_context=lambda *stage: stages.append(stage),
    )
    assert points == [Point(100, 1.0, 2.0), Point(400, 4.0, 2.0)]
    assert passes == [(100, 3, 5, False), (100, 3, 5, True), (400, 3, 5, False), (400, 3, 5, True)]
    assert current[0] == "eager"
    assert current[1].config.budget == 64
    assert stages[0] == ("dense at 100 tokens", 0, 4)
    assert stages[-1] == ("done", 4, 4)
