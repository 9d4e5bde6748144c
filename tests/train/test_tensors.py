"""Parts of tensors in files, which read as one file whatever the number of ranks that wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from packtrain.run.checkpoint import CorruptCheckpoint, part_name
from packtrain.train.tensors import open_tensors, save_tensors, shapes_of, shard_rows

WEIGHTS = {"matrix": torch.arange(21.0).view(7, 3), "row": torch.arange(2.0), "one": torch.ones(1)}
COUNTER = torch.tensor(5)


def write_parts(directory: Path, num_ranks: int) -> None:
    for rank in range(num_ranks):
        own: dict[str, Tensor] = {} if rank else {"counter": COUNTER}
        rows = {}
        for name, tensor in WEIGHTS.items():
            first, after = shard_rows(len(tensor), num_ranks, rank)
            if first < after:
                own[name], rows[name] = tensor[first:after].clone(), (first, len(tensor))
        save_tensors(directory / part_name("model.safetensors", rank, num_ranks), own, rows)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 2, 7, 8])
def test_rows_are_divided_as_torch_divides_them(num_ranks: int, rows: int) -> None:
    chunks = torch.arange(rows).chunk(num_ranks)
    divided = [shard_rows(rows, num_ranks, rank) for rank in range(num_ranks)]
    assert [list(range(*one)) for one in divided if one[0] < one[1]] == [chunk.tolist() for chunk in chunks]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 10])
def test_parts_of_any_number_of_ranks_read_as_one_file(tmp_path: Path, num_ranks: int) -> None:
    write_parts(tmp_path, num_ranks)
    found = open_tensors(tmp_path, "model.safetensors")
    assert shapes_of(found) == {**shapes_of(WEIGHTS), "counter": ()}
    assert all(torch.equal(found[name].read(), tensor) for name, tensor in WEIGHTS.items())
    assert int(found["counter"].read()) == 5


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("readers", [1, 2, 5, 9])
def test_any_other_number_of_ranks_reads_its_own_rows(tmp_path: Path, num_ranks: int, readers: int) -> None:
    write_parts(tmp_path, num_ranks)
    matrix = open_tensors(tmp_path, "model.safetensors")["matrix"]
    own = [matrix.read_rows(*shard_rows(7, readers, rank)) for rank in range(readers)]
    assert torch.equal(torch.cat(own), WEIGHTS["matrix"])


def test_a_whole_file_is_read_in_the_same_way(tmp_path: Path) -> None:
    save_tensors(tmp_path / "model.safetensors", dict(WEIGHTS), {})
    matrix = open_tensors(tmp_path, "model.safetensors")["matrix"]
    assert torch.equal(matrix.read_rows(2, 5), WEIGHTS["matrix"][2:5])


def test_a_missing_part_is_noticed(tmp_path: Path) -> None:
    write_parts(tmp_path, 3)
    (tmp_path / "model-2-of-3.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"^model\.safetensors cannot be read: it is missing, or a part of it"):
        open_tensors(tmp_path, "model.safetensors")


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ({"matrix": [0, 7]}, "rows of matrix are missing or there twice"),
        ({"matrix": [5, 7]}, "rows of matrix are missing or there twice"),
        ({"matrix": [4, 8]}, "rows of matrix are missing or there twice"),
        ({}, "several parts have matrix"),
        ({"matrix": ["4", 7]}, "its rows are not numbers"),
        ([], "its rows are not numbers"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(tmp_path: Path, rows: object, fault: str) -> None:
    write_parts(tmp_path, 2)
    path = tmp_path / "model-2-of-2.safetensors"
    save_file({"matrix": WEIGHTS["matrix"][4:].clone()}, path, {"rows": json.dumps(rows)})
    with pytest.raises(CorruptCheckpoint, match=fault):
        open_tensors(tmp_path, "model.safetensors")
