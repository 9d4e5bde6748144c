"""The documents match the source; test_house.py checks their spelling and width."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import get_args

import pytest

from packtrain import errors
from packtrain.observe.spans import RECORDED
from packtrain.run.records import Cause
from test_house import ORDER, ROOT, SOURCE, pages

MAP = ROOT / "docs" / "architecture.md"

each_document = pytest.mark.parametrize("document", pages(), ids=lambda path: path.name)


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    without_code = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)", without_code, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def section_of(document: Path, title: str) -> str:
    return document.read_text().partition(f"# {title}\n")[2].partition("\n## ")[0]


def paths_in(section: str) -> list[str]:
    text = section_of(MAP, section)
    return re.findall(r"`((?:\w+/)*\w+\.py)`", text)


@each_document
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    assert missing == []


def test_the_map_lists_every_package_and_top_level_module_in_the_order_of_imports() -> None:
    text = section_of(MAP, "The source")
    listed = re.findall(r"^\| `([\w.]+/?)` \|", text, re.MULTILINE)
    modules = {path.name for path in SOURCE.glob("*.py") if not path.name.startswith("__")}
    packages = {f"{path.parent.name}/" for path in SOURCE.glob("*/__init__.py")}
    assert set(listed) == modules | packages
    assert [name.removesuffix("/").removesuffix(".py") for name in listed] == ORDER


@pytest.mark.parametrize(
    "section",
    ["Processes", *(f"The path {name}" for name in ("of a command", "over ssh", "of a sample", "of an image"))],
)
def test_files_on_the_map_exist(section: str) -> None:
    paths = paths_in(section)
    assert paths
    assert [path for path in paths if not any((SOURCE / folder / path).exists() for folder in ("", "pack"))] == []


def test_the_loop_on_the_map_is_that_of_the_trainer() -> None:
    block = section_of(MAP, "The loop").split("```")[1].strip("\n")
    docstring = (SOURCE / "train" / "trainer.py").read_text()
    assert "\n".join(f"    {line}" for line in block.splitlines()) in docstring


def test_the_picture_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "processes.py"))["picture"]()
    assert (ROOT / "docs" / "processes.svg").read_text() == drawn


def test_the_guide_lists_every_exit_code() -> None:
    listed = re.findall(r"^\| (\d+) \|", section_of(ROOT / "docs" / "guide.md", "Exit codes"), re.MULTILINE)
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert {int(code) for code in listed} == codes


def test_every_cause_of_a_generation_is_explained() -> None:
    text = section_of(ROOT / "docs" / "reliability.md", "What counts as a failure")
    assert set(get_args(Cause)) - set(re.findall(r"`(\w+)`", text)) == set()


def test_every_span_of_time_is_explained() -> None:
    text = section_of(ROOT / "docs" / "training.md", "Where the time goes")
    rows = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", rows)) == set(RECORDED)


def test_every_attack_names_tests_that_exist() -> None:
    rows = re.findall(
        r"^\| (?!attack|---).*\| (.+) \|$", section_of(ROOT / "SECURITY.md", "Attacks tried"), re.MULTILINE
    )
    names = [re.findall(r"`(\w+)`", row) for row in rows]
    assert len(rows) > 20
    assert all(names), "each row has a test"
    tests = {
        name for path in ROOT.glob("tests/**/test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert {name for row in names for name in row} - tests == set()
