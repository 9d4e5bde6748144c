"""Programs that are written with a launcher: `torchrun`, `accelerate launch`, `deepspeed`, `python -m torch...`.

Packtrain starts the workers itself, on all machines, so the launcher's part is read and left out: what remains is the
program, how many workers a machine has, and variables that the launcher would have set. If the launcher tells even a
single worker its rank, the word `torchrun` remains, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from packtrain.errors import Mistake, quoted

TORCHRUN = "torchrun"
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_ADVICE = "write the program alone, such as [train.py, --lr, '0.1'], and the number of workers as fleet.workers"


@dataclass(frozen=True)
class LauncherKind:
    """The options of a launcher: with a value, without, for a module, and those that Packtrain cannot do for it.

    `workers` are the options for workers of a machine, `total` for those of all machines, and `variables` those that
    the launcher passes on as variables. `tells_one`: a single worker also gets RANK and so on.
    """

    name: str
    valued: frozenset[str]
    flags: frozenset[str]
    workers: frozenset[str] = frozenset()
    total: frozenset[str] = frozenset()
    module: frozenset[str] = frozenset({"m", "module"})
    bare: frozenset[str] = frozenset({"no-python"})
    variables: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    tells_one: bool = True


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IN_CODE = "pass it to `Accelerator(...)` in the program"
_TORCHRUN = LauncherKind(
    TORCHRUN,
    valued=_words(
        "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts monitor-interval start-method"
        " role log-dir redirects tee local-ranks-filter node-rank master-addr master-port local-addr logs-specs"
        " event-log-handler numa-binding signals-to-handle r t"
    ),
    flags=_words("standalone use-env run-path"),
    workers=_words("nproc-per-node"),
)
_ACCELERATE = LauncherKind(
    "accelerate launch",
    valued=_words(
        "num-processes num-machines machine-rank main-process-ip main-process-port mixed-precision dynamo-backend"
        " gradient-accumulation-steps num-cpu-threads-per-process gpu-ids rdzv-backend rdzv-conf max-restarts"
        " monitor-interval role tee log-dir main-training-function"
    ),
    flags=_words("multi-gpu cpu quiet q same-network debug enable-cpu-affinity"),
    total=_words("num-processes"),
    tells_one=False,
    variables={
        "mixed-precision": "ACCELERATE_MIXED_PRECISION",
        "dynamo-backend": "ACCELERATE_DYNAMO_BACKEND",
        "gradient-accumulation-steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "cpu": "ACCELERATE_USE_CPU",
    },
    refused={
        "config-file": "write what it says as options, or pass it to `Accelerator(...)` in the program",
        "use-deepspeed": _IN_CODE,
        "use-fsdp": _IN_CODE,
        "use-megatron-lm": _IN_CODE,
        "tpu": "Packtrain does not train on TPUs",
    },
)
_DEEPSPEED = LauncherKind(
    "deepspeed",
    valued=_words(
        "H hostfile num-nodes num-gpus master-port master-addr node-rank launcher launcher-args"
        " elastic-training bind-core-list ssh-port venv-script"
    ),
    flags=_words("no-local-rank no-ssh-check force-multi bind-cores-to-rank save-pid enable-each-rank-log"),
    workers=_words("num-gpus"),
    refused={
        "i": "limit GPUs with CUDA_VISIBLE_DEVICES under `environment`",
        "include": "limit GPUs with CUDA_VISIBLE_DEVICES under `environment`",
        "e": "limit GPUs with CUDA_VISIBLE_DEVICES under `environment`",
        "exclude": "limit GPUs with CUDA_VISIBLE_DEVICES under `environment`",
        "autotuning": "run it on a machine of your own",
    },
)
_COMMANDS = {TORCHRUN: _TORCHRUN, "deepspeed": _DEEPSPEED, "accelerate-launch": _ACCELERATE}
_MODULES = {
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "accelerate.commands.launch": _ACCELERATE,
}


@dataclass(frozen=True)
class LaunchedProgram:
    """The program in a launcher's command line; `workers` per machine, `total` over all, None if it does not say.

    `launcher` is the name of what was left out, and empty if the program had none.
    """

    program: tuple[str, ...]
    workers: int | None = None
    total: int | None = None
    launcher: str = ""


def without_launcher(program: Sequence[str]) -> LaunchedProgram:
    """Return the program without its launcher; a Mistake names an option that Packtrain cannot do for it."""
    first = command_of(program) if program[0] == "env" else 0
    launcher = _launcher_of(program[first:])
    if launcher is None:
        return LaunchedProgram(tuple(program))
    kind, arguments = launcher
    options, command = _options(kind, arguments)
    if not command:
        raise Mistake(f"{kind.name} has no program; {_ADVICE}")
    variables = list(program[1:first])
    for name, text in options:
        if name in kind.variables:
            value = text.upper() if name == "dynamo-backend" else text or "true"
            variables.append(f"{kind.variables[name]}={value}")
    names = {name for name, _ in options}
    if names & kind.module:
        command = ["python", "-m", *command]
    elif not names & kind.bare and variables and command[0].endswith(".py"):
        command = ["python", *command]  # `env` starts a command, not a script
    command = ["env", *variables, *command] if variables else command
    command = [TORCHRUN, *command] if kind.tells_one else command
    workers, total = (_count(kind, options, names) for names in (kind.workers, kind.total))
    return LaunchedProgram(tuple(command), workers, total, kind.name)


def _launcher_of(program: Sequence[str]) -> tuple[LauncherKind, list[str]] | None:
    """Return the launcher and its arguments, with the program among them; None if the program has no launcher."""
    command, arguments = PurePosixPath(program[0]).name, list(program[1:])
    if command in _COMMANDS:
        return _COMMANDS[command], arguments
    if command == "accelerate" and arguments[:1] == ["launch"]:
        return _ACCELERATE, arguments[1:]
    if is_python(command) and arguments[:1] == ["-m"] and len(arguments) > 1 and arguments[1] in _MODULES:
        return _MODULES[arguments[1]], arguments[2:]
    return None


def _options(kind: LauncherKind, arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the launcher's options as names and values, and what comes after them."""
    options, words = list[tuple[str, str]](), list(arguments)
    while words and words[0].startswith("-"):
        written, equals, value = words.pop(0).partition("=")
        name = written.lstrip("-").replace("_", "-")
        if name in kind.refused:
            raise Mistake(f"{kind.name}: Packtrain does not do {written}; {kind.refused[name]}")
        if name not in kind.valued | kind.flags | kind.module | kind.bare:
            raise Mistake(f"{kind.name}: unknown option {quoted(written, 60)}; {_ADVICE}")
        if name in kind.valued and not equals:
            if not words:
                raise Mistake(f"{kind.name}: {written} has no value")
            value = words.pop(0)
        options.append((name, value))
    return options, words


def _count(kind: LauncherKind, options: Sequence[tuple[str, str]], names: frozenset[str]) -> int | None:
    """Return the number of workers; None for `auto`, `gpu` and `cpu`, which Packtrain finds by itself."""
    text = next((value for name, value in reversed(options) if name in names), None)
    if text is None or text in ("auto", "gpu", "cpu"):
        return None
    if not text.isdecimal() or int(text) < 1:
        raise Mistake(f"{kind.name}: {quoted(text, 60)} is not a number of workers")
    return int(text)


def asks_for_rank(program: Sequence[str]) -> bool:
    """True if even a single worker is to get RANK and so on."""
    return program[0] == TORCHRUN


def command_of(program: Sequence[str]) -> int:
    """Return the place of the command itself, after `torchrun`, and after `env` and the variables that it sets."""
    first = int(asks_for_rank(program))
    if program[first] != "env":
        return first
    return next((place for place, word in enumerate(program) if place > first and "=" not in word), first)


def is_python(command: str) -> bool:
    """True if a program's first word is Python: the one that Packtrain runs with is meant."""
    return _PYTHON.fullmatch(command) is not None
