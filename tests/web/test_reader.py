"""What the dashboard keeps of the runs that were looked at, and how it pages through lines."""

from __future__ import annotations

import pytest

from packtrain.run.records import LogLine
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.web.logs import LogPlace, LogQuery, lines_after, lines_before
from packtrain.web.reader import Readers, RunReader
from parts.runs import new_run


def test_readers_that_were_not_used_for_long_are_forgotten(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtrain.web.reader.MAX_READERS", 2)
    runs = [new_run(directory_store) for _ in range(3)]
    readers = Readers()
    first = readers.of(runs[0])
    readers.of(runs[1])
    assert readers.of(runs[0]) is first
    readers.of(runs[2])
    assert readers.of(runs[0]) is first
    monkeypatch.setattr("packtrain.web.reader.MAX_BYTES", -1)
    readers.of(runs[1])
    assert readers.of(runs[0]) is not first


# Logs.


def logged(store: Store) -> tuple[Run, list[str]]:
    run = new_run(store)
    writer = run.log_writer("a")
    for number in range(10):
        stream = "err" if number % 5 == 0 else "out"
        writer.append(LogLine(1e9 + number, 1, "a", number % 2, stream, f"Line {number}"))  # type: ignore[arg-type]
        if number % 3 == 2:
            writer.flush()
    writer.flush()
    return run, RunReader(run).read_log_keys()


def test_lines_are_paged_from_the_end_to_the_start_and_then_followed(any_store: Store) -> None:
    run, keys = logged(any_store)
    found, place = list[str](), None
    while True:
        lines, place, _ = lines_before(run, keys, place, LogQuery(), 4)
        found = [*(line.text for line in lines), *found]
        if place is None:
            break
    assert found == [f"Line {number}" for number in range(10)]
    assert lines_after(run, keys, LogPlace(len(keys), 0), LogQuery(), 4)[0] == []
    lines, after = lines_after(run, keys, LogPlace(1, 1), LogQuery(), 3)
    assert [line.text for line in lines] == ["Line 4", "Line 5", "Line 6"]
    assert [line.text for line in lines_after(run, keys, after, LogQuery(), 1)[0]] == ["Line 7"]


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        (LogQuery(search="line 7"), [7]),
        (LogQuery(rank=1), [1, 3, 5, 7, 9]),
        (LogQuery(stream="err"), [0, 5]),
        (LogQuery(node="b"), []),
        (LogQuery(rank=0, stream="err"), [0]),
    ],
)
def test_lines_are_searched(query: LogQuery, numbers: list[int], directory_store: Store) -> None:
    run, keys = logged(directory_store)
    assert [line.text for line in lines_before(run, keys, None, query, 100)[0]] == [f"Line {n}" for n in numbers]


def test_a_damaged_chunk_of_lines_is_a_line_that_says_so(directory_store: Store) -> None:
    run, keys = logged(directory_store)
    directory_store.put(keys[1], b"garbage\n")
    lines, _, _ = lines_before(run, keys, None, LogQuery(), 100)
    assert len(lines) == 8
    assert "damaged" in lines[3].text
