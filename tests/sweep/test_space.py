from __future__ import annotations

from collections import Counter

import pytest

from packtrain.errors import Mistake
from packtrain.sweep.space import combinations_of, read_axes, split_values


def combined(*grid: str, draws: int | None = None, seed: int = 1) -> list[dict[str, str]]:
    return [dict(one) for one in combinations_of(read_axes(grid, draws is not None), draws, seed)]


def test_a_grid_is_every_combination_in_order() -> None:
    assert combined("a=1,2", "b=x,y") == [
        {"a": "1", "b": "x"}, {"a": "1", "b": "y"}, {"a": "2", "b": "x"}, {"a": "2", "b": "y"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("tiny, base", ["tiny", "base"]),
        ("{size: tiny, heads: 2},base", ["{size: tiny, heads: 2}", "base"]),
        ("[1, 2],[3]", ["[1, 2]", "[3]"]),
        ('"5,000 steps",100 steps', ['"5,000 steps"', "100 steps"]),
        ("1,", ["1", ""]),
    ],
)
def test_values_are_split_at_commas_outside_of_brackets_and_quotes(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_random_combinations_are_different_and_the_same_for_the_same_seed() -> None:
    grid = ("a=1,2,3,4,5", "b=1,2,3,4,5", "c=x,y")
    drawn = combined(*grid, draws=20)
    assert len({tuple(one.values()) for one in drawn}) == 20
    assert drawn == combined(*grid, draws=20)
    assert drawn != combined(*grid, draws=20, seed=2)
    assert all(one in combined(*grid) for one in drawn)


def test_wide_ranges_are_drawn_on_a_logarithmic_scale() -> None:
    drawn = [float(one["rate"]) for one in combined("rate=0.0001..0.1", draws=300)]
    assert min(drawn) >= 0.0001
    assert max(drawn) <= 0.1
    decades = Counter("0.001" if rate < 0.001 else "0.01" if rate < 0.01 else "0.1" for rate in drawn)
    assert min(decades.values()) > 50, "a third of them in each decade, more or less"


def test_ranges_of_whole_numbers_keep_their_unit() -> None:
    for one in combined("warmup=100..800 steps", "mode=x,y", draws=20):
        number, unit = one["warmup"].split()
        assert (100 <= int(number) <= 800, unit) == (True, "steps")


@pytest.mark.parametrize(
    ("grid", "draws", "words"),
    [
        ([], None, "at least one --grid"),
        (["train.seed"], None, "--grid train.seed: write it as field=value,value"),
        (["train.seed=1,,2"], None, "has an empty value"),
        (["train.seed=1,1"], None, "lists a value twice"),
        (["a=1,2", "a=3"], None, "--grid a: is given twice"),
        (["name=a,b"], None, "cannot be swept"),
        (["store=a,b"], None, "cannot be swept"),
        (["a=1..5"], None, "add --random N"),
        (["a=5..1"], 2, "smaller number of a range first"),
        (["a=1,2"], 2, "the grid has only 2 combinations"),
        (["a=1..3"], 9, "too few different values; ask for at most 3"),
        (["a=1..3"], 2000, "at most 1,000 runs"),
        ([f"{name}={','.join(map(str, range(40)))}" for name in "ab"], None, "1,600 combinations are more than 1,000"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(grid: list[str], draws: int | None, words: str) -> None:
    with pytest.raises(Mistake, match=r"--|sweep") as raised:
        combined(*grid, draws=draws)
    assert words in str(raised.value)
