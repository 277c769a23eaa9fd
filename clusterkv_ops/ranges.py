"""Named ranges for the profiler, free of charge while none runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()


def named_range(name: str) -> AbstractContextManager[object]:
    """A `record_function` range while a profiler runs, nothing otherwise."""
    if torch.autograd.profiler._is_profiler_enabled:  # the process's flag; others are a thread's
        return torch.profiler.record_function(name)
    return _NOTHING
