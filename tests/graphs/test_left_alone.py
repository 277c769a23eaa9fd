"""Which attention calls are left alone, and the reason that is given.

The names of tensors are explained in captured.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from clusterkv_ops.graphs.backend import clusterkv_backend
from clusterkv_ops.graphs.sites import find_sites
from tests.graphs.captured import (
    GROUP,
    HKV,
    HQ,
    B,
    D,
    N,
    T,
    captured,
    cat,
    cat_then,
    inputs_of,
    masked,
    random,
    repeated,
    site_of,
)
from tests.graphs.models import make, prompt


def _cross(q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, pk, pv, enable_gqa=True)


def _not_returned(q: Tensor, *cached: Tensor) -> Tensor:
    return sdpa(q, *cat(*cached), enable_gqa=True)


def _also_used(q: Tensor, *cached: Tensor) -> Any:
    keys, values = cat(*cached)
    return sdpa(q, keys, values, enable_gqa=True), keys, values, keys.sum()


def _window(q: Tensor, *cached: Tensor) -> Any:
    keys, values = cat(*cached)
    return sdpa(q, keys, values, enable_gqa=True), keys[:, :, -8:], values[:, :, -8:]


def _softmax(q: Tensor, *cached: Tensor) -> Any:
    keys, values = cat(*cached)
    weights = (q @ repeated(keys).mT).softmax(-1)
    return weights @ repeated(values), keys, values


def _soft_capped(q: Tensor, *cached: Tensor) -> Any:
    keys, values = cat(*cached)
    weights = torch.softmax(30 * torch.tanh(q @ repeated(keys).mT / 30), -1)
    return weights @ repeated(values), keys, values


def _mixed_idioms(q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor) -> Any:
    keys = torch.cat([pk, k], 2)
    pv.index_copy_(2, torch.tensor([3]), v)
    return sdpa(q, keys, pv, enable_gqa=True), keys


def _mixed_layouts(q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor) -> Any:
    keys, values = torch.cat([pk, k], 2), torch.cat([pv, v.transpose(1, 2)], 1)
    return sdpa(q, keys, values.transpose(1, 2), enable_gqa=True), keys, values


def _three_pieces(q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor) -> Any:
    keys, values = torch.cat([pk, k, k], 2), torch.cat([pv, v, v], 2)
    return sdpa(q, keys, values, enable_gqa=True), keys, values


def _computed_past(q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor) -> Any:
    keys, values = cat(pk * 2, pv, k, v)
    return sdpa(q, keys, values, enable_gqa=True), keys, values


def _unlike_batches(q: Tensor, *cached: Tensor) -> Any:
    keys, values = cat(*cached)
    return sdpa(q[:1], keys, values, enable_gqa=True), keys, values


def _unlike_widths(q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor) -> Any:
    keys, values = cat(pk, pv[..., :4], k, v[..., :4])
    return sdpa(q, keys, values, enable_gqa=True), keys, values


def _three_dimensions(q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor) -> Any:
    keys, values = cat(pk[0], pv[0], k[0], v[0], dim=1)
    return sdpa(q[0, :HKV], keys, values), keys, values


def _constant(q: Tensor, *_: Tensor) -> Tensor:
    keys = torch.zeros(B, HKV, T, D)
    return sdpa(q, keys, keys, enable_gqa=True)


def _written_twice(q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for start in (3, 4):
        pk[:, :, start : start + 1] = k
        pv[:, :, start : start + 1] = v
    return sdpa(q, pk, pv, enable_gqa=True)


def _written_by_heads(q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pk[:, 1:2] = k[:, :1]
    pv[:, 1:2] = v[:, :1]
    return sdpa(q, pk, pv, enable_gqa=True)


def _computed_buffer(q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pk, pv = pk + 1, pv + 1
    pk[:, :, 3:4] = k
    pv[:, :, 3:4] = v
    return sdpa(q, pk, pv, enable_gqa=True)


def _wrong_repeat(x: Tensor) -> Tensor:
    """Heads 0 1 0 1 instead of 0 0 1 1, by views."""
    return x[:, None].expand(-1, GROUP, -1, -1, -1).reshape(B, HQ, x.shape[2], D)


_OTHER = "come from a concatenation of another kind"
LEFT_ALONE: dict[str, tuple[Any, str]] = {
    "cross-attention": (
        _cross,
        "cross-attention, or a cache that does not grow: keys are not written",
    ),
    "dropout": (cat_then(lambda x: x, enable_gqa=True, dropout_p=0.1), "dropout"),
    "softmax": (
        _softmax,
        "attention by softmax: load the model with attn_implementation='sdpa'",
    ),
    "soft-cap": (_soft_capped, "soft-capped attention"),
    "sliding window": (_window, "sliding window: a part of the cached keys is kept"),
    "cache not returned": (_not_returned, "no cache: concatenated keys are not returned"),
    "cache used elsewhere": (_also_used, "cached keys are also used by sum"),
    "cut before attention": (
        cat_then(lambda x: x[:, :, :8], enable_gqa=True),
        "cached keys are cut before attention",
    ),
    "keys cat, values in place": (_mixed_idioms, "keys and values are cached in different ways"),
    "unlike layouts": (_mixed_layouts, "keys and values are cached in different ways"),
    "three pieces": (_three_pieces, f"no cache: keys {_OTHER}"),
    "cat of heads": (cat_then(lambda x: x, dim=1, enable_gqa=False), f"no cache: keys {_OTHER}"),
    "tile": (cat_then(lambda x: x.repeat(1, GROUP, 1, 1)), "no cache: keys come from repeat"),
    "tile by views": (cat_then(_wrong_repeat), "no cache: keys come from reshape"),
    "computed past": (_computed_past, "cached keys are computed in the graph by mul"),
    "unlike batches": (_unlike_batches, "query and keys differ in batch size"),
    "unlike head_dim": (_unlike_widths, "keys and values differ in head_dim"),
    "three dimensions": (_three_dimensions, "query, key and value are not [B, H, T, D]"),
    "constant": (_constant, "keys come from a constant"),
    "written twice": (_written_twice, "the keys buffer is written 2 times"),
    "written by heads": (
        _written_by_heads,
        "the keys buffer is written along dimension 1, not its tokens",
    ),
    "computed buffer": (_computed_buffer, "the keys buffer is computed in the graph by add"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_everything_else_is_left_alone_with_a_reason(name: str) -> None:
    function, reason = LEFT_ALONE[name]
    inputs = inputs_of()
    if name == "cat of heads":
        inputs = [inputs[0], *(random(B, HKV, T, D) for _ in "four")]
    if name == "keys cat, values in place":
        inputs[2] = random(B, HKV, T + N, D)
    if name == "unlike layouts":
        inputs[2] = inputs[2].transpose(1, 2).contiguous()
    assert site_of(function, *inputs).reason == reason


def test_wide_heads_and_unsupported_types_are_left_alone() -> None:
    function = cat_then(lambda x: x, enable_gqa=True)
    assert site_of(function, *inputs_of(head_dim=256)).reason == ""
    assert site_of(function, *inputs_of(head_dim=264)).reason == "head_dim 264 is over 256"
    doubles = [x.double() for x in inputs_of()]
    supported = "(supported: float32, bfloat16, float16)"
    assert site_of(function, *doubles).reason == f"dtype torch.float64 {supported}"


def test_gradients_are_left_alone() -> None:
    q, *cached = inputs_of()
    gm = captured(cat_then(lambda x: x, enable_gqa=True), q.requires_grad_(), *cached)
    (site,) = find_sites(gm.graph)
    assert site.reason == "gradients are on: call the model under torch.no_grad()"


def test_flex_attention_is_left_alone() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def function(q: Tensor, *cached: Tensor) -> Any:
        keys, values = cat(*cached)
        return flex_attention(q, keys, values, enable_gqa=True), keys, values

    reason = "flex_attention: load the model with attn_implementation='sdpa'"
    assert site_of(function, *inputs_of()).reason == reason


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.ones(N, T + N, dtype=torch.int64), "unknown mask: dtype torch.int64"),
        (torch.ones(T + N), "unknown mask"),
        (None, "unknown mask"),
    ],
)
def test_unknown_masks_are_left_alone(value: Any, reason: str) -> None:
    gm = captured(masked, *inputs_of(), random(B, 1, N, T + N))
    attention = next(node for node in gm.graph.nodes if node.target is sdpa)
    attention.args[3].meta["example_value"] = value
    with torch.no_grad():
        assert find_sites(gm.graph)[0].reason == reason


def test_a_computed_scale_is_left_alone() -> None:
    gm = captured(cat_then(lambda x: x, enable_gqa=True), *inputs_of())
    attention = next(node for node in gm.graph.nodes if node.target is sdpa)
    attention.kwargs = {**attention.kwargs, "scale": attention.args[0]}
    with torch.no_grad():
        assert find_sites(gm.graph)[0].reason == "the softmax scale is computed in the graph"


def test_sliding_window_layers_of_transformers_are_left_alone() -> None:
    def generate(model: Any) -> list[int]:
        tokens: list[int] = model.generate(prompt(1, 40), max_new_tokens=6, do_sample=False)
        return tokens

    expected, model = generate(_windowed()), _windowed()
    backend = clusterkv_backend(budget=32, inner="eager")
    model.compile(backend=backend)
    with pytest.warns(RuntimeWarning, match="stays dense: sliding window"):
        seen = generate(model)
    assert torch.equal(seen, expected)
    assert backend.stats().sites_rewritten == 0
    assert "left alone: sliding window" in backend.explain()


def _windowed() -> Any:
    like = make("mistral").config.to_dict()
    torch.manual_seed(0)
    model = tf.MistralForCausalLM(tf.MistralConfig(**{**like, "sliding_window": 16})).eval()
    model.generation_config.eos_token_id = None
    return model
