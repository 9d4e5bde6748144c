from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from parts.sandbox import Sandbox, make_sandbox


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests wait for real machines, which takes far longer on a busy computer."""
    for item in items:
        if item.nodeid.startswith("tests/faults/"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    made = make_sandbox(tmp_path)
    yield made
    made.close()
