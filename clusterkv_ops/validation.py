"""Checks of the verbs' arguments, with one message format: `name: expected X, got Y`.

Everything here can be traced by Dynamo without a graph break: the good path reads shapes, dtypes
and devices and formats nothing. Checks that must read a tensor's contents run in eager mode only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clusterkv_ops.types import ClusterIndex

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
HEAD_RULES = ("query_head", "kv_head")


def error(name: str, expected: str, got: object) -> ValueError:
    """The exception for a value out of its range."""
    return ValueError(f"{name}: expected {expected}, got {got}")


def check_tensor(
    name: str, value: Any, *dtypes: torch.dtype, has_any_strides: bool = False
) -> None:
    """A tensor of one of `dtypes`, its rows contiguous, which nobody wants a gradient of."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise error(name, f"dtype {expected}", str(value.dtype).removeprefix("torch."))
    if value.requires_grad and torch.is_grad_enabled():
        raise error(name, "no gradient (inference only: use torch.no_grad())", "requires_grad")
    if not has_any_strides and value.dim() > 0 and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise error(name, "stride 1 in the last dimension", value.stride(-1))


def check_type(name: str, value: Any, kind: type) -> None:
    """One of the nouns of `types.py`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")


def check_shape(name: str, tensor: Tensor, *dims: Any) -> None:
    """A size for each of `dims`: an integer must match, a letter stands for any size."""
    is_equal = len(tensor.shape) == len(dims)
    if is_equal:
        for size, dim in zip(tensor.shape, dims, strict=True):
            if not isinstance(dim, str) and size != dim:
                is_equal = False
    if not is_equal:
        expected = ", ".join(str(dim) for dim in dims)
        raise error(name, f"shape [{expected}]", list(tensor.shape))


def check_same(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """The dtype of `other`, on its device."""
    if tensor.dtype != other.dtype:
        expected = str(other.dtype).removeprefix("torch.")
        got = str(tensor.dtype).removeprefix("torch.")
        raise error(name, f"dtype {expected} like {other_name}", got)
    check_device(name, tensor, other_name, other)


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """The device of `other`."""
    if tensor.device != other.device:
        raise error(name, f"device {other.device} like {other_name}", tensor.device)


def check_at_least(name: str, value: Any, low: int) -> None:
    """An integer (not a bool) that isn't smaller than `low`."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < low:
        raise error(name, f"at least {low}", value)


def check_keys(name: str, keys: Any) -> None:
    """Keys as the operators read them: `[B, Hkv, T, D]`, any strides of B, Hkv and T."""
    check_tensor(name, keys, *FLOATS)
    check_shape(name, keys, "B", "Hkv", "T", "D")
    if keys.shape[3] > MAX_HEAD_DIM or keys.shape[3] < 1:
        raise error(name, f"head_dim from 1 to {MAX_HEAD_DIM}", keys.shape[3])
    if keys.shape[2] < 1:
        raise error(name, "at least one token", list(keys.shape))


def check_query(query: Any, num_kv_heads: int, batch: int, head_dim: int) -> None:
    """One query token `[B, Hq, 1, D]` whose heads are shared out evenly over the KV heads."""
    check_tensor("query", query, *FLOATS)
    check_shape("query", query, batch, "Hq", 1, head_dim)
    if query.shape[1] % num_kv_heads != 0 or query.shape[1] == 0:
        raise error("query", f"a multiple of {num_kv_heads} heads", query.shape[1])


def check_valid(valid: Any, keys: Tensor) -> None:
    """Token ranges `[B, 2]` int32 inside the keys."""
    check_tensor("valid", valid, torch.int32, has_any_strides=True)
    check_shape("valid", valid, keys.shape[0], 2)
    check_device("valid", valid, "keys", keys)
    if not is_readable():
        return
    begin, end = valid.unbind(dim=1)
    if not _all((begin >= 0) & (begin <= end) & (end <= keys.shape[2])):
        expected = f"begin and end in order, from 0 to {keys.shape[2]}"
        raise error("valid", expected, valid.tolist())


def check_finite_keys(keys: Tensor, valid: Tensor | None) -> None:
    """No NaN and no infinity in any key that will be clustered."""
    if not is_readable():
        return
    is_good = torch.isfinite(keys).all(dim=-1)
    if valid is not None:
        token = torch.arange(keys.shape[2], device=keys.device)
        is_padding = (token < valid[:, :1]) | (token >= valid[:, 1:])
        is_good |= is_padding[:, None, :]
    if not _all(is_good):
        raise error("keys", "finite values", "NaN or infinity")


def check_index(
    index: Any, batch: Any = "B", num_kv_heads: Any = "Hkv", head_dim: Any = "D"
) -> None:
    """A `ClusterIndex` whose three tensors fit together, with rows that never decrease."""
    check_type("index", index, ClusterIndex)
    centroids, indptr, indices = index
    check_tensor("index.centroids", centroids, torch.float32)
    check_shape("index.centroids", centroids, batch, num_kv_heads, "C", head_dim)
    batch, num_kv_heads, num_clusters, _ = centroids.shape
    if num_clusters < 1:
        raise error("index.centroids", "at least one cluster", list(centroids.shape))
    check_tensor("index.indptr", indptr, torch.int32)
    check_shape("index.indptr", indptr, batch, num_kv_heads, num_clusters + 1)
    check_device("index.indptr", indptr, "index.centroids", centroids)
    check_tensor("index.indices", indices, torch.int32)
    check_shape("index.indices", indices, batch, num_kv_heads, "T")
    check_device("index.indices", indices, "index.centroids", centroids)
    if is_readable():
        _check_rows(indptr, indices)


def check_positions(name: str, tensor: Tensor, end: int) -> None:
    """Entries from -1 to `end` - 1."""
    if is_readable() and tensor.numel() and not _all((tensor >= -1) & (tensor < end)):
        low, high = tensor.aminmax()
        raise error(name, f"entries from -1 to {end - 1}", f"{int(low)} to {int(high)}")


def is_readable() -> bool:
    """Whether tensors have contents to look at: not while a graph is traced."""
    return not torch.compiler.is_compiling()


def _check_rows(indptr: Tensor, indices: Tensor) -> None:
    if not _all(indptr[..., 0] == 0):
        raise error("index.indptr", "rows that start at 0", indptr[..., 0].flatten().tolist())
    if not _all(indptr.diff(dim=-1) >= 0):
        raise error("index.indptr", "rows that never decrease", "a decrease")
    if not _all(indptr[..., -1] <= indices.shape[-1]):
        raise error("index.indptr", f"at most {indices.shape[-1]} tokens", int(indptr.max()))
    position = torch.arange(indices.shape[-1], device=indices.device)
    if not _all((indices >= 0) | (position >= indptr[..., -1:])):
        raise error("index.indices", "a token at each place that indptr spans", "-1")


def _all(condition: Tensor) -> bool:
    return bool(condition.all())
