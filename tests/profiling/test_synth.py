"""The accounting against traces whose true numbers are known to the nanosecond."""

import pytest

from clusterkv_ops.profiling.accounting import account, mode_row, phase_rows
from clusterkv_ops.profiling.breakdown import layer_rows, step_rows
from clusterkv_ops.profiling.copies import copy_rows
from clusterkv_ops.profiling.intervals import intersect, total
from clusterkv_ops.profiling.phases import OVERHEAD, PHASES
from clusterkv_ops.profiling.synth import KINDS, synthesize
from clusterkv_ops.profiling.waits import wait_rows

RELIABLE = sorted(set(KINDS) - {"graph-unnamed"})


@pytest.mark.parametrize("kind", RELIABLE)
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_every_phase_equals_the_truth_to_the_nanosecond(synthetic, kind, mode):
    _, timeline, truth = synthetic(kind)
    expected = truth[mode]
    accounted = account(timeline, mode)
    model = accounted.model
    assert accounted.wall == expected.wall
    assert total(accounted.idle) == expected.idle
    assert len(timeline.calls_of(mode)) == expected.calls
    for phase in PHASES:
        want = expected.phases.get(phase)
        busy = accounted.busy[phase]
        assert total(busy) == (want.busy if want else 0), phase
        assert total(accounted.exposed[phase]) == (want.exposed if want else 0), phase
        if want and phase in OVERHEAD:
            assert total(intersect(busy, model)) == want.hidden, phase


@pytest.mark.parametrize("kind", RELIABLE)
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_counts_and_bytes_equal_the_truth(synthetic, kind, mode):
    _, timeline, truth = synthetic(kind)
    rows = {row.phase: row for row in phase_rows(account(timeline, mode))}
    for phase, want in truth[mode].phases.items():
        if phase in OVERHEAD:
            assert (rows[phase].count, rows[phase].bytes) == (want.count, want.bytes), phase


@pytest.mark.parametrize("kind", RELIABLE)
@pytest.mark.parametrize("mode", ["prefill", "decode", "all"])
def test_exposed_phases_and_idle_add_up_to_the_wall(synthetic, kind, mode):
    _, timeline, _ = synthetic(kind)
    accounted = account(timeline, mode)
    given = sum(total(pieces) for pieces in accounted.exposed.values())
    assert given + total(accounted.idle) == accounted.wall
    row = mode_row(accounted, timeline)
    overhead = sum(r.exposed_pct for r in phase_rows(accounted) if r.phase in OVERHEAD)
    assert overhead + row.model_pct + row.idle_pct == pytest.approx(100)


def test_overlapped_clustering_is_fully_hidden_and_serial_not_at_all(synthetic):
    rows = {}
    for kind in ("overlapped", "serial"):
        rows[kind] = phase_rows(account(synthetic(kind)[1], "prefill"))[0]
        assert rows[kind].phase == "clustering"
    assert (rows["overlapped"].hidden_pct, rows["overlapped"].exposed_us) == (100, 0)
    assert (rows["serial"].hidden_pct, rows["serial"].exposed_us) == (0, rows["serial"].busy_us)


def test_serial_takes_longer_by_exactly_the_clustering_time(synthetic):
    overlapped, serial = (
        account(synthetic(kind)[1], "prefill") for kind in ("overlapped", "serial")
    )
    assert serial.wall - overlapped.wall == total(serial.busy["clustering"])
    assert total(serial.busy["clustering"]) == total(overlapped.busy["clustering"])


def test_steps_and_layers_add_up_to_the_mode(synthetic):
    _, timeline, _ = synthetic("streams")
    accounted = account(timeline, "decode")
    steps = step_rows(accounted, timeline)
    layers = layer_rows(accounted)
    assert [row.step for row in steps] == [0, 1, 2, 3]
    assert {row.layer for row in layers} == {0, 1, 2}
    assert sum(row.wall_us for row in steps) == pytest.approx(accounted.wall / 1e3)
    for phase in ("selection", "recall", "attention", "linear"):
        exposed = total(accounted.exposed[phase]) / 1e3
        by_step = sum(row.exposed_us.get(phase, 0) for row in steps)
        by_layer = sum(row.exposed_us for row in layers if row.phase == phase)
        assert (by_step, by_layer) == pytest.approx((exposed, exposed))


def test_main_stream_waits_for_recall_and_for_nothing_else(synthetic):
    _, timeline, truth = synthetic("overlapped")
    rows = wait_rows(account(timeline, "decode"), timeline)
    recall = truth["decode"].phases["recall"]
    assert [(row.waits_for, row.count) for row in rows] == [("recall", recall.count)]
    assert rows[0].wait_us == recall.busy / 1e3


def test_a_thread_that_waits_for_clustering_is_not_model_compute(synthetic):
    _, timeline, truth = synthetic("cpu")
    rows = wait_rows(account(timeline, "prefill"), timeline)
    assert [(row.waits_for, row.count) for row in rows] == [("clustering", 1)]
    assert rows[0].wait_us == truth["prefill"].phases["clustering"].exposed / 1e3


def test_pageable_copies_are_flagged(synthetic):
    for kind, is_pageable in (("overlapped", False), ("pageable", True)):
        accounted = account(synthetic(kind)[1], "all")
        rows = copy_rows(accounted, synthetic(kind)[1])
        assert len(rows) == 2
        assert {row.is_pageable for row in rows} == {is_pageable}


def test_graph_replay_is_attributed_by_name_and_unnamed_kernels_are_unreliable(synthetic):
    assert synthetic("graph")[1].unreliable == {}
    unreliable = synthetic("graph-unnamed")[1].unreliable
    assert set(unreliable) == {"decode", "all"}
    assert "no" in unreliable["decode"]


def test_a_step_whose_kernels_are_lost_is_left_out(synthetic):
    _, timeline, _ = synthetic("dropped")
    lost = [call for call in timeline.calls if not call.is_complete]
    assert [(call.mode, call.number) for call in lost] == [("decode", 0)]
    assert [call.number for call in timeline.calls_of("decode")] == [1, 2, 3]


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"schema-2021"}))
def test_torch_finds_nothing_wrong_with_the_traces(synthetic, kind):
    validator = pytest.importorskip("torch.profiler._trace_validator")
    assert validator.validate_trace(str(synthetic(kind)[0])) == (True, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "fast"}, "kind: expected one of overlapped"),
        ({"layers": 0}, "layers: expected at least 1, got 0"),
        ({"steps": 0}, "steps: expected at least 1, got 0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        synthesize(**options)


def test_a_seed_gives_the_same_trace_again():
    assert synthesize("pdl", seed=3) == synthesize("pdl", seed=3)
    assert synthesize("pdl", seed=3) != synthesize("pdl", seed=4)
