"""TensorBoard: what is written into a log directory, and the tab's server side."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from clusterkv_ops.profiling.report import build_report
from clusterkv_ops.profiling.scalars import LAYOUT, scalars

pytest.importorskip("tensorboard", reason="the profile extra is not installed")


@pytest.fixture(scope="module")
def logdir(synthetic, tmp_path_factory):
    """Two runs, written as `profile tensorboard` does."""
    pytest.importorskip("torch.utils.tensorboard")
    pytest.importorskip("matplotlib")
    from clusterkv_ops.profiling.event_files import write_run

    folder = tmp_path_factory.mktemp("logs")
    for kind in ("overlapped", "serial"):
        timeline = synthetic(kind)[1]
        write_run(build_report(timeline), timeline, folder / kind)
    return folder


@pytest.fixture
def client(logdir):
    """GET requests to the tab's addresses."""
    from werkzeug.test import Client

    from clusterkv_ops.profiling.plugin_loader import ClusterKVLoader

    plugin = ClusterKVLoader().load(SimpleNamespace(logdir=str(logdir), multiplexer=None))
    assert plugin.is_active()
    assert plugin.frontend_metadata().tab_name == "ClusterKV"
    apps = plugin.get_plugin_apps()
    return lambda address: Client(apps[address.split("?")[0]]).get(address)


def test_scalars_hold_every_step(synthetic):
    report = build_report(synthetic("overlapped")[1])
    points = {(point.tag, point.step): point.value for point in scalars(report)}
    assert points["clusterkv/hidden_pct/prefill/clustering", 0] == 100
    assert points["clusterkv/hidden_pct/decode/recall", 3] == 0
    assert points["clusterkv/exposed_ms/decode/selection", 2] > 0
    assert points["clusterkv/ms/decode", 1] == pytest.approx(report.steps[2].wall_us / 1e3)
    assert 0 < points["clusterkv/cache/hit_rate", 0] < 1


def test_unreliable_modes_have_no_shares(synthetic):
    tags = {point.tag for point in scalars(build_report(synthetic("graph-unnamed")[1]))}
    assert "clusterkv/ms/decode" in tags
    assert not any(tag.startswith("clusterkv/exposed_ms/decode") for tag in tags)


def test_layout_patterns_are_anchored():
    for chart in LAYOUT["ClusterKV"].values():
        assert all(tag.startswith("^") and tag.endswith("$") for tag in chart[1])


def test_event_file_reads_back(logdir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logdir / "overlapped"))
    events.Reload()
    tags = events.Tags()
    hit_rates = events.Scalars("clusterkv/cache/hit_rate")
    assert [point.step for point in hit_rates] == [0, 1, 2, 3]
    assert {"clusterkv/lanes_prefill", "clusterkv/shares", "clusterkv/overhead"} <= set(
        tags["images"]
    )
    assert "clusterkv/report/text_summary" in tags["tensors"]


def test_runs_are_listed_with_their_headlines(client):
    runs = json.loads(client("/runs").data)
    assert [run["name"] for run in runs] == ["overlapped", "serial"]
    assert all("clustering" in run["headline"] and run["can_compare"] for run in runs)


def test_report_page_may_run_its_own_script_and_load_nothing(client):
    response = client("/report?run=serial")
    policy = response.headers["Content-Security-Policy"]
    assert response.status_code == 200
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


def test_two_runs_are_compared(client):
    page = client("/compare?left=overlapped&right=serial").data.decode()
    assert "overlapped against serial" in page
    assert "+1." in page


@pytest.mark.parametrize(
    "address",
    [
        "/report?run=../../etc/passwd",
        "/report?run=absent",
        "/report",
        "/compare?left=overlapped&right=absent",
        "/compare",
    ],
)
def test_an_unknown_run_is_not_found(client, address):
    response = client(address)
    assert response.status_code == 404
    assert response.data == b"no such run"


def test_the_script_is_a_module_with_render(client):
    assert b"export async function render()" in client("/index.js").data


def test_a_damaged_report_is_shown_but_not_comparable(logdir, client):
    broken = logdir / "broken"
    broken.mkdir()
    (broken / "report.html").write_text("<p>still readable")
    (broken / "report.json").write_text('{"schema": "clusterkv.profile/1", "modes": [')
    try:
        runs = {run["name"]: run for run in json.loads(client("/runs").data)}
        assert client("/report?run=broken").data == b"<p>still readable"
        assert client("/compare?left=broken&right=serial").status_code == 404
    finally:
        shutil.rmtree(broken)
    assert not runs["broken"]["can_compare"]


def test_reports_of_other_programs_are_not_ours(logdir, client):
    foreign = logdir / "foreign"
    foreign.mkdir()
    (foreign / "report.html").write_text("<p>coverage")
    (foreign / "report.json").write_text('{"meta": {}}')
    try:
        names = [run["name"] for run in json.loads(client("/runs").data)]
    finally:
        shutil.rmtree(foreign)
    assert names == ["overlapped", "serial"]


def test_a_failing_plugin_leaves_the_tab_out_and_says_why(caplog):
    from clusterkv_ops.profiling.plugin_loader import ClusterKVLoader

    assert ClusterKVLoader().load(None) is None
    assert "the ClusterKV tab is left out" in caplog.text


def test_loading_the_tab_needs_no_torch(logdir):
    code = f"""
import sys, types
sys.modules["torch"] = None
from clusterkv_ops.profiling.plugin_loader import ClusterKVLoader
context = types.SimpleNamespace(logdir={str(logdir)!r})
plugin = ClusterKVLoader().load(context)
assert plugin.is_active()
from clusterkv_ops.profile import main
assert main(["report", {str(logdir / "serial" / "run.pt.trace.json.gz")!r}]) == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:html5lib")
def test_plugins_are_complete_and_the_stock_profiler_is_replaced_when_offline():
    from clusterkv_ops.profiling.server import plugins

    names = [getattr(plugin, "__name__", "") for plugin in plugins(is_offline=False)]
    assert names.count("ClusterKVLoader") == 1
    pytest.importorskip("torch_tb_profiler")
    names = [getattr(plugin, "__name__", "") for plugin in plugins(is_offline=True)]
    assert names.count("OfflineProfilerPlugin") == 1
    assert "TorchProfilerPlugin" not in names
