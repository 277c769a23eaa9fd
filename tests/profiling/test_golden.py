"""Known numbers of public traces: copies under kernels, and communication under compute as
HolisticTraceAnalysis counts it."""

import pytest

from clusterkv_ops.profiling.accounting import account, phase_rows
from clusterkv_ops.profiling.copies import copy_rows
from clusterkv_ops.profiling.timeline import read_timeline
from clusterkv_ops.profiling.waits import wait_rows

PINNED = "Memcpy HtoD (Pinned -> Device)"


@pytest.mark.parametrize(
    ("name", "busy_us", "megabytes", "hidden", "communication"),
    [
        ("sampled_rank-1.json.gz", "12,082", "63.46", "96.98", "19.93"),
        ("sampled_rank-0.json.gz", "812", "4.85", "100.00", "14.95"),
    ],
)
def test_a100_traces(real_trace, name, busy_us, megabytes, hidden, communication):
    timeline = read_timeline(real_trace(name))
    accounted = account(timeline, "all")
    copy = next(row for row in copy_rows(accounted, timeline) if row.kind == PINNED)
    phases = {row.phase: row for row in phase_rows(accounted)}
    assert f"{copy.busy_us:,.0f}" == busy_us
    assert f"{copy.bytes / 1e6:.2f}" == megabytes
    assert f"{copy.hidden_pct:.2f}" == hidden
    assert f"{phases['communication'].hidden_pct:.2f}" == communication


def test_foreign_traces_have_profiler_steps_instead_of_calls(real_trace):
    timeline = read_timeline(real_trace("sampled_rank-1.json.gz"))
    assert timeline.modes == ["step", "all"]
    assert [call.number for call in timeline.calls] == [551, 552]


def test_rocm_trace_has_one_step_although_the_device_repeats_its_annotation(real_trace):
    timeline = read_timeline(real_trace("mi250_minitoy_train_ROCm6_2_kineto.json.gz"))
    assert [(call.mode, call.number) for call in timeline.calls] == [("step", 1)]
    assert [lane.name for lane in timeline.lanes] == ["stream 0"]


def test_inductor_kernel_is_linked_through_the_driver_api(real_trace):
    timeline = read_timeline(real_trace("triton_example.json.gz"))
    assert [span.name for span in timeline.spans] == ["triton_poi_fused_add_cos_sin_0"]
    assert timeline.spans[0].launched is not None


def test_waits_between_streams_are_read(real_trace):
    timeline = read_timeline(real_trace("event_sync_trace.json.gz"))
    waits = [(wait.stream, wait.waits_on) for wait in timeline.trace.stream_waits]
    assert waits == [(24, 20)]
    assert {lane.stream for lane in timeline.lanes} == {20, 24, 28}
    assert wait_rows(account(timeline, "all"), timeline)[0].waits_for == "host"
