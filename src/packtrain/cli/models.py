"""Commands that use a trained model: predict."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import CheckpointOption, JsonOption, StoreOption, TrustOption, find_run, print_json, trusting
from packtrain.errors import Mistake, harmless

if TYPE_CHECKING:
    from packtrain.export.predict import DecodeOptions, Predictor
    from packtrain.recipes import Prediction

_MAX_TURNS = 100  # of a conversation that are kept; no recipe reads that many


def register(app: typer.Typer) -> None:
    app.command()(predict)


def predict(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or of a job for its newest run.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Texts, or paths of images. Default: lines of standard input."),
    ] = None,
    store: StoreOption = None,
    checkpoint: CheckpointOption = "last",
    beam: Annotated[int | None, typer.Option("--beam", min=1, max=100, help="Beam size.")] = None,
    nucleus: Annotated[
        float | None,
        typer.Option(
            "--nucleus", min=0.0, max=1.0, help="Sample from the most likely tokens that add up to this probability."
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", min=0.01, max=100.0, help="Sampling temperature; higher is more random."),
    ] = None,
    repetition: Annotated[
        float | None,
        typer.Option("--repetition", min=1.0, max=100.0, help="Repetition penalty; values above 1 discourage repeats."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, max=2**62, help="Random seed for sampling.")] = None,
    attention_maps: Annotated[
        Path | None,
        typer.Option("--attention-maps", metavar="DIR", help="Write an attention map (PNG) for each image to DIR."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Chat with the model, line by line.")] = False,
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Use the model of a run. It translates text, replies to a prompt, or classifies or captions an image."""
    from packtrain.export.predict import DecodeOptions, choice_of, load_predictor

    options = DecodeOptions(beam, nucleus, temperature, repetition, seed)
    if chat and (inputs or as_json or attention_maps):
        raise Mistake("--chat: reads standard input; remove the inputs, --json and --attention-maps")
    # Probably a variable that is not set. Of several inputs, each recipe decides what a blank one means.
    if inputs and len(inputs) == 1 and not inputs[0].strip():
        raise Mistake("the input is empty; give a text or the path of an image")
    choice = choice_of(checkpoint)
    predictor = load_predictor(find_run(store, name), choice, accept=trusting(trust_code))
    if chat:
        _chat(predictor, options)
        return
    given = inputs if inputs else list(_lines())
    predictions = predictor.predict(given, options)
    maps = _write_maps(attention_maps, given, predictions) if attention_maps else [None] * len(given)
    if as_json:
        print_json([_as_json(*row) for row in zip(given, predictions, maps, strict=True)])
        return
    # Standard output has exactly one line per input; everything else goes to standard error.
    for made in predictions:
        print(harmless(made.text))
    for number, made in enumerate(predictions, 1):
        if made.note:
            print(f"input {number}: {made.note}", file=sys.stderr)
    for path in filter(None, maps):
        print(f"wrote {path}", file=sys.stderr)


def _lines() -> Iterator[str]:
    """Yield lines of standard input. Invalid UTF-8 passes, so that the error can name the input's number."""
    from packtrain.export.predict import MAX_CHARACTERS

    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    while line := sys.stdin.readline(MAX_CHARACTERS):
        rest = line
        while rest and not rest.endswith("\n"):  # a line that is too long is refused by its number like any other
            rest = sys.stdin.readline(MAX_CHARACTERS)
        yield line.rstrip("\r\n")


def _chat(predictor: Predictor, options: DecodeOptions) -> None:
    """Print a reply for each line; a line that cannot be answered is reported and left out of the conversation.

    Every line of input gives exactly one line of output, so that a script can match them.
    """
    predictor.check_conversation(options)
    turns: list[str] = []
    for line in _prompted_lines() if sys.stdin.isatty() else _lines():
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
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)


def _as_json(given: str, made: Prediction, attention_map: Path | None) -> dict[str, object]:
    row: dict[str, object] = {"input": given, "output": made.text, **made.details}
    if attention_map:
        row["attention_map"] = str(attention_map)
    return row | ({"note": made.note} if made.note else {})


def _write_maps(folder: Path, inputs: Sequence[str], predictions: Sequence[Prediction]) -> list[Path | None]:
    if not any(made.attention_map for made in predictions):
        raise Mistake("--attention-maps: only caption has them")
    paths: list[Path | None] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, (one, made) in enumerate(zip(inputs, predictions, strict=True), 1):
            path = folder / f"{number}-{Path(one).stem[:100]}.png"
            if made.attention_map is not None:
                path.write_bytes(made.attention_map)
            paths.append(path if made.attention_map is not None else None)
    except OSError as error:
        raise Mistake(f"--attention-maps {folder}: cannot write: {error.strerror}") from error
    return paths
