"""The copy for torch-tb-profiler: what it changes, and that the plugin then reads it rightly."""

import gzip
import json

import pytest

from clusterkv_ops.profiling.compat import compat_name, compatible, write_compat


def test_runtime_categories_are_renamed_and_device_steps_left_out():
    assert compatible({"cat": "cuda_driver", "name": "cuLaunchKernel"})["cat"] == "Runtime"
    assert compatible({"cat": "gpu_user_annotation", "name": "ProfilerStep#3"}) is None
    kept = {"cat": "gpu_user_annotation", "name": "clusterkv.recall"}
    assert compatible(kept) is kept


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("run.kineto.json.gz", "run.pt.trace.json.gz"),
        ("run.123.pt.trace.json", "run.123.pt.trace.json.gz"),
        ("a/b.json", "b.pt.trace.json.gz"),
    ],
)
def test_the_name_is_one_that_the_plugin_looks_for(source, target):
    assert compat_name(source) == target


def test_the_copy_holds_everything_else_and_ends_with_the_events(synthetic, tmp_path):
    path, timeline, _ = synthetic("overlapped")
    copy = tmp_path / "copy.pt.trace.json.gz"
    write_compat(path, copy)
    original = json.loads(gzip.decompress(path.read_bytes()))
    text = gzip.decompress(copy.read_bytes())
    copied = json.loads(text)
    assert text.endswith(b"]}")
    assert copied["clusterkv"] == original["clusterkv"]
    dropped = [e for e in original["traceEvents"] if compatible(e) is None]
    assert dropped
    assert len(copied["traceEvents"]) == len(original["traceEvents"]) - len(dropped)
    kernels = [e for e in original["traceEvents"] if e.get("cat") == "kernel"]
    assert kernels == [e for e in copied["traceEvents"] if e.get("cat") == "kernel"]
    assert timeline.trace.count == len(original["traceEvents"])


@pytest.mark.filterwarnings("ignore:The copy keyword is deprecated")
@pytest.mark.parametrize("is_copy", [True, False])
def test_the_plugin_counts_steps_and_links_kernels_only_in_the_copy(synthetic, tmp_path, is_copy):
    data = pytest.importorskip("torch_tb_profiler.profiler.data")
    path = synthetic("overlapped")[0]
    if is_copy:
        copy = tmp_path / "w.pt.trace.json.gz"
        write_compat(path, copy)
        path = copy
    profile = data.RunProfileData.parse("worker", "", str(path), str(tmp_path))
    profile.process()
    operators = {kernel.op_name for kernel in profile.kernel_list_groupby_name_op}
    assert (len(profile.steps_names) == 5) == is_copy
    assert ("clusterkv::cluster_keys" in operators) == is_copy
