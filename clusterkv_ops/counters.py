"""What happened so far, counted: sparse and dense steps, copies, recall traffic."""

from __future__ import annotations

import threading
from collections import Counter

from torch import Tensor


class Counters:
    """Named counts that several threads may add to.

    Counts that live on a device are added there and only read by `snapshot`, so that a decode
    step never waits for one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._host: Counter[str] = Counter()
        self._device: dict[str, Tensor] = {}

    def add(self, **counts: int) -> None:
        with self._lock:
            self._host.update(counts)

    def add_on_device(self, **counts: Tensor) -> None:
        with self._lock:
            for name, count in counts.items():
                total = count.sum()
                known = self._device.get(name)
                self._device[name] = total if known is None else known + total.to(known.device)

    def snapshot(self) -> dict[str, int]:
        """Every count. Waits for the device where a count lives on one."""
        with self._lock:
            return {**self._host, **{name: int(n) for name, n in self._device.items()}}
