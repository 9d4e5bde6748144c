"""The card of an exported model: README.md with the front matter that Hugging Face's hub reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import yaml

from packtrain.errors import harmless
from packtrain.export.evaluate import show
from packtrain.export.model import ModelManifest, Parity
from packtrain.job import Job
from packtrain.recipes import Recipe
from packtrain.report.markdown import plain

if TYPE_CHECKING:
    from packtrain.export.onnx import OwnGraph


def card_of(
    manifest: ModelManifest, job: Job, recipe: Recipe, license_name: str | None, own_graph: OwnGraph | None = None
) -> str:
    """Return the card: what the model is, what it learned from, how well it does, and how it was made.

    `own_graph` describes the model of a user's recipe, which only its author can use.
    """
    front = yaml.safe_dump(_front_matter(manifest, job, recipe, license_name), sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n" + "\n".join(_body(manifest, job, recipe, license_name, own_graph)) + "\n"


def _front_matter(manifest: ModelManifest, job: Job, recipe: Recipe, license_name: str | None) -> dict[str, Any]:
    task = recipe.words.hub_task
    # "other" is the hub's word for a license that it does not know.
    matter: dict[str, Any] = {"license": license_name or "other", "library_name": manifest.form}
    if task:
        matter["pipeline_tag"] = task
    matter["tags"] = ["packtrain", manifest.recipe.partition(":")[0], manifest.precision]
    if task and manifest.scores:
        results = [
            {
                "task": {"type": task},
                "dataset": {"name": manifest.origin.pack, "type": job.name, "split": split},
                "metrics": [{"type": name, "value": round(value, 4)} for name, value in scores.items()],
            }
            for split, scores in _by_split(manifest.scores).items()
        ]
        matter["model-index"] = [{"name": manifest.origin.run, "results": results}]
    return matter


def _by_split(scores: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the scores of each split; a run calls them `test.bleu`."""
    by_split: dict[str, dict[str, float]] = {}
    for name, value in scores.items():
        split, _, metric = name.partition(".")
        by_split.setdefault(harmless(split), {})[harmless(metric)] = value
    return by_split


def _body(
    manifest: ModelManifest, job: Job, recipe: Recipe, license_name: str | None, own_graph: OwnGraph | None
) -> Iterator[str]:
    origin = manifest.origin
    exported_on = datetime.fromtimestamp(origin.made, UTC).strftime("%Y-%m-%d")
    yield f"# {job.name}\n"
    yield f"A model of the recipe `{manifest.recipe}`, trained with Packtrain; {manifest.form}, {manifest.precision}.\n"
    if own_graph is None:
        yield "```console"
        yield "$ packtrain predict . " + ("photo.jpg" if recipe.inputs == "images" else '"A sentence."')
        yield "$ packtrain serve ."
        yield "```"
    else:
        yield "| `model.onnx` | name | type | shape |"
        yield "| --- | --- | --- | --- |"
        for word, values in (("input", own_graph.inputs), ("output", own_graph.outputs)):
            for value in values:
                yield f"| {word} | {_code(value.name)} | {value.type} | {' x '.join(map(str, value.shape))} |"
    yield "\n## Scores\n"
    yield "| metric | value | of | on |"
    yield "| --- | --- | --- | --- |"
    for split, scores in _by_split(manifest.scores).items():
        for name, score in scores.items():
            yield f"| {plain(name)} | {score:.4g} | the run | {_code(split)}, at the end of training |"
    for parity in manifest.parity:
        where = f"{parity.samples:,} samples of {_code(parity.split)}"
        yield f"| {plain(parity.metric)} | {parity.trained:.4g} | the run | {where} |"
        yield f"| {plain(parity.metric)} | {parity.exported:.4g} | this model | {where} |"
    for parity in manifest.parity:
        yield f"\nOn these samples, {plain(parity.metric)} of this model is {drop_in_words(parity)} than in the run."
        if parity.signature:
            yield f"\nSignature of {plain(parity.metric)}: {_code(parity.signature)}."
    yield "\n## Data\n"
    for split in ("train", "valid", "test"):
        for source in getattr(job.data, split):
            names = (path.partition("?")[0].rstrip("/").rpartition("/")[2] for path in source.paths)
            yield f"- {split}: {source.kind}, {', '.join(map(_code, names))}"
    if job.data.held_out is not None:
        yield f"- valid: {job.data.share} of train, held out"
    if recipe.inputs == "images":
        yield (
            "\nIt was trained on pictures as packs store them: re-encoded JPEGs. Their pixels differ from the"
            " originals by 0.003 to 0.05 of 255 on average in photographs, and by 0.16 in drawings. Packtrain"
            " prepares pictures in the same way when it predicts; programs that decode the originals may get other"
            " answers."
        )
    yield "\n## How it was made\n"
    steps = f"step {origin.step:,}" + (
        f", the mean of {len(origin.checkpoints)} checkpoints" if origin.checkpoints[1:] else ""
    )
    yield f"- run `{origin.run}`, {steps}, exported on {exported_on} by Packtrain {origin.packtrain}"
    options = "".join(f", {name} {value}" for name, value in job.model.options.items())
    yield f"- model `{job.model.size}`{options}; trained for {job.train.duration}, batches of {job.train.batch}"
    if job.parent is not None:
        yield f"- started from {job.parent.identified}"
    yield f"- pack `{origin.pack}`; SHA-256 of the job {origin.job}"
    yield "- `model.json` has the SHA-256 of every file here"
    yield "\n## License\n"
    yield license_name or "Not stated. The licenses of the data apply to what was learned from it, too."


def drop_in_words(parity: Parity) -> str:
    drop, low, high = parity.drop, parity.interval.low, parity.interval.high
    if drop < 0:
        drop, low, high = -drop, -high, -low
    return f"{'better' if parity.drop < 0 else 'worse'} by {show(drop)} (95 % interval {show(low)} to {show(high)})"


def _code(text: str) -> str:
    """Return text as code in Markdown, also within a table; a backquote would end it."""
    shown = harmless(text).replace("`", "'").replace("|", "\\|")
    return f"`{shown}`"
