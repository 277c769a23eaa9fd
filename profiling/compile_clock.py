"""How long Dynamo and its backends compile, so that a timed call can leave it out."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch._dynamo.callback import CallbackArgs, callback_handler


class CompileClock:
    """Seconds that Dynamo and its backends spent compiling since it was entered.

    `on_compiled` is called each time a compilation has ended, before what it made runs.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.on_compiled: Callable[[], None] = lambda: None
        self._start = 0.0

    def __enter__(self) -> CompileClock:
        callback_handler.register_start_callback(self._started)
        callback_handler.register_end_callback(self._ended)
        return self

    def __exit__(self, *_: object) -> None:
        callback_handler.remove_start_callback(self._started)
        callback_handler.remove_end_callback(self._ended)

    def _started(self, _: CallbackArgs) -> None:
        self._start = time.perf_counter()

    def _ended(self, _: CallbackArgs) -> None:
        self.seconds += time.perf_counter() - self._start
        self.on_compiled()
