"""Load a job: the file, its recipe's defaults below it and `--set` on top; or say what is wrong in one line."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from packtrain.errors import FieldMistake, Mistake, printable
from packtrain.job.document import Document, YamlNode, plain, read_node, read_text
from packtrain.job.job import EvaluateSettings, Job, TrainSettings, expand
from packtrain.job.kinds import SCHEDULES, word_of
from packtrain.job.part import Location, code_root_fault, is_address, is_recipe, is_tracking_uri
from packtrain.job.secrets import holds_secret, secret_in
from packtrain.units import Duration, counted, cut_to, keep_share

MAX_BYTES = 1_000_000

_FEWEST_STEPS = 100.0
"""From one evaluation to the next by default, however short the run: they would take longer than its training."""

_STEP = re.compile(r"[A-Za-z0-9_-]+")

DefaultsOf = Callable[[str, Path, Mapping[str, object]], Mapping[str, object]]
"""Returns the defaults of a recipe, given its name, the directory of the job's code, and the job's section `model`."""


def read_document(path: str | Path) -> Document:
    """Return a job file as plain data with the lines of its fields, or raise one Mistake."""
    return read_text(str(path), text_of(path))


def text_of(path: str | Path) -> str:
    """Return the text of a YAML file, or raise one Mistake."""
    return _decode(_read_bytes(path), str(path))


def _read_bytes(path: str | Path) -> bytes:
    name = printable(str(path))
    try:
        # Asked before opening: opening a pipe or a device could block.
        if stat.S_ISDIR(Path(path).stat().st_mode):
            raise Mistake(f"{name}: is a directory, not a job file")
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise Mistake(f"{name}: is not a regular file")
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise Mistake(f"{name}: no such file") from None
    except OSError as error:
        raise Mistake(f"{name}: cannot read it: {error.strerror}") from None
    except ValueError:
        raise Mistake(f"{name}: invalid path") from None
    if len(content) > MAX_BYTES:
        raise Mistake(f"{name}: larger than {MAX_BYTES // 1_000_000} MB, the limit for a job file")
    return content


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The codec does not count the byte order mark that it has skipped.
        start = error.start + (3 if content.startswith(b"\xef\xbb\xbf") else 0)
        located = Document(name, "", {}, {(): content.count(b"\n", 0, start) + 1})
        raise located.mistake((), f"not UTF-8 at byte {start}; save the file as UTF-8") from None


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """Return the document with each `field.path=value` set, with short forms on the way written out."""
    data = _copy(expand(document.data))
    places = dict(document.places)
    for override in overrides:
        location, node = _read_override(override)
        match location, data.get("program"):
            case ("program", str(), *_), list(command):  # not `program.2`, which is a word of a command alone
                data["program"] = {"command": command}
        _set(data, places, location, node)
        data = expand(data)  # the value may be a short form itself, and the next field one below it
    return replace(document, data=data, places=places)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(entry) for entry in value]
    return value


_SET = Document("", "", {}, {(): None})  # no line: its mistakes name `--set` instead of a file


def _read_override(override: str) -> tuple[Location, YamlNode]:
    field, equals, text = override.partition("=")
    field = field.strip()
    if not equals:
        raise Mistake(f"--set {printable(field, 60)}: write it as field=value, such as train.seed=2")
    steps: Location = tuple(int(step) if re.fullmatch("[0-9]{1,4}", step) else step for step in field.split("."))
    if not all(_STEP.fullmatch(str(step)) for step in steps):
        raise Mistake(f"--set {printable(field, 60)}: invalid field; write it with dots, such as train.seed=2")
    if holds_secret(steps):
        raise _SET.mistake(steps, secret_in(steps[0]))

    def refuse(_line: int, location: Location, problem: str) -> Mistake:
        return _SET.mistake((*steps, *location), problem)

    return steps, read_node(text, refuse, steps) or YamlNode(1, None)


def _set(data: Any, places: dict[Location, int | None], location: Location, node: YamlNode) -> None:
    """Put a value at a location, in place; missing mappings and lists on the way are created."""
    path: Location = ()
    for index, written in enumerate(location):
        step: Any = str(written) if isinstance(data, dict) else written
        if isinstance(data, list):
            if not isinstance(step, int) or step > len(data):
                count = counted(len(data), "item")
                raise _SET.mistake((*path, step), f"no such item; the list has {count}, numbered from 0")
            if step == len(data):
                data.append(None)
        elif not isinstance(data, dict):
            raise _SET.mistake((*path, step), f"{'.'.join(map(str, path))} is a value and has no fields")
        path = (*path, step)
        if index == len(location) - 1:
            # What the file said below this field is replaced, so errors must no longer name its lines.
            for under in [place for place in places if place[: len(path)] == path]:
                del places[under]
            data[step] = plain(node, path, places, in_file=False)
            return
        if (data[step] if isinstance(data, list) else data.get(step)) is None:
            data[step] = [] if isinstance(location[index + 1], int) else {}
            places[path] = None
        data = data[step]


def merge_defaults(document: Document, defaults: Mapping[str, object]) -> Document:
    """Return the document over a recipe's defaults, field by field; the value of a field is never a mix of both."""
    data, below = expand(document.data), expand(defaults)
    for section, fields in below.items():
        written_section = data.get(section)
        if written_section is None:
            data[section] = fields
        elif isinstance(written_section, Mapping) and isinstance(fields, Mapping):
            data[section] = {**fields, **written_section}
    return replace(document, data=data)


def no_defaults(_recipe: str, _code: Path, _model: Mapping[str, object]) -> Mapping[str, object]:
    return {}


def fitted_defaults(defaults: Mapping[str, Any], written: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a recipe's defaults as they suit a job, of which `written` is what its file and `--set` say.

    They are written for the recipe's own duration: a default never makes another one impossible. If `--set` names a
    field of another schedule, or one that excludes another, the default gives way.
    """
    defaults = expand(defaults)
    try:
        train = TrainSettings.model_validate(defaults["train"])
        duration = Duration.parse(str(_section(written, "train").get("duration", train.duration)))
        every = EvaluateSettings.model_validate(_section(defaults, "evaluate")).every
    except (ValidationError, ValueError, TypeError, KeyError):
        return defaults  # whatever is wrong is reported with its place
    schedule = train.schedule.default_for(train.duration, duration)
    word, changed = word_of(SCHEDULES, schedule), dict(defaults["train"])
    if schedule != train.schedule:
        changed["schedule"] = {word: schedule.model_dump(mode="json", exclude_none=True)}
    words = _section(_section(written, "train"), "schedule")
    if words and list(words) != [word]:
        del changed["schedule"]
    elif fields := _section(words, word):
        changed["schedule"] = {word: schedule.beside(fields)}
    if every is None or not every.unit == duration.unit == train.duration.unit:
        return {**defaults, "train": changed}
    fewest = _FEWEST_STEPS if duration.unit == "steps" else 0.0
    shorter = max(fewest, (cut_to(every, train.duration, duration) or duration).value)
    interval = str(Duration(min(every.value, shorter), duration.unit))
    return {**defaults, "train": changed, "evaluate": {**defaults["evaluate"], "every": interval}}


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}


@dataclass(frozen=True)
class LoadedJob:
    """A job with the directory of its file, where its code is. `notes` say what differs from what a person wrote.

    `allow_drops`: unusable samples are dropped, however many there are, where its data is packed.
    """

    job: Job
    directory: Path
    document: Document
    notes: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    allow_drops: bool = False

    @property
    def file(self) -> str:
        """The name of the file, without its directory."""
        return Path(self.document.name).name

    @property
    def text(self) -> str:
        """The file as written; what `--set` changed is only in the job."""
        return self.document.text

    @property
    def code(self) -> Path:
        return Path(os.path.normpath(self.directory / self.job.code))

    @property
    def place(self) -> Path:
        """The directory that stands for the one in which a program is started."""
        return self.code / self.job.directory

    @contextmanager
    def placing_mistakes(self) -> Iterator[None]:
        """Give a mistake that only a recipe, a fleet or the data reveals the place of its field in the file."""
        try:
            yield
        except FieldMistake as mistake:
            raise self.mistake(mistake.field, mistake.fault) from None

    def mistake(self, field: str, text: str) -> Mistake:
        """Return the error for a fault that only a recipe, a fleet or the data reveals, with the place of the field."""
        steps = (int(step) if step.isdecimal() else step for step in field.split("."))
        return self.document.mistake(tuple(steps), text)


def load_job(path: str | Path, overrides: Sequence[str] = (), defaults_of: DefaultsOf = no_defaults) -> LoadedJob:
    """Return the validated job of a file, or raise one Mistake. `defaults_of` raises it for an unknown recipe."""
    document = read_document(path)
    directory = Path(os.path.normpath(Path(path).absolute())).parent
    # Twice: the recipe may come from `--set`, its defaults go below the file, and `--set` goes on top of both.
    overridden = apply_overrides(document, overrides).data
    written, defaults = document, None
    recipe, code = overridden.get("recipe"), overridden.get("code", ".")
    if isinstance(recipe, str) and is_recipe(recipe) and isinstance(code, str) and not code_root_fault(code):
        try:
            defaults = defaults_of(recipe, Path(os.path.normpath(directory / code)), _section(overridden, "model"))
        except Mistake as mistake:
            raise apply_overrides(document, overrides).mistake(("recipe",), str(mistake)) from None
        document = merge_defaults(document, fitted_defaults(defaults, overridden))
    document, notes = _fitted(written, defaults, apply_overrides(document, overrides), overrides)
    try:
        job = Job.model_validate(document.data)
    except ValidationError as error:
        raise document.first_mistake(error) from None
    if "origin" in document.data:  # a run links to what is there, so only the client that starts it may say where
        raise document.mistake(("origin",), "is written by `packtrain run`; remove it")
    if "parent" in document.data:
        raise document.mistake(("parent",), "is written by `packtrain run`; pass --from RUN, or set `weights: run:RUN`")
    if "inputs" in document.data:
        raise document.mistake(("inputs",), "is how a run stores the data of a program; write it as `data`")
    if job.program is None:
        data = job.data.map_paths(lambda path: path if is_address(path) else os.path.normpath(directory / path))
        job = job.model_copy(update={"data": data})
    elif job.inputs:
        inputs = {
            name: path if is_address(path) else os.path.normpath(directory / path) for name, path in job.inputs.items()
        }
        job = job.model_copy(update={"inputs": inputs})
    if job.directory != ".":  # from now on, outputs are named as they are in the copy of the code
        outputs = tuple(str(PurePosixPath(job.directory, output)) for output in job.outputs)
        job = job.model_copy(update={"outputs": outputs})
    where = job.report.mlflow
    if where is not None and not is_tracking_uri(where):
        report = job.report.model_copy(update={"mlflow": os.path.normpath(directory / where)})
        job = job.model_copy(update={"report": report})
    doubts = () if job.recipe is None else job.train.schedule.doubts_in(job.train)
    return LoadedJob(job, directory, document, (*notes, *doubts), tuple(overrides))


def _fitted(
    written: Document, defaults: Mapping[str, object] | None, document: Document, overrides: Sequence[str]
) -> tuple[Document, tuple[str, ...]]:
    """Return a job that `--set` makes shorter with the file's warm-up and intervals shortened, and a line about each.

    Whatever `--set` names stays as it is.
    """
    set_fields = {override.partition("=")[0].strip() for override in overrides}
    if "train.duration" not in set_fields:
        return document, ()
    other_overrides = [override for override in overrides if override.partition("=")[0].strip() != "train.duration"]
    try:
        longer = apply_overrides(written, other_overrides)
        if defaults is not None:
            longer = apply_overrides(merge_defaults(written, fitted_defaults(defaults, longer.data)), other_overrides)
        job = Job.model_validate(longer.data)
        duration = Duration.parse(str(document.data["train"]["duration"]))
    except (ValidationError, Mistake, ValueError, TypeError, KeyError):
        return document, ()  # whatever is wrong is reported with its place
    if job.recipe is None:
        return document, ()
    schedule = job.train.schedule.fitted(job.train.duration, duration)
    word = word_of(SCHEDULES, schedule)
    changes = {
        f"train.schedule.{word}.{field}": (before, after)
        for field, before in job.train.schedule
        if (after := getattr(schedule, field)) != before
        and "schedule" in _section(written.data, "train")
        and not any(name.startswith("train.schedule") for name in set_fields)
    }
    for section in ("evaluate", "checkpoint"):
        every = getattr(job, section).every
        if "every" not in _section(written.data, section):
            continue
        is_longer = isinstance(every, Duration) and every.unit == duration.unit and every.value >= duration.value
        if is_longer and not any(name.startswith(section) for name in set_fields):
            changes[f"{section}.every"] = (every, keep_share(every, job.train.duration, duration) or duration)
    data, places = _copy(document.data), dict(document.places)
    for field, (_, after) in changes.items():
        value = str(after) if isinstance(after, Duration) else after
        _set(data, places, tuple(field.split(".")), YamlNode(1, value))
    notes = [f"{field}: {before} -> {after}, to fit train.duration" for field, (before, after) in changes.items()]
    return replace(document, data=data, places=places), tuple(notes)
