"""The examples in the docstrings run and print what they say."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("stem", ["clustering", "selection", "recall", "attention", "config"])
def test_examples_print_what_they_say(stem: str) -> None:
    module = import_module(f"clusterkv_ops.{stem}")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0
