"""What a store or a disk refuses while a run goes on: said, and tried again after pauses that grow."""

from __future__ import annotations

from packtrain.store import StoreError
from packtrain.system import say

_FIRST_SECONDS = 1.0
_PASSING_SECONDS, _LASTING_SECONDS = 4.0, 30.0  # at most: what passes by itself may be over any moment


class Trouble:
    """Before anything has gone well, a refusal that will not pass by itself is the person's to mend.

    Later on nothing is worth ending workers that work: keys are renewed, clocks set and disks made free meanwhile.
    """

    def __init__(self) -> None:
        self._went_well = False
        self.seconds = 0.0
        """To wait before the next try."""

    def over(self) -> None:
        self._went_well, self.seconds = True, 0.0

    def count(self, error: StoreError | OSError) -> None:
        """Raises what is not to be tried again."""
        passes = isinstance(error, StoreError) and error.temporary
        if not self._went_well and not passes:
            raise error
        self.seconds = min(_PASSING_SECONDS if passes else _LASTING_SECONDS, max(_FIRST_SECONDS, 2 * self.seconds))
        say(f"warning: {error}; the agent tries again in {self.seconds:g} s")
