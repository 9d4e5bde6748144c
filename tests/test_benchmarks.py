"""Arguments and tables of all benchmarks, and the contenders that are cheap to run; `make benchmarks` runs the rest.

What a benchmark measures is made up here, except for a few contenders that need neither training nor other processes.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from packtrain.export.bootstrap import Difference, Interval

REPOSITORY = Path(__file__).parent.parent
BENCHMARKS = REPOSITORY / "benchmarks"
SHARED = {"all", "bench", "example"}
SCRIPTS = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - SHARED)


@cache
def load(name: str) -> ModuleType:
    """Import a benchmark under another name: tests have packages called `pack`, `plan` and `recipes`, too."""
    spec = spec_from_file_location(f"benchmark_{Path(name).name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


@pytest.fixture(autouse=True)
def restored_process() -> Iterator[None]:
    """Put back what a benchmark sets for its process."""
    import torch

    environment, threads = dict(os.environ), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


@dataclass(frozen=True)
class Case:
    """Arguments, made-up measurements, and some of what the table must then say."""

    arguments: list[str]
    measured: Callable[[ModuleType], object]
    rows: list[dict[str, object]]
    notes: list[str] = field(default_factory=list)


def _stalls(script: ModuleType) -> object:
    seconds = dict(zip(script.SPENT, ([2.0], [1.0], [0.1], [1.3], [0.1], [5.0]), strict=True))
    return script.Costs(seconds, {"rare": [(1.0, 2.0)], "often": [(1.1, 2.4)]})


def _translations(script: ModuleType) -> object:
    text = "Das Haus ist sehr klein."
    learned = [script.Learned(10, 600, 2.0, [text]), script.Learned(12, 900, 2.0, ["Nein, danke, heute nicht."])]
    return script.Measurements({script.BARE: learned, script.OURS: learned[:1]}, [text])


def _at_home(script: ModuleType) -> object:
    task = script.Task("classify", ["a.webp", "b.webp"], ["cat", "dog"])
    turn = {"cpu": 0.5, "wall": 0.25, "tokens": 0, "megabytes": 100.0, "outputs": ["cat", "cat"]}
    return 1.5, script.Comparison(task, {"exported": [turn], "by hand": [turn]}, {"exported": [0.7], "by hand": []})


def _precisions(script: ModuleType) -> object:
    loss = Difference(0.1, Interval(-0.2, 0.4), 0.5)
    scores = [script.SplitScores("valid", 800, 18.2, 18.1, loss)]
    return 0.5, script.Precisions(scores, 600, [(3.0, 2.0), (3.0, 2.0), (6.0, 3.0)])


def _control(script: ModuleType) -> object:
    del script
    columns = ("req/node/s", "B/node/s", "form req/node", "form B/node", "reads/s", "writes/s", "busy")
    return [
        {"store": "directory", "nodes": nodes, "look s": 0.1, **{column: float(value) for column in columns}}
        for nodes, value in ((2, 1.0), (4, 2.0))
    ]


def _loads(script: ModuleType) -> object:
    return script.Load(1, 100, 0, 2.0, 5.0, 9.0, 1.0), script.Load(200, 1000, 3, 4.0, 50.0, 90.0, 24.0)


CASES: dict[str, list[Case]] = {
    "checkpoint": [
        Case(
            ["--rounds", "1", "--megabytes", "20"],
            _stalls,
            [
                {"what": "torch.save", "seconds": 2.0},
                {"what": "gradients of a batch", "seconds": 1.0},
                {"what": "start a copy", "seconds": 0.1},
                {"what": "gradients of a batch during the copy", "seconds": 1.3},
                {"what": "wait for the copy", "seconds": 0.1},
                {"what": "write and commit, during later steps", "seconds": 5.0},
            ],
            [
                "the step waits 10.0% of the time of torch.save for the same 20 MB",
                "during the copy: 25.0%",
                "a save every 20 steps costs +10.0% of wall time",
                "a save every 20 steps costs +20.0% of CPU time",
            ],
        )
    ],
    "exchange": [
        Case(
            ["--links", "1 Gbit/s", "--only", "one machine", "ddp"],
            lambda _: [
                {"exchange": "one machine", "tokens/s at 1 Gbit/s": 100.0, "validation loss": 5.0},
                {"exchange": "ddp", "tokens/s at 1 Gbit/s": 150.0, "validation loss": 4.0},
            ],
            [{"exchange": "one machine"}, {"exchange": "ddp", "x one at 1 Gbit/s": 1.5, "validation loss": 4.0}],
            ["speed over 40 steps, loss after 300"],
        ),
        Case([], lambda _: "needs root", [], ["needs root"]),
    ],
    "faults": [
        Case(
            ["--rounds", "2"],
            lambda _: {
                "worker": [(1.0, 4.0, 3), (2.0, 8.0, 1)],
                "notice": [(None, 5.0, 0)],
                "host": "only root can make hosts",
            },
            [
                {"fault": "worker killed (SIGKILL)", "detected s": 1.5, "max": 2.0, "max ": 8.0, "max steps lost": 3},
                {"fault": "preemption notice", "detected s": "-", "training again s": 5.0},
            ],
            ["median and maximum of 2", "first machine loses power: not measured: only root can make hosts"],
        )
    ],
    "home": [
        Case(
            ["classify"],
            _at_home,
            [
                {"contender": "exported", "images/CPU s": 4.0, "images/s": 8.0, "top-1": 50.0, "start s": 0.7},
                {"contender": "by hand", "start s": "", "MB": 100.0},
            ],
            ["beam 4; load 1.5 before"],
        ),
        Case(
            ["int8"],
            _precisions,
            [
                {"measured": "BLEU, 800 sentences of valid", "fp32": 18.2, "loss": 0.1, "95 % from": -0.2, "to": 0.4},
                {"fp32": 200.0, "int8": 300.0, "times as fast": 12 / 7},
            ],
            ["beam 4; 3 rounds; load 0.5 before"],
        ),
        Case(
            ["serve"],
            lambda script: (0.5, _loads(script.serve_load)),
            [{"clients": 1, "requests/s": 50.0}, {"clients": 200, "errors": 3, "against one": 5.0}],
            ["load 0.5 before"],
        ),
    ],
    "input": [
        Case(
            ["--rounds", "2", "--workers", "3"],
            lambda script: script.Measurements(
                {
                    "packtrain": [(1.0, 2.0), (3.0, 4.0)],
                    "torch DataLoader + Pillow": [(4.0, 5.0), (9.0, 5.0)],
                    "litdata": [],
                },
                "2 images",
                "decoding 1 ms",
            ),
            [{"loader": "packtrain", "CPU ms/image": 2.0, "max": 3.0}, {"loader": "torch DataLoader + Pillow"}],
            [
                "2 images; 3 threads or worker processes each",
                "decoding 1 ms",
                "installed, but fail here: litdata",
                "not installed: webdataset, mosaicml-streaming, DALI (CPU), ffcv",
                "the best peer, torch DataLoader + Pillow, takes 3.50 x the CPU time of packtrain",
            ],
        )
    ],
    "input_text": [
        Case(
            ["--budget", "9000"],
            lambda script: script.Measurements(
                {"packtrain": [50.0, 60.0], "torch DataLoader, lists": [5.0]}, ["padding: 4%"]
            ),
            [
                {"batches from": "packtrain", "M tokens/CPU s": 55.0, "speedup of packtrain": 1.0},
                {"batches from": "torch DataLoader, lists", "speedup of packtrain": 11.0},
            ],
            ["not installed: Hugging Face datasets, mosaicml-streaming", "padding: 4%"],
        )
    ],
    "pack": [
        Case(
            ["--images", "40"],
            lambda script: [script.Packing(40, 4_000_000, 2.0, 300_000_000, 1.6)],
            [{"images": 40, "raw GB": 0.004, "recode alone, s": 1.6, "images/s": 20.0, "peak memory, MB": 300.0}],
            ["packing takes 1.25 times as long as decoding and encoding alone"],
        ),
        Case(
            ["--pairs", "500"],
            lambda script: [script.Packing(500, 1000, 2.0, 300_000_000)],
            [{"pairs": 500, "pairs/s": 250.0}],
        ),
        Case(
            ["--changes", str(BENCHMARKS)],
            lambda _: [0.0, 0.1, 0.2],
            [{"JPEGs": 3, "unchanged": 1, "mean": 0.1, "median": 0.1, "max": 0.2}],
        ),
    ],
    "plan": [
        Case(
            ["--steps", "6", "--only", "1 worker", "2 hosts, 1 Gbit/s"],
            lambda _: {
                "1 worker": [{"step, off (%)": -4.0}, {"step, off (%)": 2.0}],
                "2 hosts, 1 Gbit/s": "only root can make hosts",
            },
            [{"case": "1 worker", "step, off (%)": -1.0}],
            ["6 steps;", "2 hosts, 1 Gbit/s: not measured: only root can make hosts"],
        )
    ],
    "published": [
        Case(
            [],
            lambda script: [(script.RUNS[0], 100.0, 6000.0), (script.RUNS[5], 300.0, 6000.0)],
            [
                {"GPUs": "8 v100", "unit": "minutes", "published": "109.2", "planned": "100.0", "time off (%)": -8},
                {"unit": "units/s", "published": "6,636", "planned": "6,000", "time off (%)": 11},
            ],
            ["2 of 2 runs that are not in the table of devices are within 30%"],
        )
    ],
    "recipes": [
        Case(
            ["translate", "--share", "0.25", "--decoded", "20"],
            lambda script: {
                "translate": {
                    "packtrain": script.Learned(7, 3.0, 4.0, 12.5),
                    "bare PyTorch": script.Learned(8, 3.5, 4.0, 12.0),
                    "defaults": script.Learned(7, 3.5, 4.0, 10.0),
                },
                "chat": {
                    "packtrain": script.Learned(7, 3.0, 4.0, 80.0),
                    "defaults": script.Learned(7, 3.5, 4.0, 100.0),
                },
            },
            [
                {
                    "recipe": "translate",
                    "who": "packtrain",
                    "steps": 7,
                    "CPU seconds": 4.0,
                    "score": 12.5,
                    "by": "bleu",
                },
                {"who": "bare PyTorch", "steps": 8, "seconds": 3.5},
                {"who": "defaults", "of the example": 0.8},
                {"recipe": "chat", "who": "packtrain", "of the example": 1.0},
                {"who": "defaults", "score": 100.0, "by": "perplexity", "of the example": 0.8},
            ],
            ["25% of the example's steps; greedy search on 20 validation samples"],
        )
    ],
    "recover": [
        Case(
            ["--rounds", "2"],
            lambda script: {
                "packtrain": script.Recovery([(1.0, 2), (2.0, 6)], 0.97),
                "torchrun": "no 45 steps within 100 s",
            },
            [
                {
                    "run": "packtrain",
                    "seconds to the next step": 1.5,
                    "steps repeated": 4.0,
                    "goodput with kills": "97%",
                },
                {"run": "torchrun", "seconds to the next step": "no 45 steps within 100 s"},
            ],
            ["medians of 2 kills; saves every 20 steps", "one every 30 s for 120 s"],
        )
    ],
    "scale": [
        Case(
            ["--nodes", "2", "4"],
            _control,
            [{"store": "directory", "nodes": 2}, {"nodes": 4, "reads/s": 2.0}],
            [
                "grow FASTER than linearly from 2 to 4 nodes (per node: x 2.00)",
                "cannot serve the requests fast enough: at 2 nodes (extrapolated: at 2)",
                "reading all leases takes longer than a lease lasts: not up to 4 nodes",
                "reached at 7,000 nodes",
            ],
        )
    ],
    "serve_load": [
        Case(["model"], _loads, [{"clients": 1, "mean batch": 1.0}, {"requests/s": 250.0, "against one": 5.0}]),
    ],
    "soak": [
        Case(
            ["--minutes", "0.5", "--every", "2", "3"],
            lambda script: script.Soaked([{"machines": 1, "equal": "yes"}], [], "only root can make hosts"),
            [{"machines": 1, "equal": "yes"}],
            ["0.5 min with a fault every 2 to 3 s, seed 1; 210 steps", "no second machine: only root can make hosts"],
        )
    ],
    "start": [
        Case(
            ["--rounds", "3"],
            lambda script: {script.HELP: [0.1, 0.3, 0.2], script.FIRST_STEP: [4.0]},
            [{"what": "packtrain --help", "seconds": 0.2, "limit": 0.3}, {"seconds": 4.0, "limit": 15.0}],
            ["medians of 3"],
        )
    ],
    "step": [
        Case(
            ["--rounds", "3", "--bursts", "1", "--steps", "2"],
            lambda script: [
                {script.BARE: bare, script.AGAIN: bare, script.OURS: bare * factor}
                for bare, factor in ((0.1, 1.02), (0.2, 1.04), (0.3, 1.03))
            ],
            [
                {"contender": "bare PyTorch loop", "CPU ms per step": 200.0, "overhead": ""},
                {"contender": "bare loop, again", "95% interval": "+0.0% to +0.0%"},
                {"contender": "packtrain", "overhead": "+3.0%", "95% interval": "+2.0% to +4.0%"},
            ],
            ["not installed: Lightning Fabric, Accelerate", "3 rounds of 1 bursts of 2 steps each; batches of 640"],
        )
    ],
    "translate": [
        Case(
            ["--seconds", "2"],
            _translations,
            [
                {"contender": "bare PyTorch loop", "tokens/s": 375.0, "steps": 11, "of each seed": "100.0 6.6"},
                {"contender": "packtrain", "tokens/s": 300.0, "of each seed": "100.0"},
            ],
            ["not installed: JoeyNMT 2.3"],
        )
    ],
    "ui": [
        Case(
            ["--runs", "3", "--only", "packtrain", "mlflow"],
            lambda _: [
                {"contender": "packtrain", "runs": 3, "overlay (s)": 2.5},
                {"contender": "mlflow", "runs": 3, "overlay (s)": None},
            ],
            [{"contender": "packtrain", "overlay (s)": 2.5}, {"contender": "mlflow", "overlay (s)": None}],
        ),
        Case(["--prepare"], lambda _: [], [], ["the series are ready"]),
    ],
}


def run(script: ModuleType, measured: object, arguments: list[str]) -> None:
    """Do what the script does as a program, but for measuring."""
    sys.modules["bench"].main(script.parser(), lambda _: measured, script.report, arguments)


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=shlex.join([name, *case.arguments])) for name in CASES for case in CASES[name]],
)
def test_a_benchmark_prints_its_measurements(name: str, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    script = load(name)
    measured = case.measured(script)
    run(script, measured, [*case.arguments, "--json"])
    [line] = capsys.readouterr().out.splitlines()
    printed = json.loads(line)
    for row, expected in zip(printed["rows"], case.rows, strict=True):
        assert {column: row[column] for column in expected} == pytest.approx(expected)
    for note in case.notes:
        assert note in "\n".join(printed["notes"])

    run(script, measured, case.arguments)
    table = capsys.readouterr().out
    assert printed["title"] in table
    for row in printed["rows"]:
        assert all(column in table for column in row)
        assert str(next(iter(row.values()))) in table
    for note in case.notes:
        assert note in table


def test_every_benchmark_has_a_case() -> None:
    assert sorted(CASES) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_describes_its_arguments(name: str) -> None:
    script = load(name)
    [usage, *_] = re.findall(rf"python benchmarks/{name}\.py(.*)", script.parser().format_help())
    options = re.findall(r"--[\w-]+", usage)
    assert all(option in script.parser()._option_string_actions for option in options)


@pytest.mark.parametrize("commands", ["COMMANDS", "SHORT"])
def test_make_benchmarks_runs_every_benchmark_with_arguments_that_it_has(commands: str) -> None:
    runs: dict[str, list[list[str]]] = getattr(load("all"), commands)
    assert sorted(runs) == sorted({*SCRIPTS} - {"serve_load"})  # needs a model: `home serve` measures with it
    for name, attempts in runs.items():
        for arguments in attempts:
            load(name).parser().parse_args(["--json", "--rounds", "1", *arguments])


def test_the_commands_in_the_documents_are_understood() -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    commands = [
        command for page in pages for command in re.findall(r"python\s+benchmarks/(\w+\.py[^`]*)`", page.read_text())
    ]
    assert {command.split(".")[0] for command in commands} == {*SCRIPTS}
    for command in commands:
        name, *arguments = shlex.split(command)
        load(name.removesuffix(".py")).parser().parse_args(arguments)


@pytest.mark.parametrize("name", ["peers/by_hand", "peers/ui_series"])
def test_a_peer_can_be_imported(name: str) -> None:
    assert callable(load(name).main)


def test_make_benchmarks_runs_all_and_fails_if_any_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = load("all")
    ran: list[str] = []

    def fault_of(script: Path, arguments: list[str], scratch: Path | None) -> str | None:
        assert script == BENCHMARKS / script.name and scratch is None
        ran.append(shlex.join([script.stem, *arguments]))
        return "exited with 1" if script.stem == "scale" else None

    monkeypatch.setattr(everything, "fault_of", fault_of)
    with pytest.raises(SystemExit, match="1"):
        everything.main([])
    assert {command.split()[0] for command in ran} == {*everything.COMMANDS}
    assert "home serve --inputs 2000" in ran
    printed = capsys.readouterr()
    assert printed.out.startswith("load average: ")
    assert printed.err == "benchmarks/scale.py: exited with 1\n"
    with pytest.raises(SystemExit, match="0"):
        everything.main(["--only", "start", "step"])


def test_a_short_run_has_little_to_pack_and_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = load("all")
    ran: list[list[str]] = []

    def fault_of(script: Path, arguments: list[str], scratch: Path) -> None:
        ran.append(arguments)
        assert scratch.is_dir()
        assert {path.stem for path in script.parent.glob("*.py")} == {*SCRIPTS, *SHARED}
        for file in script.parent.parent.glob("examples/data/en-de/train.*.gz"):
            assert len(gzip.decompress(file.read_bytes()).splitlines()) == everything.SHORT_LINES

    monkeypatch.setattr(everything, "fault_of", fault_of)
    with pytest.raises(SystemExit, match="0"):
        everything.main(["--short", "--only", "pack"])
    assert ran == [["--rounds", "1", "--images", "40"], ["--rounds", "1", "--pairs", "500"]]


# What all of them share.


def test_a_fault_is_printed_and_the_benchmark_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    script = load("soak")
    with pytest.raises(SystemExit, match="1"):
        run(script, script.Soaked([{"machines": 1}], ["1 machines: weights differ"], None), ["--json"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["rows"] == [{"machines": 1}]
    assert printed.err.endswith(": 1 machines: weights differ\n")


def test_markdown_is_a_table_for_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    bench = load("bench")
    rows = [{"what": "a", "seconds": 1.0}, {"what": "b", "seconds": 1234.5, "limit": "none"}]
    bench.show(bench.Report("T", rows, ["note"]), as_json=False, as_markdown=True)
    assert capsys.readouterr().out.splitlines() == [
        "| what | seconds | limit |",
        "| --- | --- | --- |",
        "| a | 1 |  |",
        "| b | 1,234 | none |",
        "",
        "note",
    ]


def test_a_benchmark_that_measured_nothing_gives_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    run(load("exchange"), "only root can make hosts", [])
    assert capsys.readouterr().out.splitlines() == ["Gradient syncs: nothing measured", "only root can make hosts"]


# Real measurements, as far as they train nothing and start nothing.


def measure(name: str, *arguments: str) -> tuple[Any, list[dict[str, Any]]]:
    script = load(name)
    options = script.parser().parse_args(arguments)
    measured = script.measure(options)
    return measured, script.report(options, measured).rows


def test_control_is_measured_with_real_nodes_and_a_real_store() -> None:
    _, rows = measure("scale", "--nodes", "2", "3", "--store", "directory", "--rounds", "2")
    assert [row["nodes"] for row in rows] == [2, 3]
    for row in rows:
        assert row["reads/s"] > 0 and row["writes/s"] > 0 and row["B/node/s"] > 0 and row["form s"] > 0


def test_published_runs_come_out_within_thirty_percent() -> None:
    script = load("published")
    options = script.parser().parse_args([])
    report = script.report(options, script.measure(options))
    assert not report.faults
    held = [row for row in report.rows if not row["in the table"]]
    assert len(held) > 15
    assert all(abs(row["time off (%)"]) <= 30 and "." in row["source"] for row in held)
    [note] = report.notes
    assert note.startswith(f"{len(held)} of {len(held)} runs")


def test_text_loaders_are_measured_with_equal_batches() -> None:
    measured, rows = measure("input_text", "--pairs", "1000", "--budget", "640", "--large", "2000", "--rounds", "1")
    assert [row["batches from"] for row in rows][:2] == ["packtrain", "torch DataLoader, lists"]
    assert all(row["M tokens/CPU s"] > 0 for row in rows)
    assert [note.split(":")[0] for note in measured.notes_on_order][1:] == [
        "to find a step of 2,000 (pairs, 640 tokens)",
        "to find a step of 2,000 (pairs, 25,000 tokens)",
        "to find a step of 2,000 (images, 256)",
        "to find a step of 2,000 (images, 256, weights 2 and 0.5)",
    ]


def test_images_are_loaded_by_packtrain_and_by_the_plainest_peer(tmp_path: Path) -> None:
    script = load("input")
    jpegs = script.photographs(3)
    for name in ("packtrain", "torch DataLoader + Pillow"):
        folder = tmp_path / name
        folder.mkdir()
        _, contender = script.CONTENDERS[name]
        assert contender(jpegs, folder, 0 if "torch" in name else 1)(1) == 3
    assert "3 images, 3 of them different" in script.about(jpegs, None)
    assert re.fullmatch(r"of packtrain, in ms: .*decoding \d+\.\d\d, resizing \d+\.\d\d", script.parts_of_time(jpegs))


def test_the_stall_of_a_save_is_measured_in_its_parts(tmp_path: Path) -> None:
    script = load("checkpoint")
    seconds = script.stalls(12, 1, tmp_path)
    assert list(seconds) == list(script.SPENT)
    assert all(len(taken) == 1 and taken[0] > 0 for taken in seconds.values())


# Real measurements in other processes.


@pytest.mark.usefixtures("processes")
def test_packing_pairs_is_measured() -> None:
    [packing], [row] = measure("pack", "--pairs", "200")
    assert row["pairs"] == 200 and row["pairs/s"] > 0
    assert packing.raw_bytes > 0


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("""print('noise\\n{"title": "T", "rows": [{"what": "it"}], "notes": ["calm"]}')""", None),
        ("""print('{"title": "T", "rows": [], "notes": ["calm"]}')""", "measured nothing"),
        ("""print('{"title": "T", "rows": [{"what": "it"}], "notes": ["calm"]}'); exit(1)""", "exited with 1"),
    ],
    ids=["rows", "no rows", "exit code"],
)
def test_make_benchmarks_shows_a_table_and_notices_a_failure(
    code: str, fault: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    assert load("all").fault_of(script, [], tmp_path) == fault
    printed = capsys.readouterr().out
    assert "calm" in printed and ("it" in printed) == (fault != "measured nothing")


@pytest.mark.usefixtures("processes")
def test_make_benchmarks_notices_a_script_that_prints_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("exit(3)")
    assert load("all").fault_of(script, [], tmp_path) == "exited with 3 and printed nothing"
