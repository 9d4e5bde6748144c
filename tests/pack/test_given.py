from __future__ import annotations

from pathlib import Path

import pytest

from pack.rawsets import write, write_classes
from packtrain.errors import Mistake
from packtrain.pack.given import read_sources
from packtrain.recipes import recipe_class


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("new.en", "new.de", "talk.tsv", "more.tsv", "movie_lines.txt", "movie_conversations.txt"):
        write(tmp_path / name, "a\tb\n")
    for name in ("all.jsonl", "captions.json"):
        write(tmp_path / name, "{}")
    write_classes(tmp_path / "pets", {"cat": ["1.jpg"], "dog": ["2.jpg"]})
    write_classes(tmp_path / "wild", {"cat": ["3.jpg"]})
    write(tmp_path / "cornell" / "movie_lines.txt", "")
    return tmp_path


def read(recipe: str, *given: str) -> list[tuple[str, list[str]]]:
    """Return the format of each source and its paths, relative to the current directory."""
    found = read_sources("--data", given, recipe, recipe_class(recipe).contents)
    here = Path.cwd()
    return [(one.kind, [str(Path(path).relative_to(here)) for path in one.paths]) for one in found]


@pytest.mark.parametrize(
    ("recipe", "given", "expected"),
    [
        ("translate", ["new.en", "new.de"], [("bitext", ["new.en", "new.de"])]),
        ("translate", ["talk.tsv"], [("bitext", ["talk.tsv"])]),
        ("translate", ["talk.tsv", "more.tsv"], [("bitext", ["talk.tsv"]), ("bitext", ["more.tsv"])]),
        ("translate", ["all.jsonl"], [("folder", ["all.jsonl"])]),
        ("chat", ["talk.tsv"], [("dialogue", ["talk.tsv"])]),
        ("chat", ["new.en", "new.de"], [("bitext", ["new.en", "new.de"])]),
        ("chat", ["cornell"], [("dialogue", ["cornell"])]),
        (
            "chat",
            ["movie_lines.txt", "movie_conversations.txt"],
            [("dialogue", ["movie_lines.txt", "movie_conversations.txt"])],
        ),
        ("classify", ["pets"], [("imagenet", ["pets"])]),
        ("classify", ["pets/"], [("imagenet", ["pets"])]),
        ("classify", ["pets", "wild"], [("imagenet", ["pets"]), ("imagenet", ["wild"])]),
        ("classify", ["pets", "talk.tsv"], [("imagenet", ["pets", "talk.tsv"])]),
        ("caption", ["captions.json"], [("coco", ["captions.json", "."])]),
        ("caption", ["captions.json", "pets"], [("coco", ["captions.json", "pets"])]),
        ("translate", ["{bitext: [new.en, new.de]}"], [("bitext", ["new.en", "new.de"])]),
        (
            "translate",
            ["[{bitext: talk.tsv}, {folder: all.jsonl}]"],
            [("bitext", ["talk.tsv"]), ("folder", ["all.jsonl"])],
        ),
        (
            "translate",
            ["{bitext: ./pets/../talk.tsv}", "more.tsv"],
            [("bitext", ["talk.tsv"]), ("bitext", ["more.tsv"])],
        ),
    ],
)
def test_data_is_recognized(recipe: str, given: list[str], expected: list[tuple[str, list[str]]]) -> None:
    assert read(recipe, *given) == expected


def test_paths_in_a_file_start_at_the_file(folder: Path) -> None:
    write(folder / "below" / "new.yaml", "- bitext: [../new.en, ../new.de]\n- bitext: more.tsv\n  columns: [2, 1]\n")
    assert read("translate", "below/new.yaml") == [("bitext", ["new.en", "new.de"]), ("bitext", ["below/more.tsv"])]


@pytest.mark.parametrize(
    ("recipe", "given", "fault"),
    [
        ("translate", "none.en", r"^--data none.en: no such file or folder$"),
        ("translate", "pets", r"^--data pets: looks like imagenet data, but translate needs bitext, folder$"),
        ("translate", "captions.json", r"^--data captions.json: looks like coco data, but translate needs bitext"),
        ("classify", "new.en", r"looks like dialogue data, but classify needs folder, imagenet$"),
        ("translate", "{imagenet: pets}", r"^--data: translate does not support imagenet data; use bitext, folder$"),
        ("translate", "{bitxt: talk.tsv}", r"^--data: bitxt: unknown key; did you mean 'bitext'\?$"),
        ("translate", "{bitext: [a, b, c]}", r"^--data: bitext: takes 1 or 2 paths, not 3, such as \[train.en, tra"),
        ("translate", "{bitext: [a, ''}", r"^--data: invalid YAML"),
        ("translate", "[1]", r"^--data: 0: must be a source, such as \{bitext: \[new.en, new.de\]\}"),
        ("translate", "empty.yaml", r"^empty.yaml:1: must be a source"),
        ("translate", "wrong.yaml", r"^wrong.yaml:2: 1.bitext: takes 1 or 2 paths"),
        ("translate", "none.yaml", r"^none.yaml: no such file$"),
    ],
)
def test_data_that_cannot_be_read_is_refused_in_one_line(folder: Path, recipe: str, given: str, fault: str) -> None:
    write(folder / "empty.yaml", "")
    write(folder / "wrong.yaml", "- bitext: talk.tsv\n- bitext: []\n")
    with pytest.raises(Mistake, match=fault) as refused:
        read(recipe, given)
    assert "\n" not in str(refused.value)


def test_what_no_format_takes_is_refused_with_an_example() -> None:
    """The images of a remote listing could be anywhere."""
    with pytest.raises(Mistake, match=r"caption does not recognize it; name its format: --data '\{coco: \[capt"):
        read("caption", "https://example.org/captions.json")
