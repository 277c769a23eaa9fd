"""Which machine a number was measured on."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch


def machine() -> dict[str, str | int]:
    """What a reader needs to judge a measured time."""
    facts: dict[str, str | int] = {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_name(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def machine_line() -> str:
    """The same on one line."""
    facts = machine()
    gpu = f"{facts['gpu']}, " if "gpu" in facts else ""
    return (
        f"{gpu}{facts['cpu']} ({facts['isa']}), {facts['cores']} cores, {facts['threads']} "
        f"threads, torch {facts['torch']}, Python {facts['python']}, {facts['date']}"
    )


def _cpu_name() -> str:
    """The CPU's name, with family and model where the name says little."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        return platform.processor() or platform.machine()
    name = fields.get("model name", platform.machine())
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']} model {fields.get('model', '?')})"
    return name
