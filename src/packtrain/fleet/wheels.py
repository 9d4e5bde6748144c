"""The wheels that another machine needs to train or serve, downloaded here with hashes: for an image or a bundle.

pip downloads them, with this person's index, proxy and certificates. Whoever installs them needs neither a network nor
a pip: the wheel of pip is one of them, and every wheel is checked against its hash.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import platform
import re
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Literal

from packtrain.errors import Mistake, quoted
from packtrain.files import sha256_of
from packtrain.identity import recorded_digest, source
from packtrain.identity import wheel_of as wheel_installed

WHEELS, TOOLS, LOCK, SBOM = "wheels", "tools", "requirements.txt", "sbom.cdx.json"
Torch = Literal["cpu", "cuda", "base", "none"]
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date that a zip can hold: the same wheel every time
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)[^;]*(?:;(.*))?")
NO_INDEX = re.compile(
    "NewConnectionError|ConnectTimeout|ReadTimeoutError|ProxyError|SSLError|name resolution|Connection refused"
)
_TORCH_INDEX = "https://download.pytorch.org/whl/"
_GLIBC = range(28, 4, -1)  # minor versions of glibc 2 that wheels are built for; 2.28 is that of Debian 10 and RHEL 8
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_DOWNLOAD = ("download", "--progress-bar", "off", "--disable-pip-version-check", "--no-input", "--only-binary", ":all:")
# pip in its wheel installs the others, so that the environment needs none. --isolated: the target may have a
# configuration that pins other versions.
INSTALL = "install --isolated --quiet --disable-pip-version-check --no-input --no-index --no-deps"


@dataclass(frozen=True)
class WheelTarget:
    """Where wheels are installed: the Python version, the processor, and which build of torch.

    With `base`, torch is already there; with `none`, the machine only runs exported models.
    """

    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    machine: str = platform.machine()
    torch: Torch = "cpu"

    def __post_init__(self) -> None:
        numbers = re.fullmatch(r"3\.([0-9]{1,2})", self.python)
        if numbers is None or int(numbers[1]) < 11:
            raise Mistake(f"--python {quoted(self.python)}: must be 3.11 or later, such as 3.12")
        if self.machine not in ("x86_64", "aarch64"):
            raise Mistake(f"{quoted(self.machine)}: there are wheels of torch for x86_64 and aarch64 only")

    def __str__(self) -> str:
        torch = "without torch" if self.torch == "none" else f"torch {self.torch}"
        return f"Python {self.python} on {self.machine}, {torch}"

    @property
    def extra(self) -> str:
        return "runtime" if self.torch == "none" else "train"

    def options(self) -> list[str]:
        names = [f"manylinux_2_{minor}" for minor in _GLIBC] + list(_OLD_NAMES.values())
        platforms = [option for name in names for option in ("--platform", f"{name}_{self.machine}")]
        return ["--implementation", "cp", "--python-version", self.python, *platforms]


@dataclass(frozen=True)
class Wheel:
    name: str
    version: str
    file: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class WheelSet:
    """A directory with `wheels/`, `tools/` (pip), `requirements.txt` with the hash of every wheel, and an SBOM.

    Packtrain's own wheel is in `own/`, apart from the others: it changes more often, and is never taken by its name.
    """

    directory: Path
    wheels: tuple[Wheel, ...]
    own: Wheel
    pip: Wheel

    @property
    def versions(self) -> list[str]:
        return [wheel.requirement for wheel in (self.own, *self.wheels)]


def download(
    target: WheelTarget, directory: Path, requirements: Path | None = None, say: Callable[[str], None] = print
) -> WheelSet:
    """Fill a new directory with what `target` needs, in the versions of this machine where it has them."""
    name, data = own_wheel()
    for folder in ("own", WHEELS, TOOLS):
        (directory / folder).mkdir(parents=True)
    packtrain = directory / "own" / name
    packtrain.write_bytes(data)
    limits = directory / "constraints.txt"
    say(f"downloading wheels for {target}")
    _download_dependencies(target, packtrain, limits, directory / WHEELS, requirements)
    limits.unlink()
    (directory / WHEELS / name).unlink(missing_ok=True)  # pip copies it there, beside what it depends on
    # Pure Python, and so for any target; an older one than here may not know the target's Python.
    _pip([*_DOWNLOAD, "--no-deps", "--dest", str(directory / TOOLS), f"pip>={version('pip')}"])
    wheels = tuple(wheel_of_file(path) for path in sorted((directory / WHEELS).glob("*.whl")))
    [tool] = (directory / TOOLS).glob("*.whl")
    downloaded = WheelSet(directory, wheels, wheel_of_file(packtrain), wheel_of_file(tool))
    lines = [f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n" for wheel in wheels]
    (directory / LOCK).write_text("".join([f"# {target}\n", *lines]), "utf-8")
    (directory / SBOM).write_text(sbom(downloaded), "utf-8")
    return downloaded


def _download_dependencies(
    target: WheelTarget, packtrain: Path, limits: Path, place: Path, requirements: Path | None
) -> None:
    pinned = dict(line.split("==") for line in constraints(target.extra))
    torch = pinned.pop("torch", None)
    extras = ["-r", str(requirements)] if requirements is not None else []
    lines = [f"{name}=={number}" for name, number in pinned.items()]
    command = [*_DOWNLOAD, *target.options(), "--dest", str(place), "--constraint", str(limits)]
    if target.torch == "base":
        # Exactly the list, since pip would add torch and its libraries again. What else they need is on the list, too.
        limits.write_text("", "utf-8")
        of_torch = ("nvidia-c", "nvidia-nc", "nvidia-nv", "cuda-", "triton")
        _pip([*command, "--no-deps", *(line for line in lines if not line.startswith(of_torch))])
        if extras:
            _pip([*command, "--no-deps", *extras])
        return
    if torch is not None:  # a client without torch takes the newest
        lines.append(f"torch=={torch}+cpu" if target.torch == "cpu" else f"torch==={torch}")
    limits.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    command += [f"{packtrain}[{target.extra}]", *extras]
    # PyTorch's index has each build under an address of its own. It is asked only if this person's own index lacks that
    # build of torch; without a version that is known here, the two have to be compared.
    pytorch = ["--extra-index-url", f"{_TORCH_INDEX}cpu"] if target.torch == "cpu" else []
    try:
        _pip(command if torch is not None else [*command, *pytorch])
    except Mistake as mistake:
        if not pytorch or "torch==" not in str(mistake):
            raise
        _pip([*command, *pytorch])


def _pip(words: Sequence[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "pip", *words],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if ended.returncode != 0:
        if "No module named pip" in ended.stderr:
            raise Mistake(f"{sys.executable} has no pip to download wheels with; run `{sys.executable} -m ensurepip`")
        if NO_INDEX.search(ended.stderr):
            raise Mistake("pip download: cannot reach the package index; check the network and `pip config list`")
        # pip explains a version that the index lacks as a conflict with the constraint that asks for it.
        if conflicts := re.findall(r"\(constraint\) (\S+)", ended.stdout + ended.stderr):
            raise Mistake(f"pip download: the index has no wheel of {conflicts[-1]} for that target; check pip's index")
        errors = [line.removeprefix("ERROR: ") for line in ended.stderr.splitlines() if line.startswith("ERROR: ")]
        raise Mistake(f"pip download: {(errors or ended.stderr.strip().splitlines() or ['failed'])[-1]}")


def wheel_of_file(path: Path) -> Wheel:
    name, number = path.name.split("-")[:2]
    return Wheel(re.sub("[-_.]+", "-", name).lower(), number, path.name, sha256_of(path))


def sbom(wheels: WheelSet) -> str:
    """Return a CycloneDX list of the packages with their hashes: the same text for the same wheels."""
    components = [
        {
            "type": "library",
            "name": wheel.name,
            "version": wheel.version,
            "purl": f"pkg:pypi/{wheel.name}@{wheel.version}",
            "hashes": [{"alg": "SHA-256", "content": wheel.sha256}],
        }
        for wheel in (wheels.own, *wheels.wheels)
    ]
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(components))
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "packtrain", "version": wheels.own.version}},
        "components": components,
    }
    return json.dumps(document, indent=1) + "\n"


def own_wheel() -> tuple[str, bytes]:
    """Return the installed package as a wheel, editable or not: the same bytes for the same source."""
    installed = distribution("packtrain")
    folder = f"packtrain-{installed.version}.dist-info"
    files = {f"packtrain/{name}": data for name, data in source().items()}
    files[f"{folder}/METADATA"] = (installed.read_text("METADATA") or "").encode()
    files[f"{folder}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: packtrain\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{folder}/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    record = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in files.items()
    ]
    files[f"{folder}/RECORD"] = "\n".join([*record, f"{folder}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return f"packtrain-{installed.version}-py3-none-any.whl", buffer.getvalue()


def constraints(extra: str = "train") -> list[str]:
    """Return `name==version` of everything that training, or another extra, needs here; 2.8.0+cpu is 2.8.0."""
    return [f"{name}=={package.version.partition('+')[0]}" for name, package in sorted(_needed(extra).items())]


def digests() -> list[str]:
    """Return the wheels that these dependencies were installed from, each with a digest of its files."""
    wheels = ((wheel_installed(package), package) for package in _needed("train").values())
    return sorted(f"{wheel} {recorded_digest(package)}" for wheel, package in wheels if wheel is not None)


def _needed(extra: str) -> dict[str, Distribution]:
    needed: dict[str, Distribution] = {}
    waiting = list(_requirements(distribution("packtrain"), {extra}))
    while waiting:
        name = waiting.pop()
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue  # needed on another platform only
        if name not in needed:
            needed[name] = installed
            waiting += _requirements(installed, set())  # without the extras of a dependency
    return needed


def _requirements(installed: Distribution, extras: set[str]) -> Iterable[str]:
    for requirement in installed.requires or ():
        match = _REQUIREMENT.fullmatch(requirement.strip())
        marker = (match[2] or "") if match else ""
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if match and (extra is None or extra[1] in extras):
            yield re.sub(r"[-_.]+", "-", match[1]).lower()
