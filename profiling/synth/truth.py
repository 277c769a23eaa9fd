"""What a synthetic trace contains, in nanoseconds, added up while it is planned."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PhaseTruth:
    """One phase of a mode."""

    busy: int = 0
    hidden: int = 0
    exposed: int = 0
    count: int = 0
    bytes: int = 0

    def add(
        self, busy: int, *, hidden: int = 0, exposed: int = 0, count: int = 1, moved: int = 0
    ) -> None:
        """Counts more work of the phase."""
        self.busy += busy
        self.hidden += hidden
        self.exposed += exposed
        self.count += count
        self.bytes += moved


@dataclass
class ModeTruth:
    """One mode: wall = exposed of all phases + idle."""

    calls: int = 0
    wall: int = 0
    idle: int = 0
    phases: dict[str, PhaseTruth] = field(default_factory=dict)

    def phase(self, name: str) -> PhaseTruth:
        """The phase, made when first asked for."""
        return self.phases.setdefault(name, PhaseTruth())

    def add_model(self, phase: str, time: int) -> None:
        """Model compute on the main lane that overlaps no other model compute."""
        self.phase(phase).add(time, exposed=time)
        self.wall += time

    def add_exposed(self, phase: str, time: int, *, count: int = 1, moved: int = 0) -> None:
        """Overhead during which the model stands still."""
        self.phase(phase).add(time, exposed=time, count=count, moved=moved)
        self.wall += time


Truth = dict[str, ModeTruth]
