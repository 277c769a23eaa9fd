"""A trace recorded here: the compiled model's own operators and ranges reach the report."""

import json

import pytest

from clusterkv_ops.profiling.accounting import account
from clusterkv_ops.profiling.intervals import total
from clusterkv_ops.profiling.phases import OVERHEAD
from clusterkv_ops.profiling.report import build_report
from clusterkv_ops.profiling.timeline import read_timeline

transformers = pytest.importorskip("transformers")

CONTEXT, STEPS = 640, 40


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Timeline and report of a small random model that offloads, recalls and reclusters."""
    import torch
    from torch._C._profiler import _ExperimentalConfig

    from clusterkv_ops import clusterkv_backend

    model = small_model(torch)
    backend = clusterkv_backend(
        budget=96, inner="eager", dense_layers=1, offload=True, recluster_interval=32
    )
    model.compile(backend=backend)
    generate(model, 3)
    options = _ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=options
    ) as profiler:
        generate(model, STEPS)
        profiler.add_metadata_json("clusterkv", json.dumps({"recall_hits": 3, "recall_misses": 1}))
    path = tmp_path_factory.mktemp("live") / "live.kineto.json.gz"
    profiler.export_chrome_trace(str(path))
    timeline = read_timeline(path)
    return timeline, build_report(timeline)


def small_model(torch):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    return transformers.LlamaForCausalLM(config).eval()


def generate(model, steps):
    import torch

    with torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        ids = torch.randint(0, 128, (1, CONTEXT))
        for _ in range(steps + 1):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = out.logits[:, -1].argmax(-1, keepdim=True)


def test_every_phase_of_the_method_is_there(live):
    _, report = live
    assert report.phase("prefill", "clustering").count == 2
    assert report.phase("decode", "selection").count == 2 * STEPS
    assert report.phase("decode", "recall").count == 2 * STEPS
    for phase in ("attention", "linear", "other"):
        assert report.phase("decode", phase).busy_us > 0
    assert {row.layer for row in report.layers if row.phase == "selection"} == {1, 2}


def test_calls_are_counted(live):
    _, report = live
    assert (report.mode("prefill").calls, report.mode("decode").calls) == (1, STEPS)
    assert report.trace["lanes"] == "threads"


def test_percentages_add_up_to_100(live):
    timeline, report = live
    for row in report.modes:
        exposed = sum(
            phase.exposed_pct
            for phase in report.phases
            if phase.mode == row.mode and phase.phase in OVERHEAD
        )
        assert exposed + row.model_pct + row.idle_pct == pytest.approx(100)
        accounted = account(timeline, row.mode)
        given = sum(total(pieces) for pieces in accounted.exposed.values())
        assert given + total(accounted.idle) == accounted.wall


def test_clustering_runs_on_a_lane_of_its_own(live):
    _, report = live
    roles = {row.role for row in report.lanes if row.mode == "prefill"}
    assert {"model", "clustering"} <= roles


def test_counters_travel_in_the_trace(live):
    _, report = live
    assert report.counters["hit_rate"] == 0.75
    assert "hit rate 75 %" in report.headline
