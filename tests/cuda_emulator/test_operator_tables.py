"""The operator tests of tests/ops once more, with the CUDA kernels behind the operators.

The `device` fixture of this folder's conftest.py takes the place of the usual one.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import tests.ops

# About other things than a kernel's results, or about errors that a device can't raise.
LEFT_OUT = ("opcheck", "compile", "number_of_threads", "is_refused", "on_both_devices")
NOT_OF_OPERATORS = ("test_cpu_isa", "test_registry", "test_docs", "test_without_extension")

for module in pkgutil.iter_modules(tests.ops.__path__):
    if not module.name.startswith("test_") or module.name in NOT_OF_OPERATORS:
        continue
    stem = module.name.removeprefix("test_")
    for name, test in vars(importlib.import_module(f"tests.ops.{module.name}")).items():
        if not name.startswith("test_") or any(part in name for part in LEFT_OUT):
            continue
        if "device" in inspect.signature(test).parameters:
            globals()[f"test_{stem}_{name.removeprefix('test_')}"] = test
