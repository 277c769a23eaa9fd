"""The table that gives time to a phase, a layer, a call: names of ranges, operators and kernels.

Two kinds of phases. MODEL is the model's own compute. OVERHEAD is what the method adds, and what
no model can do without but is not compute: communication between ranks, and memory (the model's
own copies and memsets). Its order is the order in which an exposed instant is given away: first
what the next token waits for.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

OVERHEAD = ("selection", "recall", "clustering", "offload", "communication", "memory")
MODEL = ("attention", "linear", "other")
PHASES = OVERHEAD + MODEL
MODES = ("prefill", "extend", "decode", "step", "all")

# What the rows of a report stand in, in the order of the method.
SHOWN = (
    "clustering",
    "selection",
    "recall",
    "offload",
    "communication",
    "memory",
    "attention",
    "linear",
    "other",
)

# Operators of this package, in traces as `clusterkv::<operator>`; kernels as
# `clusterkv_<operator>...`.
_OPERATORS = {
    "assign_clusters": "clustering",
    "update_centroids": "clustering",
    "cluster_keys": "clustering",
    "extend_index": "clustering",
    "build_index": "clustering",
    "select_clusters": "selection",
    "recall": "recall",
    "gather": "recall",
    "selected_attention": "attention",
    "merge_states": "attention",
}
# Ranges opened inside operator bodies, `clusterkv.<phase>`.
_RANGES = {phase: phase for phase in ("clustering", "selection", "recall", "offload", "attention")}
_RANGES["append"] = "other"

_RANGE = re.compile(r"clusterkv\.(\w+?)(?:\.(\w+))?(?:\s.*)?$")
_OPERATOR = re.compile(rf"clusterkv(?:::|_)({'|'.join(_OPERATORS)})")
_MODEL_OPERATOR = (
    (
        "attention",
        re.compile(
            r"aten::_?(scaled_dot_product|\w*flash_attention|efficient_attention|cudnn_attention)"
        ),
    ),
    (
        "linear",
        re.compile(
            r"(aten|mkldnn|mkl|onednn)::_?\w*(mm|bmm|linear|matmul|linear_pointwise)(_out|_prepacked)?$"
        ),
    ),
)
_KERNEL = (
    ("communication", re.compile(r"^(nccl|rccl|hccl)|ncclKernel|ncclDevKernel", re.IGNORECASE)),
    ("attention", re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)),
    ("linear", re.compile(r"gemm|gemv|cutlass|Cijk_|nvjet|cublas|splitK", re.IGNORECASE)),
)


class Rule(NamedTuple):
    """What a range or operator name says; None where it says nothing.

    Attributes:
        phase: of the time inside it.
        is_own: the phase comes from this package, and wins over what encloses it.
        mode: it is a call of the model: "prefill", "extend", "decode" or, of a foreign trace,
        "step".
        layer: it is one attention site of the model.
        waits_for: it is time that the thread only waits, and for which phase.
    """

    phase: str | None = None
    is_own: bool = False
    mode: str | None = None
    layer: int | None = None
    waits_for: str | None = None


NOTHING = Rule()


@lru_cache(maxsize=65536)
def range_rule(name: str) -> Rule:
    """The rule of a CPU range or operator."""
    if name.startswith("clusterkv"):
        return _own_rule(name)
    if name.startswith("ProfilerStep#"):
        return Rule(mode="step")
    for phase, pattern in _MODEL_OPERATOR:
        if pattern.search(name):
            return Rule(phase=phase)
    return NOTHING


def _own_rule(name: str) -> Rule:
    operator = _OPERATOR.match(name)
    if operator:
        return Rule(phase=_OPERATORS[operator[1]], is_own=True)
    found = _RANGE.match(name)
    if not found:
        return NOTHING
    word, detail = found.groups()
    if word in ("prefill", "extend", "decode"):
        return Rule(mode=word)
    if word == "layer" and detail and detail.isdigit():
        return Rule(layer=int(detail))
    if word == "wait":
        return Rule(waits_for=detail if detail in PHASES else "unknown")
    return Rule(phase=_RANGES[word], is_own=True) if word in _RANGES else NOTHING


@lru_cache(maxsize=65536)
def kernel_phase(name: str) -> str | None:
    """The phase that a device kernel's own name tells, None where it tells nothing."""
    operator = _OPERATOR.search(name)
    if operator:
        return _OPERATORS[operator[1]]
    for phase, pattern in _KERNEL:
        if pattern.search(name):
            return phase
    return None


def is_own_kernel(name: str) -> bool:
    """Whether the kernel belongs to this package."""
    return "clusterkv_" in name


def copy_phase(name: str) -> str | None:
    """The phase of a copy about which nothing but its direction is known (CUDA graph replay)."""
    if "HtoD" in name:
        return "recall"
    return "offload" if "DtoH" in name else None


def is_communication(name: str) -> bool:
    """Whether the kernel talks to other ranks."""
    return kernel_phase(name) == "communication"
