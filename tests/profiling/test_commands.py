"""The command line: every command, its files, its exit codes."""

import json
import re
import subprocess
import sys

import pytest

from clusterkv_ops.profile import main


def run(capsys, *argv):
    """(exit code, stdout, stderr) of one command."""
    code = main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def trace(synthetic):
    return synthetic("overlapped")[0]


def test_report_prints_headline_and_tables(capsys, trace):
    code, out, _ = run(capsys, "report", trace)
    assert code == 0
    assert "clustering" in out
    assert "100 %" in out
    assert "decode: 4 calls" in out


@pytest.mark.parametrize("by", ["step", "layer", "lane"])
def test_report_cuts_by_step_layer_and_lane(capsys, trace, by):
    code, out, _ = run(capsys, "report", trace, "--by", by, "--mode", "decode")
    assert code == 0
    assert by in out
    assert "prefill:" not in out


def test_report_of_a_folder_takes_its_trace(capsys, trace):
    assert run(capsys, "report", trace.parent)[0] == 0


def test_json_has_the_documented_schema(capsys, trace):
    code, out, _ = run(capsys, "report", trace, "--format", "json")
    report = json.loads(out)
    assert code == 0
    assert report["schema"] == "clusterkv.profile/1"
    assert {
        "mode",
        "phase",
        "count",
        "busy_us",
        "hidden_pct",
        "exposed_us",
        "exposed_pct",
        "bytes",
    } <= set(report["phases"][0])
    copy = report["copies"][0]
    assert copy["kind"] == "Memcpy DtoH (Device -> Pinned)"
    assert {"count", "bytes", "busy_us", "hidden_pct"} <= set(copy)
    assert report["lanes"]
    assert report["counters"]["hit_rate"] == pytest.approx(0.66, abs=0.2)
    assert report["warnings"] == []


def test_markdown_is_a_table(capsys, trace):
    _, out, _ = run(capsys, "report", trace, "--format", "md")
    assert re.search(r"^\| clustering \| 24 \|.*\| 100 % \| 0 us \| 0 % \|", out, re.MULTILINE)


@pytest.mark.parametrize("form", ["html", "png"])
def test_pictures_are_written(capsys, trace, tmp_path, form):
    if form == "png":
        pytest.importorskip("matplotlib")
    output = tmp_path / f"report.{form}"
    assert run(capsys, "report", trace, "--format", form, "-o", output)[:2] == (0, f"{output}\n")
    head = output.read_bytes()[:16]
    assert head.startswith(b"\x89PNG" if form == "png" else b"<!doctype html>")


@pytest.mark.parametrize(
    ("gate", "code"),
    [
        ("prefill.clustering.exposed_pct>2", 0),
        ("prefill.clustering.hidden_pct<99.9", 0),
        ("decode.selection.exposed_pct>2", 1),
        ("decode.clustering.exposed_pct>2", 0),
        ("decode.idle_pct>=0", 1),
        ("counters.hit_rate<0.01", 0),
        ("prefill.clustering.exposed_pct", 2),
        ("prefil.clustering.exposed_pct>2", 2),
        ("prefill.cluster.exposed_pct>2", 2),
        ("prefill.clustering.exposed>2", 2),
        ("extend.clustering.exposed_pct>2", 2),
        ("counters.speed<1", 2),
        ("prefill.clustering.exposed_pct>1.2.3", 2),
    ],
)
def test_gates_decide_the_exit_code(capsys, trace, gate, code):
    found, _, err = run(capsys, "report", trace, "--fail-if", gate)
    assert found == code
    assert ("fail-if" in err) == (code > 0)


def test_a_gate_on_an_unreliable_number_fails(capsys, synthetic):
    gate = "decode.selection.exposed_pct>99"
    code, out, err = run(capsys, "report", synthetic("graph-unnamed")[0], "--fail-if", gate)
    assert code == 1
    assert "unreliable" in err
    assert "unreliable" in out


def test_compare_computes_hiding_from_the_wall_clock(capsys, synthetic, tmp_path):
    paths = []
    for name, kind, prefill in (("base", "overlapped", 9.0), ("serial", "serial", 11.0)):
        paths.append(saved_report(synthetic(kind)[1], tmp_path / f"{name}.report.json", prefill))
    paths.append(saved_report(synthetic("overlapped")[1], tmp_path / "overlap.report.json", 9.5))
    code, out, _ = run(capsys, "compare", *paths, "--format", "json")
    rows = {row["mode"]: row for row in json.loads(out)["hiding"]}
    assert code == 0
    assert rows["prefill"]["hiding_pct"] == pytest.approx(75)
    assert not rows["prefill"]["is_profiled"]
    assert rows["decode"]["is_profiled"]
    assert rows["decode"]["hiding_pct"] is None


def saved_report(timeline, path, prefill_ms):
    from clusterkv_ops.profiling.report import build_report, save_report

    report = build_report(timeline)
    report.counters["unprofiled"] = {"prefill_ms": prefill_ms}
    save_report(report, path)
    return path


def test_compare_prints_an_unreliable_hiding_as_such(capsys, trace):
    code, out, _ = run(capsys, "compare", trace, trace, trace)
    assert code == 0
    assert "unreliable" in out


@pytest.mark.parametrize("suffix", ["svg", "html", "png"])
@pytest.mark.parametrize("what", [("--step", 2), ("--layer", 1), ("--window", "0:2.5")])
def test_timeline_draws_steps_layers_and_windows(capsys, trace, tmp_path, what, suffix):
    if suffix == "png":
        pytest.importorskip("matplotlib")
    output = tmp_path / f"t.{suffix}"
    code, out, err = run(capsys, "timeline", trace, *what, "-o", output)
    assert (code, out, err) == (0, f"{output}\n", "")
    assert output.stat().st_size > 1000


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (("--step", 9), "step: expected 0 to 3, got 9"),
        (("--layer", 9), "layer: expected one of 0, 1, 2, got 9"),
        (("--window", "5"), "window: expected A:B in milliseconds, got '5'"),
        (("--window", "5:4"), "window: expected A < B, got '5:4'"),
        (("--window", "1e6:2e6"), "nothing runs in 1e6:2e6 ms"),
    ],
)
def test_timeline_names_what_is_not_there(capsys, trace, tmp_path, what, message):
    code, _, err = run(capsys, "timeline", trace, *what, "-o", tmp_path / "t.svg")
    assert code == 2
    assert err == f"timeline: {message}\n"


def test_breakeven_interpolates_the_crossing(capsys, tmp_path):
    points = [(1024, 10, 16), (2048, 14, 17), (4096, 22, 18), (8192, 40, 18)]
    keys = ("context", "dense_ms", "sparse_ms")
    path = tmp_path / "points.json"
    path.write_text(
        json.dumps({"points": [dict(zip(keys, point, strict=True)) for point in points]})
    )
    output = tmp_path / "b.json"
    code, out, _ = run(capsys, "breakeven", "--points", path, "-o", output)
    assert code == 0
    assert "breaks even at 2,926 tokens" in out
    assert json.loads(output.read_text())["crossing"] == pytest.approx(2048 + 2048 * 3 / 7)


@pytest.mark.parametrize("kind", ["overlapped", "cpu"])
def test_synth_writes_a_trace_that_validates(capsys, tmp_path, kind):
    trace, truth = tmp_path / "t.json.gz", tmp_path / "truth.json"
    code, _, _ = run(capsys, "synth", "-o", trace, "--kind", kind, "--truth", truth)
    assert code == 0
    assert json.loads(truth.read_text())["prefill"]["wall"] > 0
    code, out, _ = run(capsys, "validate", trace)
    assert code == 0
    assert "error" not in out


def test_validate_finds_an_effect_before_its_cause(capsys, tmp_path):
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1}
    launch |= {"ts": 20, "dur": 1, "args": {"correlation": 5}}
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 10, "dur": 3}
    kernel |= {"args": {"correlation": 5, "stream": 7}}
    path = tmp_path / "t.json"
    path.write_text(json.dumps([launch, kernel]))
    code, out, _ = run(capsys, "validate", path)
    assert code == 2
    assert "1 device events start before their launch" in out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.json", None, "no such file or folder"),
        ("cut.json", '{"traceEvents": [{"ph": "X"', "event 0: the file ends too early"),
        ("field.json", '{"traceEvents": [{"ph": "X", "cat": "kernel"}]}', "event 0: ts: expected"),
        ("counters.json", '{"clusterkv": 3, "traceEvents": []}', "clusterkv: expected an object"),
        (
            "steps.json",
            '{"clusterkv": {"steps": [{"hits": "x"}]}, "traceEvents": []}',
            "clusterkv.steps[0].hits: expected a number, got 'x'",
        ),
    ],
)
def test_bad_input_exits_with_two_and_names_the_file(capsys, tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    code, out, err = run(capsys, "report", path)
    assert (code, out) == (2, "")
    assert str(path) in err
    assert message in err


def test_an_empty_trace_is_a_report_with_a_warning(capsys, tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": []}')
    code, out, _ = run(capsys, "report", path)
    assert code == 0
    assert "The trace is empty." in out


def test_doctor_lists_versions_and_knows_what_breaks(capsys):
    from clusterkv_ops.profiling.doctor import breakages

    assert run(capsys, "doctor")[1].startswith("python")
    assert breakages({"tensorboard": "2.20.0", "setuptools": "84.0"})
    assert breakages({"tensorboard": "2.21", "torch-tb-profiler": "0.4.3", "pandas": "4.0"})
    assert not breakages({"tensorboard": "2.21", "setuptools": "84.0", "pandas": "3.1"})


def test_the_module_runs_as_a_program(trace):
    command = [sys.executable, "-m", "clusterkv_ops.profile", "report", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "clustering" in done.stdout
