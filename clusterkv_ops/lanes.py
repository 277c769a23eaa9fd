"""Where work runs that the model doesn't wait for: lanes.

`Lane.submit` starts a piece of work, `Task.wait` returns when it is done. On the CPU a lane is a
worker thread; work of one lane runs in the order of submission.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Task(Protocol[T_co]):
    """Work that was submitted to a lane."""

    def wait(self) -> T_co:
        """The work's result, as soon as it is there; raises what the work raised."""


class Lane(Protocol):
    """A place where work runs in the order of its submission."""

    def submit(self, work: Callable[[], T]) -> Task[T]:
        """Start `work` and return at once."""


class _Done(Generic[T]):
    def __init__(self, result: T) -> None:
        self.result = result

    def wait(self) -> T:
        return self.result


class MainLane:
    """Runs work at once, on the caller's thread: what asynchronous lanes are compared with."""

    def submit(self, work: Callable[[], T]) -> Task[T]:
        return _Done(work())


class _Running(Generic[T]):
    def __init__(self, future: Future[T]) -> None:
        self.future = future

    def wait(self) -> T:
        return self.future.result()


class WorkerLane:
    """Runs work on one thread of its own, started at the first submission."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, work: Callable[[], T]) -> Task[T]:
        is_inference = torch.is_inference_mode_enabled()

        def run() -> T:
            with torch.inference_mode(is_inference), torch.no_grad():
                return work()

        return _Running(self._executor.submit(run))


_lanes: dict[str, WorkerLane] = {}
_lock = threading.Lock()


def side_lane(name: str) -> WorkerLane:
    """The process's worker lane of that name."""
    with _lock:
        if name not in _lanes:
            _lanes[name] = WorkerLane(f"clusterkv-{name}")
        return _lanes[name]
