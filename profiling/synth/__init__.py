"""Traces whose true numbers are known in closed form: for tests, demos and screenshots.

`synthesize(kind)` returns a trace as the profiler would write it, and its `Truth` in nanoseconds.
"""

from clusterkv_ops.profiling.synth.scenarios import KINDS, synthesize
from clusterkv_ops.profiling.synth.truth import ModeTruth, PhaseTruth, Truth

__all__ = ["KINDS", "ModeTruth", "PhaseTruth", "Truth", "synthesize"]
