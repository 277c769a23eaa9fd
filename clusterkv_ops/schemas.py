"""Every operator's schema on one page, and where its implementation comes from.

`_C` (CPU) and `_cuda` are built from `csrc/`. Where one of them is missing, the reference
implementation answers for that device, with one warning.

Shapes: B batch, Hq / Hkv query / key-value heads, G group size, T cached tokens, C clusters,
S selected tokens, N slots, D head_dim; Hs is Hq or Hkv, as the head rule says.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from clusterkv_ops import reference

NAMESPACE = "clusterkv"

SCHEMAS: dict[str, str] = {
    # clustering: keys [B,Hkv,T,D]; centroids [B,Hkv,C,D] float32; labels [B,Hkv,T] int32 (-1: no
    # cluster); valid [B,2] int32, the range of tokens of each row; initial [B,C] int32, the tokens
    # whose keys are the first centroids (-1: the row has no such cluster).
    "assign_clusters": "(Tensor keys, Tensor centroids, Tensor? valid) -> Tensor",
    "update_centroids": "(Tensor keys, Tensor labels, Tensor centroids) -> Tensor",
    "cluster_keys": (
        "(Tensor keys, Tensor initial, Tensor? valid, int max_iter) -> (Tensor, Tensor, Tensor)"
    ),
    # The new clusters take places first_cluster.. of the index, its tokens count from first_token.
    "extend_index_": (
        "(Tensor(a!) centroids, Tensor(b!) indptr, Tensor(c!) indices, Tensor keys, "
        "Tensor initial, Tensor? valid, int first_cluster, int first_token, int max_iter) -> ()"
    ),
    # selection: query [B,Hq,1,D] -> indices [B,Hs,budget], num_selected [B,Hs].
    "select_clusters": (
        "(Tensor query, Tensor centroids, Tensor indptr, Tensor indices, int budget, "
        "str head_rule, float scale) -> (Tensor, Tensor)"
    ),
    # recall: indices [B,Hs,S]; slot_keys [B,Hkv,N,D]; slot_indices, slot_ages [B,Hkv,N]
    # -> slots [B,Hs,S], hits [B,Hkv], misses [B,Hkv].
    "recall": (
        "(Tensor keys, Tensor values, Tensor indices, Tensor(a!) slot_keys, "
        "Tensor(b!) slot_values, Tensor(c!) slot_indices, Tensor(d!) slot_ages, "
        "int recall_steps) -> (Tensor, Tensor, Tensor)"
    ),
    # attention: spans [B,2,2] int32, the (begin, end) of sinks and of recent tokens; mask
    # [B,1|Hq,1,T] bool or additive; slots [B,Hs,S] -> out [B,Hq,1,D], lse [B,Hq,1] float32.
    "selected_attention": (
        "(Tensor query, Tensor keys, Tensor values, Tensor indices, Tensor spans, Tensor? mask, "
        "Tensor? slots, Tensor? slot_keys, Tensor? slot_values, float scale) -> (Tensor, Tensor)"
    ),
    "merge_states": (
        "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)"
    ),
}

library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema)


def _load(stem: str) -> bool:
    """Load `clusterkv_ops/<stem>.*.so`; it registers its kernels. False where it was not built."""
    built = sorted(Path(__file__).parent.glob(f"{stem}.*so"))
    if built:
        torch.ops.load_library(str(built[-1]))
    return bool(built)


def _warning_once(function: Callable[..., object], message: str) -> Callable[..., object]:
    """`function`, which says `message` the first time any operator of that device runs."""

    def implementation(*args: object) -> object:
        if message not in _warned:
            _warned.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return function(*args)

    return implementation


_warned: set[str] = set()
has_cpu_kernels = _load("_C")
if has_cpu_kernels:
    # The instruction set that _C's kernels run on. No tensors, so no fake, oracle or CUDA kernel:
    # it is not in SCHEMAS, and the completeness test skips it.
    library.define("cpu_isa() -> str")
has_cuda_kernels = torch.version.cuda is not None and _load("_cuda")

for _name in SCHEMAS:
    _oracle: Callable[..., object] = getattr(reference, _name)
    if not has_cpu_kernels:
        library.impl(_name, _oracle, "CPU")
    if not has_cuda_kernels:
        _slow = (
            "clusterkv_ops has no CUDA kernels in this installation: CUDA tensors run the plain "
            "PyTorch reference, which is exact and slow"
        )
        library.impl(_name, _warning_once(_oracle, _slow), "CUDA")

if not has_cpu_kernels:
    warnings.warn(
        "clusterkv_ops._C is not built: the plain PyTorch reference runs instead, which is exact "
        "and slow. Build it with: pip install --no-build-isolation -e .",
        RuntimeWarning,
        stacklevel=2,
    )
