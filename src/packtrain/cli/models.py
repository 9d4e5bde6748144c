"""Commands that use a trained model: predict, export."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Annotated, NamedTuple, TextIO

import typer

from packtrain.cli.common import CheckpointOption, JsonOption, StoreOption, TrustOption, find_run, trusting
from packtrain.cli.output import print_json, print_json_list
from packtrain.cli.screen import CopyBars, ProgressBars, console
from packtrain.errors import Mistake, harmless
from packtrain.export.deliver import deliver, destination_of, untracked
from packtrain.export.export import ExportOptions, export_run
from packtrain.export.predict import (
    MAX_CHARACTERS,
    DecodeOptions,
    Predicted,
    Predictor,
    is_folder,
    load_predictor,
    open_model,
)
from packtrain.recipes import Prediction
from packtrain.run.checkpoint import choice_of
from packtrain.units import show_bytes

_MAX_FILES = 1_000_000  # in folders of images: more is probably the wrong folder
_SHOWN_SKIPPED = 10
_MAX_TURNS = 100  # of a conversation that are kept; no recipe reads that many


def predict(
    name: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="A run, a job for its newest run, or the folder of an export.")
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT", help="Texts, or paths of images or image folders. Default: lines of standard input."
        ),
    ] = None,
    store: StoreOption = None,
    checkpoint: CheckpointOption = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Read the inputs from a file, one per line.")
    ] = None,
    beam: Annotated[
        int | None, typer.Option("--beam", metavar="N", min=1, max=100, help="Beam size. Default: the recipe's.")
    ] = None,
    n_best: Annotated[
        int | None,
        typer.Option(
            "--n-best",
            metavar="N",
            min=1,
            max=100,
            help="Print the N best outputs with their scores. Default: only the best.",
        ),
    ] = None,
    nucleus: Annotated[
        float | None,
        typer.Option(
            "--nucleus",
            metavar="NUMBER",
            min=0.0,
            max=1.0,
            help="Sample from the most likely tokens that add up to this probability. Default: the recipe's.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="NUMBER",
            min=0.01,
            max=100.0,
            help="Sampling temperature; higher is more random. Default: the recipe's.",
        ),
    ] = None,
    repetition: Annotated[
        float | None,
        typer.Option(
            "--repetition",
            metavar="NUMBER",
            min=1.0,
            max=100.0,
            help="Repetition penalty; values above 1 discourage repeats. Default: the recipe's.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, max=2**62, help="Random seed for sampling. Default: 1.")
    ] = None,
    attention_maps: Annotated[
        Path | None,
        typer.Option("--attention-maps", metavar="DIR", help="Write an attention map (PNG) for each image to DIR."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Chat with the model, line by line.")] = False,
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict with the model of a run, or with an exported one.

    It translates text, replies to a prompt, or classifies or captions images.
    """
    options = DecodeOptions(beam, nucleus, temperature, repetition, seed, n_best)
    if chat and (inputs or file or as_json or attention_maps):
        raise Mistake("--chat: reads standard input; remove the inputs, --file, --json and --attention-maps")
    if inputs and file:
        raise Mistake("--file: has the inputs; remove the others")
    # Probably a variable that is not set. Of several inputs, each recipe decides what a blank one means.
    if inputs and len(inputs) == 1 and not inputs[0].strip():
        raise Mistake("the input is empty; give a text or the path of an image")
    if is_folder(name):
        for option, setting in (("--checkpoint", checkpoint), ("--store", store), ("--trust-code", trust_code)):
            if setting:
                raise Mistake(f"{option}: only for runs; {name} is a folder")
        predictor = open_model(Path(name))
    else:
        choice = choice_of(checkpoint)
        predictor = load_predictor(find_run(store, name), choice, accept=trusting(trust_code))
    if chat:
        _chat(predictor, options)
        return
    predictor.decoding(options)  # before anything is read
    all_inputs = _inputs_of(predictor, inputs, file)
    _write(_predicted(predictor, all_inputs, options, attention_maps), all_inputs, as_json, bool(n_best))


# Inputs.


@dataclass(frozen=True)
class _Inputs:
    """Inputs in order; `count` is None if it is not known before the end. `named`: each output has its input before it.

    Files of a folder that are not images are left out; any other input that is invalid ends the command.
    """

    texts: Iterable[str]
    count: int | None = None
    named: bool = False


def _inputs_of(predictor: Predictor, inputs: Sequence[str] | None, file: Path | None) -> _Inputs:
    is_text = predictor.recipe.inputs == "texts"
    if file is not None:
        # Twice: a mistake at its end must not show after hours, when half of the output is written.
        predictor.check(_lines_of(file))
        return _Inputs(_lines_of(file), sum(1 for _ in _lines_of(file)))
    if not inputs:
        if sys.stdin.isatty() and sys.stderr.isatty():
            kind = "text" if is_text else "path of an image"
            print(f"Type one {kind} per line; Ctrl-D ends the input.", file=sys.stderr, flush=True)
        return _Inputs(_lines(sys.stdin))
    predictor.check(inputs)
    if is_text:
        for text in inputs:
            if not text.split()[1:] and Path(text).suffix and Path(text).is_file():
                recipe = predictor.recipe.job.recipe
                raise Mistake(f"{text} is a file, but {recipe} takes texts; for its lines, use --file")
        return _Inputs(inputs, len(inputs))
    if not any(Path(path).is_dir() for path in inputs):
        return _Inputs(inputs, len(inputs))
    for path in inputs:
        if not Path(path).exists():  # what is named must be there; only files in a folder may be anything
            raise Mistake(f"{path}: no such file")
    paths = [image for path in inputs for image in (_files_in(Path(path)) if Path(path).is_dir() else [path])]
    return _Inputs(paths, len(paths), named=True)


def _files_in(folder: Path) -> list[str]:
    """Return the files below a folder, sorted; links to other folders are not followed, hidden ones are left out."""
    files: list[str] = []
    for root, folders, names in os.walk(folder):
        folders[:] = (name for name in folders if not name.startswith("."))
        files += [str(Path(root) / name) for name in names if not name.startswith(".")]
        if len(files) > _MAX_FILES:
            raise Mistake(f"{folder}: more than {_MAX_FILES:,} files; give its parts one after the other")
    if not files:
        raise Mistake(f"{folder}: no files in this folder")
    return sorted(files)


def _lines_of(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8", errors="surrogateescape", newline="\n") as opened:
            yield from _lines(opened)
    except OSError as error:
        raise Mistake(f"--file {file}: cannot read: {error.strerror}") from None


def _lines(stream: TextIO) -> Iterator[str]:
    """Yield the lines of a stream. Invalid UTF-8 passes, so that the error can name the input's number."""
    stream.reconfigure(errors="surrogateescape", newline="\n")  # type: ignore[attr-defined]
    while line := stream.readline(MAX_CHARACTERS):
        excess = line
        while excess and not excess.endswith("\n"):  # a line that is too long is refused by its number like any other
            excess = stream.readline(MAX_CHARACTERS)
        yield line.rstrip("\r\n")


# Outputs.


class _Row(NamedTuple):
    number: int
    text: str
    prediction: Prediction
    attention_map: Path | None


def _predicted(
    predictor: Predictor, inputs: _Inputs, options: DecodeOptions, maps: Path | None
) -> Iterator[list[_Row]]:
    """Yield rows some thousands at a time: memory is bounded, and the order is kept."""
    skipped: list[str] = []
    has_any = False
    # A bar if standard error is a terminal, and no outputs appear there.
    has_bar = sys.stderr.isatty() and not sys.stdout.isatty() and inputs.count != 1
    bar = (
        ProgressBars(console(sys.stderr)).track("predicting", inputs.count) if has_bar else nullcontext(lambda _: None)
    )
    with bar as advance:
        for predictions in predictor.stream(inputs.texts, options, skipped.append if inputs.named else None):
            paths = _write_maps(maps, predictions) if maps else [None] * len(predictions)
            advance(len(predictions))
            has_any = has_any or bool(predictions)  # of a batch, all files may be skipped
            yield [_Row(*row, path) for row, path in zip(predictions, paths, strict=True)]
    if skipped and not has_any:
        raise Mistake(f"there are no images among {len(skipped):,} files; the first is {skipped[0]}")
    for fault in skipped[:_SHOWN_SKIPPED]:
        print(f"skipped {fault}", file=sys.stderr)
    if len(skipped) > _SHOWN_SKIPPED:
        print(f"skipped {len(skipped) - _SHOWN_SKIPPED:,} more files", file=sys.stderr)


def _write(batches: Iterator[list[_Row]], inputs: _Inputs, as_json: bool, scored: bool) -> None:
    """Print the outputs. Standard output has nothing else: notes go to standard error."""
    rows: Iterator[_Row] = chain.from_iterable(batches)
    if isinstance(inputs.texts, Sequence) and not inputs.named:
        rows = iter(list(rows))  # all of them first: if an argument is invalid, nothing is printed
    if as_json:
        print_json_list(map(_as_json, rows))
        return
    for row in rows:
        texts = [row.prediction.text]
        if scored:  # the number of the input, the score and the text of each output
            details = row.prediction.details
            best = details.get("n_best", [{"output": row.prediction.text, "score": details.get("score", 0.0)}])
            texts = [f"{row.number}\t{output['score']:.4f}\t{output['output']}" for output in best]
        for line in texts:
            print(harmless(f"{row.text}: {line}" if inputs.named else line, keep="\t"))
        if row.prediction.note:
            print(f"input {row.number}: {row.prediction.note}", file=sys.stderr)
        if row.attention_map:
            print(f"wrote {row.attention_map}", file=sys.stderr)


def _chat(predictor: Predictor, options: DecodeOptions) -> None:
    """Print a reply for each line; a line that cannot be answered is reported and left out of the conversation.

    Every line of input gives exactly one line of output, so that a script can match them.
    """
    predictor.check_conversation(options)
    turns: list[str] = []
    for line in _prompted_lines() if sys.stdin.isatty() else _lines(sys.stdin):
        if not line.strip():
            print(flush=True)
            continue
        turns = [*turns[1 - _MAX_TURNS :], line]  # a long chat must not grow without bound
        try:
            reply = predictor.converse(turns, options)
        except Mistake as mistake:
            print(mistake, file=sys.stderr)
            print(flush=True)
            turns.pop()  # the next line continues the conversation without this one
            continue
        if reply.note:
            print(f"({reply.note})", file=sys.stderr)
        print(harmless(reply.text), flush=True)
        turns.append(reply.text)


def _prompted_lines() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history and line editing
    print("Type a message; Ctrl-D ends the chat.", file=sys.stderr)
    try:
        while True:
            yield input("> ")
    except EOFError:
        print(file=sys.stderr)


def _as_json(row: _Row) -> dict[str, object]:
    values: dict[str, object] = {"input": row.text, "output": row.prediction.text, **row.prediction.details}
    if row.attention_map:
        values["attention_map"] = str(row.attention_map)
    return values | ({"note": row.prediction.note} if row.prediction.note else {})


def _write_maps(folder: Path, predictions: Sequence[Predicted]) -> list[Path | None]:
    paths: list[Path | None] = []
    if not all(predicted.prediction.draw_map for predicted in predictions):
        raise Mistake("--attention-maps: the model draws none")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, image, prediction in predictions:
            path = folder / f"{number}-{Path(image).stem[:100]}.png"
            path.write_bytes(prediction.attention_map or b"")
            paths.append(path)
    except OSError as error:
        raise Mistake(f"--attention-maps {folder}: cannot write: {error.strerror}") from error
    return paths


def export(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or of a job for its newest run.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="The folder to write. Default: model.")
    ] = None,
    store: StoreOption = None,
    checkpoint: Annotated[
        str,
        typer.Option("--checkpoint", metavar="best|last|STEP", help="Checkpoint, by score, age or step."),
    ] = "best",
    average: Annotated[
        int,
        typer.Option("--average", metavar="N", min=1, max=100, help="Average the weights of that many checkpoints."),
    ] = 1,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="ctranslate2|onnx", help="Default: the fastest that the recipe has."),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Quantize the weights: smaller, and faster on CPUs.")] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="NUMBER",
            min=0.0,
            help="Largest allowed drop in score against torch. Default: the recipe's.",
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option("--samples", metavar="N", min=1, help="Maximum validation samples for the comparison."),
    ] = 1000,
    license_name: Annotated[
        str | None, typer.Option("--license", metavar="NAME", help="For the model card, such as apache-2.0.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="PLACE", help="Deliver it: user@board:dir, s3://bucket/prefix or a folder."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the model of another run in the folder.")] = False,
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the model of a run for machines without torch."""
    options = ExportOptions(
        choice_of(checkpoint), average, form, "int8" if int8 else "fp32", tolerance, samples, license_name, replace
    )
    if to is not None:
        destination_of(to)  # refuses a wrong place before the work
    run, screen = find_run(store, name), console()
    say = (lambda _: None) if as_json else screen.say
    with tempfile.TemporaryDirectory(prefix="packtrain-export-") as scratch:
        # Only a copy is wanted where it is delivered, unless a folder is asked for as well.
        folder = output or (Path("model") if to is None else Path(scratch, "model"))
        model = export_run(run, folder, options, say, trusting(trust_code))
        if to is not None:
            deliver(folder, to, say, untracked if as_json else CopyBars(screen).track)
            say(f"Delivered to {to}")
        if as_json:
            print_json({"folder": None if to and not output else str(folder), "to": to, **asdict(model.manifest)})
            return
        if to is None or output is not None:
            size = sum(file.bytes for file in model.manifest.files)
            screen.say("Wrote ", (str(folder), "bold"), f" ({show_bytes(size)})")
            if run.job.has_own_code:
                screen.say(f"  inputs and outputs of model.onnx: {folder / 'README.md'}")
            else:
                screen.say(f"  try it: packtrain predict {quote(str(folder))}")
                screen.say(f"  serve it: packtrain serve {quote(str(folder))}")
