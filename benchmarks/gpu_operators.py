"""The operators on a GPU at Llama-3.1-8B's attention shapes, against what PyTorch offers.

    python benchmarks/gpu_operators.py [--contexts 8192 32768 131072] [--output FOLDER] [--small]

Times are medians of CUDA events in one run. The byte limit is what a device copy reaches. "Dense"
attends to everything, "sparse" to a budget. Writes gpu_operators.json and gpu.trace.json.

Shapes: B = 1, Hkv = 8 KV heads, groups of 4, D = 128, bfloat16; 80 tokens a cluster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from clusterkv_ops import schemas  # also defines the operators

ops = torch.ops.clusterkv
HEADS, GROUP, HEAD_DIM, TOKENS_PER_CLUSTER = 8, 4, 128, 80
LAYERS = 32
Way = Callable[[], Any]


def milliseconds(way: Way, rounds: int = 20) -> float:
    """The median time of a call on the device, after three for warm-up."""
    for _ in range(3):
        way()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        way()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


class Context:
    """One layer's cache of `kv_len` tokens in the store's layout, its index, and a query."""

    def __init__(self, kv_len: int, budget: int, max_iter: int = 5) -> None:
        self.kv_len, self.budget = kv_len, budget
        self.store = self._structured(kv_len)
        self.keys, self.values = self.store.permute(3, 1, 2, 0, 4)
        self.query = torch.randn(1, HEADS * GROUP, 1, HEAD_DIM, device="cuda").bfloat16()
        clusters = max(kv_len // TOKENS_PER_CLUSTER, 1)
        self.initial = torch.randperm(kv_len, device="cuda")[:clusters].int()[None]
        self.index = ops.cluster_keys(self.keys, self.initial, None, max_iter)
        self.nowhere = torch.zeros(1, 2, 2, dtype=torch.int32, device="cuda")
        self.everything = self.nowhere.clone()
        self.everything[0, 0, 1] = kv_len

    @staticmethod
    def _structured(kv_len: int) -> Tensor:
        """Random K and V; keys lie around common directions of very different popularity."""
        topics = 3 * torch.randn(kv_len // 40 + 1, HEADS, HEAD_DIM, device="cuda")
        popularity = 1 / torch.arange(1, len(topics) + 1, device="cuda")
        store = torch.randn(kv_len, 1, HEADS, 2, HEAD_DIM, device="cuda")
        store[:, 0, :, 0] += topics[popularity.multinomial(kv_len, replacement=True)]
        return store.bfloat16()

    def select(self, rule: str = "query_head") -> Tensor:
        chosen: Tensor = ops.select_clusters(
            self.query, *self.index, self.budget, rule, HEAD_DIM**-0.5
        )[0]
        return chosen

    def attend(self, indices: Tensor, spans: Tensor, *slots: Tensor | None) -> Tensor:
        places = slots or (None, None, None)
        out: Tensor = ops.selected_attention(
            self.query, self.keys, self.values, indices, spans, None, *places, HEAD_DIM**-0.5
        )[0]
        return out


def copy_gb_per_s(num_bytes: int = 1 << 30) -> float:
    """What a copy inside the device moves, reads and writes together."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / milliseconds(lambda: target.copy_(source)) / 1e6


def attention_times(context: Context) -> dict[str, float]:
    keys, values = context.keys.contiguous(), context.values.contiguous()
    folded = context.query.view(1, HEADS, GROUP, HEAD_DIM)
    per_head, per_group = context.select(), context.select("kv_head")
    rows = per_group[0].long() + torch.arange(HEADS, device="cuda")[:, None] * len(context.store)
    rows = rows.clamp(min=0).flatten()
    shape = (1, HEADS, context.budget, HEAD_DIM)

    def gathered() -> Tensor:
        chosen = (x.view(-1, HEAD_DIM).index_select(0, rows).view(shape) for x in (keys, values))
        return scaled_dot_product_attention(folded, *chosen)

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(context.query, keys, values, enable_gqa=True)

    ways: dict[str, Way] = {
        "dense: SDPA, folded": lambda: scaled_dot_product_attention(folded, keys, values),
        "dense: SDPA, FlashAttention": flash,
        "dense: ours": lambda: context.attend(per_group[..., :0], context.everything),
        "sparse: index_select + SDPA": gathered,
        "sparse: ours, one choice a group": lambda: context.attend(per_group, context.nowhere),
        "sparse: ours, each head its own": lambda: context.attend(per_head, context.nowhere),
        "selection: query_head": context.select,
        "selection: kv_head": lambda: context.select("kv_head"),
    }
    expected = ways["dense: SDPA, folded"]().view(context.query.shape)
    torch.testing.assert_close(ways["dense: ours"](), expected, rtol=2e-2, atol=2e-2)
    return {name: milliseconds(way) for name, way in ways.items()}


def clustering_times(context: Context) -> dict[str, float]:
    centroids, initial = context.index[0], context.initial
    labels = ops.assign_clusters(context.keys, centroids, None)
    return {
        "assign": milliseconds(lambda: ops.assign_clusters(context.keys, centroids, None), 5),
        "sort + update": milliseconds(
            lambda: ops.update_centroids(context.keys, labels, centroids), 5
        ),
        "20 iterations": milliseconds(
            lambda: ops.cluster_keys(context.keys, initial, None, 20), 3
        ),
    }


def overlap_times(context: Context) -> dict[str, float]:
    """Clustering on a side stream beside matrix products, as in a prefill."""
    side = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def model() -> None:
        for _ in range(100):
            torch.mm(a, a)

    def cluster() -> None:
        ops.cluster_keys(context.keys, context.initial, None, 20)

    def in_turn() -> None:
        model()
        cluster()

    def overlapped() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            cluster()
        model()
        torch.cuda.current_stream().wait_stream(side)

    base = milliseconds(model, 5)
    serial = milliseconds(in_turn, 5)
    overlap = milliseconds(overlapped, 5)
    hiding = 1 - (overlap - base) / (serial - base)
    return {"base": base, "serial": serial, "overlapped": overlap, "hiding": hiding}


class Mapped:
    """Pinned host memory as the device addresses it; `torch.as_tensor` makes a CUDA tensor."""

    def __init__(self, pinned: Tensor) -> None:
        self.pinned = pinned  # keeps the memory
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "<i2",
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }


def recall_times(context: Context) -> dict[str, float]:
    """Fetching a whole selection from host memory, against one pinned copy of as many bytes."""
    pinned = torch.empty(context.store.shape, dtype=torch.int16, pin_memory=True)
    pinned.copy_(context.store.view(torch.int16))
    mapped = torch.as_tensor(Mapped(pinned), device="cuda").view(torch.bfloat16)
    keys, values = mapped.permute(3, 1, 2, 0, 4)
    indices = context.select("kv_head")
    slots = 2 * context.budget
    rows = torch.empty(2, 1, HEADS, slots, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    held = torch.full((1, HEADS, slots), -1, dtype=torch.int32, device="cuda")
    ages = torch.zeros_like(held)

    def fetch() -> Tensor:  # recall_steps = 0 frees every slot at the end: nothing is ever a hit
        misses: Tensor = ops.recall(keys, values, indices, *rows, held, ages, 0)[2]
        return misses

    num_bytes = int(fetch().sum()) * 2 * HEAD_DIM * 2
    fetched = rows[0][0, 0, 0]
    assert torch.equal(fetched, context.keys[0, 0, indices[0, 0, 0].long()])
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    copy = milliseconds(lambda: target.copy_(source, non_blocking=True))
    recall = milliseconds(fetch)
    return {
        "bytes": num_bytes,
        "recall GB/s": num_bytes / recall / 1e6,
        "pinned copy GB/s": num_bytes / copy / 1e6,
    }


def decode_times(context: Context) -> dict[str, float]:
    """The attention of a whole token, 32 layers, launched one by one and as a CUDA graph."""
    nothing = torch.empty(1, HEADS, 0, dtype=torch.int32, device="cuda")

    def sparse() -> None:
        for _ in range(LAYERS):
            context.attend(context.select(), context.nowhere)

    def dense() -> None:
        for _ in range(LAYERS):
            context.attend(nothing, context.everything)

    times = {}
    for name, way in {"dense": dense, "sparse": sparse}.items():
        times[name] = milliseconds(way)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            way()
        times[f"{name}, CUDA graph"] = milliseconds(graph.replay)
    return times


def trace(context: Context, path: Path) -> None:
    """One clustering and one token's attention as a Kineto trace."""
    with torch.profiler.profile() as profiler:
        ops.cluster_keys(context.keys, context.initial, None, 5)
        for _ in range(LAYERS):
            context.attend(context.select(), context.nowhere)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def run_small() -> None:
    """Every operator once, for compute-sanitizer."""
    context = Context(kv_len=500, budget=64, max_iter=2)
    for rule in ("query_head", "kv_head"):
        context.attend(context.select(rule), context.everything)
    recall_times(context)
    labels = ops.assign_clusters(context.keys, context.index[0], None)
    ops.update_centroids(context.keys, labels, context.index[0])
    torch.cuda.synchronize()
    print("every operator ran")


def measure(contexts: list[int], budget: int, output: Path) -> dict[str, Any]:
    name = torch.cuda.get_device_name()
    results: dict[str, Any] = {"device": name, "torch": torch.__version__, "budget": budget}
    results["copy GB/s"] = copy_gb_per_s()
    for kv_len in contexts:
        context = Context(kv_len, budget)
        times = attention_times(context)
        num_bytes = context.store.numel() * 2
        results[str(kv_len)] = {
            "attention ms": times,
            "dense: ours, of the byte limit": num_bytes
            / times["dense: ours"]
            / 1e6
            / results["copy GB/s"],
            "clustering ms": clustering_times(context),
            "overlap ms": overlap_times(context),
            "recall": recall_times(context),
            "32 layers ms": decode_times(context),
        }
        print(json.dumps({kv_len: results[str(kv_len)]}, indent=1), flush=True)
        (output / "gpu_operators.json").write_text(json.dumps(results, indent=1) + "\n")
    trace(Context(contexts[0], budget), output / "gpu.trace.json")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--small", action="store_true", help="each operator once")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing was measured")
    if not schemas.has_cuda_kernels:
        raise SystemExit("clusterkv_ops._cuda is not built: nothing was measured")
    torch.manual_seed(0)
    if options.small:
        return run_small()
    options.output.mkdir(parents=True, exist_ok=True)
    measure(options.contexts, options.budget, options.output)
    return None


if __name__ == "__main__":
    main()
