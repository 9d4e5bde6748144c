from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.pack.shard import Columns, Ragged, ShardError, check_header, encode_shard, open_shard

ROWS = [[5, 6, 7], [], [8]]
U16 = np.dtype("<u2")


def written(path: Path, columns: dict[str, Ragged]) -> Path:
    path.write_bytes(encode_shard(Columns(columns)))
    return path


def file_of(path: Path, header: object, body: bytes = b"", header_bytes: int | None = None) -> Path:
    """A file as safetensors lays it out, with whatever header the test likes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if header_bytes is None else header_bytes).to_bytes(8, "little") + text + body)
    return path


def entry(dtype: str, start: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": [0], "data_offsets": [start, end]}


@given(st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=6), max_size=8))
def test_rows_round_trip(tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]]) -> None:
    path = written(tmp_path_factory.mktemp("shard") / "a", {"x": Ragged.from_rows(rows, U16)})
    column = open_shard(path).ragged["x"]
    assert [column[row].tolist() for row in range(len(column))] == rows
    assert len(column) == len(rows)
    assert column.lengths.tolist() == [len(row) for row in rows]


def test_several_columns_keep_their_own_rows_and_types(tmp_path: Path) -> None:
    columns = {"source": Ragged.from_rows(ROWS, U16), "target": Ragged.from_rows([[70_000], [], []], np.dtype("<u4"))}
    opened = open_shard(written(tmp_path / "a", columns)).ragged
    assert opened.keys() == {"source", "target"}
    assert opened["source"][0].tolist() == [5, 6, 7]
    assert opened["target"][0].tolist() == [70_000]
    assert (opened["source"].values.dtype, opened["target"].values.dtype) == (U16, np.dtype("<u4"))


def test_a_header_of_more_tensors_than_a_model_has_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    tensor = b'"w":' + json.dumps(entry("F32", 0, 0)).encode() + b","
    with pytest.raises(ValueError, match="it has 50,001 tensors, and at most 50,000 are accepted"):
        check_header(file_of(tmp_path / "many", b"{" + 50_001 * tensor + b"}"))
    check_header(file_of(tmp_path / "most", b"{" + 50_000 * tensor + b"}"))
    with pytest.raises(ValueError, match=r"its header has 90,000,000 bytes, and at most 8,388,608 are accepted"):
        check_header(file_of(tmp_path / "long", {}, header_bytes=90_000_000))


def test_the_same_columns_make_the_same_bytes() -> None:
    assert encode_shard(Columns({"x": Ragged.from_rows(ROWS, U16)})) == encode_shard(
        Columns({"x": Ragged.from_rows(ROWS, U16)})
    )


def test_any_tool_that_knows_safetensors_can_look_inside(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    arrays = load_file(written(tmp_path / "a", {"x": Ragged.from_rows(ROWS, U16)}))
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "x.values": [5, 6, 7, 8],
        "x.offsets": [0, 3, 3, 4],
    }


def test_an_opened_shard_is_the_mapped_file_and_not_a_copy(tmp_path: Path) -> None:
    path = written(tmp_path / "a", {"x": Ragged.from_rows(ROWS, U16)})
    column = open_shard(path).ragged["x"]
    for array in (column.values, column.offsets, column[0]):
        assert not array.flags.owndata
        assert not array.flags.writeable
    place = path.read_bytes().index(np.array([5, 6, 7, 8], U16).tobytes())
    with path.open("r+b") as file:
        file.seek(place)
        file.write(np.array([99], U16).tobytes())
    assert column[0].tolist() == [99, 6, 7]


def test_a_value_too_large_for_its_type_is_an_error() -> None:
    with pytest.raises(OverflowError):
        Ragged.from_rows([[65_536]], U16)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 20, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = written(tmp_path / "a", {"x": Ragged.from_rows(ROWS, U16)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ShardError, match="pack the data again") as refused:
        open_shard(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"not json", id="not JSON"),
        pytest.param(b"\xff\xff", id="not UTF-8"),
        pytest.param([1, 2], id="a list"),
        pytest.param({"x.values": 3}, id="an entry that is a number"),
        pytest.param({"x.values": {"dtype": "U8"}}, id="no offsets"),
        pytest.param({"x.values": entry("F16", 0, 0)}, id="a type that shards do not have"),
        pytest.param({"x.values": entry("U8", 0, 9)}, id="an end behind the file"),
        pytest.param({"x.values": entry("U8", -4, 0)}, id="a start before the file"),
        pytest.param({"x.values": entry("U8", 3, 1)}, id="an end before its start"),
        pytest.param({"x.values": entry("I64", 0, 3)}, id="part of a number"),
        pytest.param({"x.values": entry("U8", 0, "one")}, id="an offset that is a word"),
        pytest.param({"x.values": entry("U8", 0, float("inf"))}, id="an infinite offset"),
        pytest.param(b"[" * 100_000, id="a nest without end"),
        pytest.param({"x.offsets": entry("I64", 0, 0)}, id="offsets without values"),
    ],
)
def test_an_invalid_header_is_refused_in_one_line(tmp_path: Path, header: object) -> None:
    with pytest.raises(ShardError, match="pack the data again") as refused:
        open_shard(file_of(tmp_path / "a", header, bytes(8)))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("header_bytes", [0, 1, 3, 2**20 + 1, 2**63, 2**64 - 1])
def test_a_header_of_an_impossible_length_is_refused(tmp_path: Path, header_bytes: int) -> None:
    with pytest.raises(ShardError, match="header length"):
        open_shard(file_of(tmp_path / "a", b"{}", header_bytes=header_bytes))


@pytest.mark.parametrize(
    "offsets",
    [
        pytest.param(np.array([1, 4]), id="do not begin at 0"),
        pytest.param(np.array([0, 3]), id="end before the values"),
        pytest.param(np.array([0, 5]), id="end behind the values"),
        pytest.param(np.array([0, 9, -2, 4]), id="go back"),
        pytest.param(np.array([], np.int64), id="are none"),
        pytest.param(np.array([0, 4], np.float32), id="are not whole numbers"),
        pytest.param(np.array([0, 4], np.uint8), id="are of another type"),
    ],
)
def test_offsets_that_do_not_divide_the_values_are_refused(tmp_path: Path, offsets: np.ndarray) -> None:
    column = Ragged(np.array([5, 6, 7, 8], U16), offsets)
    with pytest.raises(ShardError, match="column 'x' does not match its offsets"):
        open_shard(written(tmp_path / "a", {"x": column}))


def test_metadata_in_the_header_is_ignored(tmp_path: Path) -> None:
    assert open_shard(file_of(tmp_path / "a", {"__metadata__": {"made": "by hand"}})) == Columns({})


def test_a_plain_column_round_trips(tmp_path: Path) -> None:
    columns = Columns({"x": Ragged.from_rows(ROWS, U16)}, {"label": np.array([3, 1, 2], np.int32)})
    (tmp_path / "a").write_bytes(encode_shard(columns))
    opened = open_shard(tmp_path / "a")
    assert opened.plain["label"].tolist() == [3, 1, 2]
    assert (len(opened), set(opened.ragged), set(opened.plain)) == (3, {"x"}, {"label"})


def test_columns_of_unequal_length_are_refused(tmp_path: Path) -> None:
    columns = Columns({"x": Ragged.from_rows(ROWS, U16)}, {"label": np.array([3], np.int32)})
    (tmp_path / "a").write_bytes(encode_shard(columns))
    with pytest.raises(ShardError, match="columns differ in length"):
        open_shard(tmp_path / "a")
