"""Who waits for data leaves for a stop, alone and together; who has data goes on."""

from __future__ import annotations

import pytest

from packtrain.train.world import Gate, LeftEarly, World


class Others(World):
    """Two ranks: the other one votes as it is told to."""

    def __init__(self, lacks: bool, stops: bool) -> None:
        super().__init__(num_ranks=2)
        self._votes = (lacks, stops)

    def count(self, *here: bool) -> list[int]:
        return [own + other for own, other in zip(here, self._votes, strict=True)]


@pytest.mark.parametrize("stop", [False, True])
def test_where_all_have_data_they_go_on_and_a_stop_is_left_to_the_step(stop: bool) -> None:
    assert Gate(World(), lambda: stop).vote(ready=True)
    assert Gate(Others(lacks=False, stops=stop), lambda: False).vote(ready=True)


@pytest.mark.parametrize(("ready", "lacks"), [(False, False), (True, True), (False, True)])
def test_where_one_lacks_its_data_all_wait_and_leave_for_the_stop_of_any(ready: bool, lacks: bool) -> None:
    assert not Gate(Others(lacks, stops=False), lambda: False).vote(ready)
    for here, there in ((True, False), (False, True)):
        with pytest.raises(LeftEarly):
            Gate(Others(lacks, stops=there), lambda here=here: here).vote(ready)  # type: ignore[misc]
