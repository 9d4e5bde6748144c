"""When things are due: pure questions about how far a run has come."""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.units import Duration


@dataclass(frozen=True)
class Progressed:
    """How far a run has come, in every unit a duration can have. The first rank's clock is everyone's."""

    steps: int
    epochs: float
    seconds: float

    def in_unit(self, unit: str) -> float:
        return {"steps": float(self.steps), "epochs": self.epochs, "seconds": self.seconds}[unit]


def reached(goal: Duration, now: Progressed) -> bool:
    return now.in_unit(goal.unit) >= goal.value


def due(every: Duration, before: Progressed, now: Progressed) -> bool:
    """Whether a multiple of `every` lies after `before` and not after `now`."""
    return now.in_unit(every.unit) // every.value > before.in_unit(every.unit) // every.value


def fraction(goal: Duration, now: Progressed) -> float:
    return min(1.0, now.in_unit(goal.unit) / goal.value)
