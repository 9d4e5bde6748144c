"""Run mutmut, and report how many of its small changes to the code a test noticed: `make mutants`.

docs/mutants.md lists every change that no test noticed, with the reason. `--report` only repeats the last report.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

LEAST_SCORE = 0.9
MUTANTS = Path("mutants")
LIST = Path("docs/mutants.md")
# Exit codes of mutmut's workers: a test failed, pytest itself did, or the mutant did not end. All others survive.
_KILLED = (1, 3, 24, -24, 36, 152, 255)
_LISTED = re.compile(r"^## `(?P<module>.+)`$|^@@ (?P<function>\S+)$|^(?P<sign>[-+])(?P<line>\S.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A change to a function of a module: the lines that it takes away, and those that it puts there."""

    module: str
    function: str
    removed: tuple[str, ...]
    added: tuple[str, ...]

    def __str__(self) -> str:
        changes = [*(f"-{line}" for line in self.removed), *(f"+{line}" for line in self.added)]
        return "\n".join([f"@@ {self.function}", *changes])


def run_mutmut(processes: int) -> None:
    shutil.rmtree(MUTANTS, ignore_errors=True)  # mutmut keeps old results, even if the tests have changed
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(processes)]
    subprocess.run(command, check=True)


def mutant_named(name: str, path: Path) -> Mutant:
    diff: str = import_module("mutmut.mutation.diff_apply").get_diff_for_mutant(name, path=path)
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    # Of `packtrain.units.xǁDurationǁparse__mutmut_3`, or `packtrain.units.x_counted__mutmut_1`.
    mangled = name.rpartition("__mutmut_")[0].rpartition(".")[2].removeprefix("x")
    function = mangled.removeprefix("ǁ").replace("ǁ", ".") if mangled.startswith("ǁ") else mangled.removeprefix("_")
    removed, added = (tuple(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    return Mutant(str(path.relative_to("src/packtrain")), function, removed, added)


def listed_mutants(text: str) -> set[Mutant]:
    """Read the blocks of the list: a module's heading, and below it `@@ function`, `-line` and `+line`."""
    module, function = "", ""
    lines: dict[str, list[str]] = {"-": [], "+": []}
    mutants = set()

    def close() -> None:
        if lines["-"] or lines["+"]:
            mutants.add(Mutant(module, function, tuple(lines["-"]), tuple(lines["+"])))
            lines["-"], lines["+"] = [], []

    for match in _LISTED.finditer(text):
        if match["sign"]:
            if match["sign"] == "-" and lines["+"]:
                close()
            lines[match["sign"]].append(match["line"].strip())
        else:
            close()
            module, function = match["module"] or module, match["function"] or ""
    close()
    return mutants


def is_outdated(mutant: Mutant) -> bool:
    """True if the module no longer has the lines that the mutant changes."""
    path = Path("src/packtrain", mutant.module)
    lines = [line.strip() for line in path.read_text().splitlines()] if path.exists() else []
    return not set(mutant.removed) <= set(lines)


def report(paths: list[Path]) -> bool:
    """Print a table and what is wrong; True if nothing is."""
    listed, problems = listed_mutants(LIST.read_text()), []
    print(f"{'module':<22}{'mutants':>8}{'killed':>8}{'survived':>10}{'score':>8}")
    for path in paths:
        exit_codes = json.loads((MUTANTS / f"{path}.meta").read_text())["exit_code_by_key"]
        survivors = [name for name, code in exit_codes.items() if code not in _KILLED]
        module, count = str(path.relative_to("src/packtrain")), len(exit_codes)
        score = 1 - len(survivors) / count
        print(f"{module:<22}{count:>8}{count - len(survivors):>8}{len(survivors):>10}{score:>8.1%}")
        if score < LEAST_SCORE:
            problems.append(f"{module}: the tests kill less than {LEAST_SCORE:.0%} of the mutants")
        unlisted = {mutant_named(name, path) for name in survivors} - listed
        problems += [f"{module}: {LIST} does not list a survivor:\n{mutant}" for mutant in sorted(unlisted, key=str)]
    outdated = sorted(filter(is_outdated, listed), key=str)
    problems += [f"{mutant.module}: {LIST} lists a line that is gone:\n{mutant}" for mutant in outdated]
    for problem in problems:
        print(f"\n{problem}")
    return not problems


def main() -> int:
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["mutmut"]
    if "--report" not in sys.argv:
        run_mutmut(os.cpu_count() or 1)
    return 0 if report([Path(path) for path in settings["only_mutate"]]) else 1


if __name__ == "__main__":
    sys.exit(main())
