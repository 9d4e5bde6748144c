"""Prints pip's constraints for the oldest version of everything that Packtrain declares: `make lowest` tests with them.

torch is that of constraints.txt: the wheels of older ones bring gigabytes of CUDA's libraries.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
OF_TESTS = ("bench", "dev", "test")


def lowest_versions(project: dict[str, list[str] | dict[str, list[str]]]) -> Iterator[str]:
    """Yield `name==version` for each dependency of a user, from the `>=` of its declaration."""
    extras = project["optional-dependencies"]
    base = project["dependencies"]
    assert isinstance(extras, dict)
    assert isinstance(base, list)
    for requirement in [*base, *(line for extra, lines in extras.items() if extra not in OF_TESTS for line in lines)]:
        declared = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?>=([\d.]+)", requirement)
        assert declared, f"pyproject.toml: {requirement}: must be NAME>=VERSION"
        yield f"{declared[1]}=={declared[2]}"


if __name__ == "__main__":
    for line in lowest_versions(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]):
        if not line.startswith("torch=="):
            print(line)
    print(*re.findall(r"^torch==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
