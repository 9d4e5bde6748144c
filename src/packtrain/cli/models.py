"""Verbs of the model that came home: predict."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import JsonOption, StoreOption, find_run, print_json
from packtrain.errors import Mistake

if TYPE_CHECKING:
    from packtrain.export.predict import Predictor, Wishes
    from packtrain.recipes import Prediction

_REMEMBERED_TURNS = 100


def register(app: typer.Typer) -> None:
    app.command()(predict)


def predict(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a job's name for its newest run.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[INPUT]...", help="Sentences, or paths of images. Default: lines of standard input."),
    ] = None,
    store: StoreOption = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint instead of the last.")] = False,
    beam: Annotated[int | None, typer.Option("--beam", min=1, max=100, help="Hypotheses kept in a search.")] = None,
    nucleus: Annotated[
        float | None,
        typer.Option("--nucleus", min=0.0, max=1.0, help="Draw from the likeliest pieces that make up this share."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.01, max=100.0, help="Draw; above 1 more freely.")
    ] = None,
    repetition: Annotated[
        float | None, typer.Option("--repetition", min=1.0, max=100.0, help="Above 1, fewer pieces come again.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, max=2**62, help="The luck of a draw.")] = None,
    pictures: Annotated[
        Path | None, typer.Option("--pictures", metavar="DIR", help="Where to put pictures of what was looked at.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Hold a conversation, line by line.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Use the model of a run: a sentence to its translation, a prompt to a reply, an image to its class or caption."""
    from packtrain.export.predict import Wishes, load_predictor

    wishes = Wishes(beam, nucleus, temperature, repetition, seed)
    if chat and (inputs or as_json or pictures):
        raise Mistake("--chat reads its lines from standard input; it takes no inputs, --json or --pictures")
    if inputs and len(inputs) == 1 and not inputs[0].strip():
        raise Mistake("the input is empty; there is nothing to answer")
    predictor = load_predictor(find_run(store, name), best)
    if chat:
        _converse(predictor, wishes)
        return
    given = inputs if inputs else list(_lines())
    predictions = predictor.predict(given, wishes)
    places = _put_pictures(pictures, given, predictions) if pictures else [None] * len(given)
    if as_json:
        rows = zip(given, predictions, places, strict=True)
        print_json(
            [{"input": one, "output": made.text, **made.details, **_more(made, place)} for one, made, place in rows]
        )
        return
    for made in predictions:
        print(shown(made.text))
    for number, made in enumerate(predictions, 1):
        if made.note:
            print(f"input {number}: {made.note}", file=sys.stderr)
    for place in filter(None, places):
        print(f"wrote {place}", file=sys.stderr)


def _lines() -> Iterator[str]:
    """Lines of standard input; what is not UTF-8 is let through, to be told of with its number."""
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    for line in sys.stdin:
        yield line.rstrip("\r\n")


def _converse(predictor: Predictor, wishes: Wishes) -> None:
    """One reply for each line, until there are no more; a line that cannot be answered is told and forgotten."""
    predictor.check_conversation(wishes)
    turns: list[str] = []
    for line in _asked() if sys.stdin.isatty() else _lines():
        if not line.strip():
            print(flush=True)
            continue
        turns = [*turns[1 - _REMEMBERED_TURNS :], line]
        try:
            reply = predictor.converse(turns, wishes)
        except Mistake as mistake:
            print(mistake, file=sys.stderr)
            print(flush=True)
            turns.pop()
            continue
        if reply.note:
            print(f"({reply.note})", file=sys.stderr)
        print(shown(reply.text), flush=True)
        turns.append(reply.text)


def _asked() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401 - input() then has a history, and keys to edit with
    print("Say something; Ctrl-D ends the conversation.", file=sys.stderr)
    try:
        while True:
            yield input("> ")
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)


def shown(text: str) -> str:
    """The text on one line, with what would steer a terminal spelled out."""
    return "".join(
        one.encode("unicode_escape").decode() if unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") else one
        for one in text
    )


def _more(made: Prediction, place: Path | None) -> dict[str, str]:
    return ({"picture": str(place)} if place else {}) | ({"note": made.note} if made.note else {})


def _put_pictures(folder: Path, inputs: Sequence[str], predictions: Sequence[Prediction]) -> list[Path | None]:
    if not any(made.picture for made in predictions):
        raise Mistake("--pictures: there are none; of the recipes, caption draws where it looked")
    places: list[Path | None] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, (one, made) in enumerate(zip(inputs, predictions, strict=True), 1):
            place = folder / f"{number}-{Path(one).stem[:100]}.png"
            if made.picture is not None:
                place.write_bytes(made.picture)
            places.append(place if made.picture is not None else None)
    except OSError as error:
        raise Mistake(f"--pictures {folder}: cannot be written: {error.strerror}") from error
    return places
