"""Starts TensorBoard with this package's tab, whether or not the package is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterkv_ops.profiling.plugin_loader import ClusterKVLoader

NEEDS = "TensorBoard is not installed: pip install 'clusterkv-ops[profile]'"


def serve(logdir: Path, port: int, *, is_offline: bool) -> int:
    """Serves `logdir` on 127.0.0.1 until interrupted; returns the exit code.

    Raises:
        ImportError: TensorBoard is missing, or with `is_offline` torch-tb-profiler.
    """
    try:
        from tensorboard import program
    except ImportError:
        raise ImportError(NEEDS) from None
    server = program.TensorBoard(plugins=plugins(is_offline))
    server.configure(
        ["tensorboard", "--logdir", str(logdir), "--host", "127.0.0.1", "--port", str(port)]
    )
    code: int = server.main()
    return code


def plugins(is_offline: bool) -> list[Any]:
    """TensorBoard's plugins, ours once, and the offline form of torch-tb-profiler if asked."""
    from tensorboard import default

    found = [p for p in default.get_plugins() if getattr(p, "__name__", "") != "ClusterKVLoader"]
    if is_offline:
        from clusterkv_ops.profiling.offline_plugin import OfflineProfilerPlugin

        stock = OfflineProfilerPlugin.__mro__[1]
        found = [p for p in found if p is not stock]
        found.append(OfflineProfilerPlugin)
    return [*found, ClusterKVLoader]
