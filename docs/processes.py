"""Draw docs/processes.svg: the processes of a run on two machines, and the store between them.

python docs/processes.py

Plain Python, no dependencies. The picture is the text below: groups, boxes, arrows and labels by their coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parent / "processes.svg"
WIDTH, HEIGHT = 1190, 640
LINE_HEIGHT = 18

STYLE = """
  .page { fill: #ffffff } .group { fill: #f3f5f8; stroke: #c3cad4 } .box { fill: #ffffff; stroke: #5b6b80 }
  .store { fill: #fff8e6; stroke: #b58900 } .optional { stroke-dasharray: 5 4 }
  .arrow { stroke: #2f6fb5; stroke-width: 1.6; fill: none } .head { fill: #2f6fb5 }
  .peer { stroke: #2e8b57; stroke-dasharray: 6 4 } .peerhead { fill: #2e8b57 }
  text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #1d2733 }
  .title { font-weight: 600 } .code { font: 12.5px ui-monospace, Menlo, Consolas, monospace } .note { fill: #4b5a6b }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .group { fill: #161b22; stroke: #3a4450 } .box { fill: #0d1117; stroke: #8b98a9 }
    .store { fill: #221d0e; stroke: #d0a215 } .arrow { stroke: #6cb0f5 } .head { fill: #6cb0f5 }
    .peer { stroke: #56c288 } .peerhead { fill: #56c288 } text { fill: #e6edf3 } .note { fill: #9fb0c3 }
  }
"""


@dataclass(frozen=True)
class Box:
    """A rectangle with lines of text from its top left corner; the first line is its title."""

    x: int
    y: int
    width: int
    height: int
    look: str
    lines: tuple[str, ...] = ()
    text: str = "note"


@dataclass(frozen=True)
class Arrow:
    """A line through points, with a head at its end and, if `both`, at its start; `label` stands at `at`."""

    points: tuple[tuple[int, int], ...]
    label: tuple[str, ...] = ()
    at: tuple[int, int] = (0, 0)
    look: str = "arrow"
    both: bool = False


def machine(x: int, y: int, title: str, ranks: tuple[int, int]) -> list[Box]:
    return [
        Box(x, y, 330, 262, "group", (title,)),
        Box(x + 16, y + 32, 298, 66, "box", ("node", "packtrain node RUN", "lease, generations, logs, telemetry")),
        Box(x + 16, y + 116, 298, 48, "box", ("fork server and launcher", "torch's launcher; one per generation")),
        Box(x + 16, y + 182, 141, 64, "box", (f"worker, rank {ranks[0]}", "python -m", "packtrain.train")),
        Box(x + 173, y + 182, 141, 64, "box", (f"worker, rank {ranks[1]}", "python -m", "packtrain.train")),
    ]


BOXES = [
    Box(20, 60, 260, 352, "group", ("your machine",)),
    Box(36, 92, 228, 92, "box", (
        "client", "packtrain run, resume: packs,", "creates the run, starts the fleet,",
        "follows; may leave at any time",
    )),
    Box(36, 206, 228, 74, "box", ("another client", "packtrain ls, show, logs, stop,", "report; from any machine")),
    Box(36, 302, 228, 92, "box optional", (
        "mpirun supervisor", "only with the mpi fleet: watches", "leases, ends mpirun after a run",
        "or if too few machines are left",
    )),
    Box(400, 60, 240, 556, "store", ("store: a directory or bucket",)),
    Box(406, 80, 228, 520, "none", (
        "", "packs/<job>-<digest>/", "  vocabulary.json", "  train-*.safetensors", "  manifest.json", "",
        "files/<sha256>", "", "runs/<run>/", "  job.json  code.tar.zst", "  pack.txt", "",
        "  generations/  proposers/", "  nodes/   one lease each", "",
        "  events/  metrics/  time/", "  logs/  telemetry/  stacks/", "  tensorboard/",
        "", "  checkpoints/", "    files/  manifest.json", "", "  stop.json", "  result.json  report.html",
    ), "code"),
    *machine(740, 60, "machine 1, first of the generation", (0, 1)),
    *machine(740, 354, "machine 2", (2, 3)),
]  # fmt: skip

ARROWS = [
    Arrow(((264, 126), (400, 126)), ("packs, job, code",), (340, 118)),
    Arrow(((400, 170), (264, 170)), ("events, metrics",), (340, 162)),
    Arrow(((264, 243), (400, 243)), ("stop request",), (340, 235), both=True),
    Arrow(((400, 343), (264, 343)), ("leases, result",), (340, 335)),
    Arrow(
        ((150, 92), (150, 34), (1022, 34), (1022, 92)),
        ("the fleet starts packtrain node RUN on every machine",),
        (586, 26),
    ),
    *(
        arrow
        for y in (60, 354)
        for arrow in (
            Arrow(((640, y + 65), (756, y + 65)), ("lease, logs,", "generations"), (690, y + 37), both=True),
            Arrow(((640, y + 214), (756, y + 214)), ("shards,", "checkpoints,", "metrics"), (690, y + 168), both=True),
            Arrow(((905, y + 98), (905, y + 116))),
            Arrow(((826, y + 164), (826, y + 182))),
            Arrow(((983, y + 164), (983, y + 182))),
        )
    ),
    Arrow(((1054, 274), (1086, 274), (1086, 568), (1054, 568)), ("gradients",), (1048, 343), "arrow peer", both=True),
    Arrow(((1054, 200), (1102, 200), (1102, 494), (1054, 494)), ("rendezvous",), (1145, 343), "arrow peer", both=True),
]  # fmt: skip

LABELS = [
    (20, 444, "note", "Blue: who starts, reads or writes what."),
    (20, 462, "note", "There is no server; the store is the only"),
    (20, 480, "note", "shared state."),
    (20, 510, "note", "Green: the only traffic between machines,"),
    (20, 528, "note", "TCP, gloo, NCCL; on a private network."),
    (20, 558, "note", "A node that dies takes its launcher and"),
    (20, 576, "note", "workers with it. The nodes that are left"),
    (20, 594, "note", "form the next generation."),
]


def text(x: float, y: float, look: str, words: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{look}" text-anchor="{anchor}" xml:space="preserve">{escape(words)}</text>'


def draw_box(box: Box) -> list[str]:
    drawn = []
    if box.look != "none":
        drawn.append(
            f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="8" class="{box.look}"/>'
        )
    for number, line in enumerate(box.lines):
        if line:
            look = "title" if number == 0 else box.text
            drawn.append(text(box.x + 12, box.y + 21 + number * LINE_HEIGHT, look, line))
    return drawn


def draw_arrow(arrow: Arrow) -> list[str]:
    head = "peerhead" if "peer" in arrow.look else "head"
    path = " ".join(f"{x},{y}" for x, y in arrow.points)
    drawn = [f'<polyline points="{path}" class="{arrow.look}"/>', draw_head(arrow.points[-2], arrow.points[-1], head)]
    if arrow.both:
        drawn.append(draw_head(arrow.points[1], arrow.points[0], head))
    for number, line in enumerate(arrow.label):
        drawn.append(text(arrow.at[0], arrow.at[1] + number * LINE_HEIGHT, "note", line, "middle"))
    return drawn


def draw_head(before: tuple[int, int], end: tuple[int, int], look: str) -> str:
    """A triangle at the end of a horizontal or vertical line."""
    x, y = end
    dx = (x > before[0]) - (x < before[0])
    dy = (y > before[1]) - (y < before[1])
    left, right = (x - 9 * dx - 5 * dy, y - 9 * dy - 5 * dx), (x - 9 * dx + 5 * dy, y - 9 * dy + 5 * dx)
    points = " ".join(f"{a},{b}" for a, b in (end, left, right))
    return f'<polygon points="{points}" class="{look}"/>'


def picture() -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>The processes of a run on two machines, and the store between them</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" class="page"/>',
        *(line for box in BOXES for line in draw_box(box)),
        *(line for arrow in ARROWS for line in draw_arrow(arrow)),
        *(text(x, y, look, words) for x, y, look, words in LABELS),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
