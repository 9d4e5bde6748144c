"""The container image: a Dockerfile and its context, and the program that builds, saves, loads and pushes it.

The wheels are downloaded here, and the build itself has no network: nothing of this person's configuration of pip, with
its passwords, enters the image, and the same context builds on a network without internet. One image serves every job,
because nodes take code and job from the store. That of the variant `serve` has no torch: it serves an exported model
that is mounted at /model.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from packtrain.errors import Mistake, nearest, quoted
from packtrain.files import sha256_of
from packtrain.fleet.scripts import script_text
from packtrain.fleet.wheels import INSTALL, LOCK, SBOM, Torch, WheelSet, WheelTarget, download
from packtrain.identity import identity
from packtrain.system import cache_directory

VARIANTS: dict[str, Torch] = {"cpu": "cpu", "cuda": "cuda", "jetson": "base", "serve": "none"}
"""Kinds of images, and where their torch comes from."""
BUILDERS = ("docker", "podman", "buildah")
PLATFORMS = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
_JETSON_BASE = "nvcr.io/nvidia/pytorch:25.12-py3"  # torch for Tegra is not on an index; Python 3.12
_JETSON_PYTHON = "3.12"
_NAME = re.compile(r"[a-z0-9][a-z0-9._/-]*(?::[0-9]+/[a-z0-9._/-]+)?(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?")
_BASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*(?:@sha256:[0-9a-f]{64})?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LAST_LINES = 40
_USER = 65532  # no name: any other works as well

# Any address: it is the container's own, and other machines reach it by a published port only. They need a token.
_SERVE = """\
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \\
    CMD ["python3", "-I", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
CMD ["serve", "/model", "--host", "0.0.0.0", "--port", "8000"]"""


@dataclass(frozen=True)
class ImageRequest:
    """The image to build. `base` may have a digest; the default depends on the variant."""

    variant: str = "cpu"
    platform: str = "linux/amd64"
    base: str | None = None
    python: str | None = None
    requirements: Path | None = None
    target: WheelTarget = field(init=False)

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise Mistake(f"--variant {quoted(self.variant)}: must be cpu, cuda, jetson or serve")
        if self.platform not in PLATFORMS:
            raise Mistake(f"--platform {quoted(self.platform)}: {nearest(self.platform, PLATFORMS)}")
        if self.variant == "jetson" and self.platform != "linux/arm64":
            raise Mistake("--variant jetson: Jetson is linux/arm64; pass --platform linux/arm64")
        if self.base is not None and not _BASE.fullmatch(self.base):
            raise Mistake(f"--base {quoted(self.base)}: must be an image, such as python:3.12-slim@sha256:...")
        default = _JETSON_PYTHON if self.variant == "jetson" else WheelTarget.python
        target = WheelTarget(self.python or default, PLATFORMS[self.platform], VARIANTS[self.variant])
        object.__setattr__(self, "target", target)  # the class is frozen

    @property
    def base_image(self) -> str:
        # torch brings CUDA's libraries in its own wheels, and the machine its driver: a base with CUDA has them twice.
        slim = f"docker.io/library/python:{self.target.python}-slim"
        return self.base or (_JETSON_BASE if self.variant == "jetson" else slim)


@dataclass(frozen=True)
class ImageContext:
    """A directory with a Dockerfile and everything it copies."""

    directory: Path
    base: str
    wheels: WheelSet

    @property
    def is_pinned(self) -> bool:
        return "@sha256:" in self.base


def default_name() -> str:
    return f"packtrain:{identity()}"


def check_name(name: str, option: str) -> str:
    if not _NAME.fullmatch(name):
        raise Mistake(f"{option} {quoted(name)}: must be an image, such as registry.example/team/packtrain:1")
    return name


@contextmanager
def scratch() -> Iterator[Path]:
    """Give a directory for a context, in the cache: it may take several gigabytes, and /tmp may be in memory."""
    place = cache_directory() / "images"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as directory:
        yield Path(directory)


def write_context(request: ImageRequest, directory: Path, base: str, say: Callable[[str], None]) -> ImageContext:
    """Download the wheels into an empty directory and write the Dockerfile beside them; `base` is the pinned one."""
    if directory.exists() and any(directory.iterdir()):
        raise Mistake(f"{directory}: is not empty; give a new directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        wheels = download(request.target, directory, request.requirements, say)
        (directory / "Dockerfile").write_text(dockerfile(request, base, wheels), "utf-8")
    except OSError as error:
        raise Mistake(f"{directory}: {error.strerror or error}; free some space, or choose another place") from None
    return ImageContext(directory, base, wheels)


def dockerfile(request: ImageRequest, base: str, wheels: WheelSet) -> str:
    # Wheels are mounted, not copied: they would be a layer that stays in the image. Each command has the digests of
    # what is mounted, because podman and buildah take a layer from their cache by its command alone.
    target = request.target
    gpu = " NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    return script_text(
        "Dockerfile",
        identity=identity(),
        target=target,
        base=base,
        lock=LOCK,
        lock_digest=sha256_of(wheels.directory / LOCK),
        sbom=SBOM,
        python=target.python.replace(".", ", "),
        dotted=target.python,
        venv_options="--system-site-packages " if target.torch == "base" else "",
        install=INSTALL,
        pip=wheels.pip.file,
        own=wheels.own.file,
        own_digest=wheels.own.sha256,
        variables=gpu if target.torch in ("cuda", "base") else "",
        user=_USER,
        command=_SERVE if target.torch == "none" else 'CMD ["--help"]',
        labels=" \\\n      ".join(f"{name}={json.dumps(text)}" for name, text in labels(base, wheels).items()),
    )


def labels(base: str, wheels: WheelSet) -> dict[str, str]:
    name, _, digest = base.partition("@")
    return {
        "org.opencontainers.image.title": "packtrain",
        "org.opencontainers.image.version": identity(),
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.base.name": name,
        **({"org.opencontainers.image.base.digest": digest} if digest else {}),
        "dev.packtrain.packages": " ".join(wheels.versions),
        "dev.packtrain.sbom": f"/opt/packtrain/{SBOM}",
    }


@dataclass(frozen=True)
class ImageBuilder:
    """docker, podman or buildah. `say` gets each line that it prints."""

    program: str
    say: Callable[[str], None] = field(default=print)

    def pin(self, base: str, platform: str) -> str:
        """Return the base image with its digest, pulling it if it is not here; without one if it has none.

        An image that was built here and never pushed has no digest in docker.
        """
        if "@sha256:" in base:
            return base
        if self._quiet("image", "inspect", base) is None:
            self._run("pull", "--platform", platform, base)
        if self.program == "docker":
            listed = json.loads(self._quiet("image", "inspect", "--format", "{{json .RepoDigests}}", base) or "null")
            digests = [_DIGEST.search(reference) for reference in listed or ()]
            digest = next((match[0] for match in digests if match), None)
        elif self.program == "podman":
            digest = (self._quiet("image", "inspect", "--format", "{{.Digest}}", base) or "").strip()
        else:
            shown = self._quiet("inspect", "--type", "image", "--format", "{{.FromImageDigest}}", base)
            digest = (shown or "").strip()
        return f"{base}@{digest}" if digest and _DIGEST.fullmatch(digest) else base

    def build(self, context: ImageContext, name: str, platform: str) -> None:
        options = ["--tag", name, "--platform", platform, "--network", "none"]
        if self.program != "docker":
            # Layers are kept, so that the next version of Packtrain reuses the dependencies. The format of docker:
            # old registries and clusters know no other.
            options += ["--layers", "--format", "docker"]
        self._run("build", *options, str(context.directory))

    def save(self, name: str, file: Path) -> None:
        """Write the image as an archive that all three can load; the file is complete or not there."""
        if not file.parent.is_dir():
            raise Mistake(f"--save {file}: there is no directory {file.parent}")
        unfinished = file.with_name(f".{file.name}.part")
        unfinished.unlink(missing_ok=True)  # podman and buildah do not replace an archive
        try:
            if self.program == "buildah":
                self._run("push", name, f"docker-archive:{unfinished}:{_full(name)}")
            elif self.program == "podman":
                self._run("save", "--format", "docker-archive", "--output", str(unfinished), name)
            else:
                self._run("save", "--output", str(unfinished), name)
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)

    def load(self, file: Path) -> str:
        """Load an archive and return the name of its image."""
        if not file.is_file():
            raise Mistake(f"--load: there is no file {file}")
        if self.program == "buildah":
            return self._run("pull", f"docker-archive:{file}")[-1].strip()
        lines = self._run("load", "--input", str(file))
        matches = [re.search(r"Loaded image(?:\(s\)| ID)?: *(\S+)", line) for line in lines]
        names = [match[1] for match in matches if match]
        if not names:
            raise Mistake(f"{file}: {self.program} found no image in it; save it again with `packtrain image --save`")
        return names[-1]

    def push(self, name: str, destination: str) -> str:
        """Tag the image, push it, and return the reference with the digest that the registry gave it."""
        self._run("tag", name, destination)
        if self.program == "docker":
            lines = self._run("push", destination)
            match = _DIGEST.search(lines[-1] if lines else "")
            digest = match[0] if match else None
        else:
            with tempfile.TemporaryDirectory() as scratch:
                written = Path(scratch) / "digest"
                self._run("push", "--digestfile", str(written), destination)
                digest = written.read_text("utf-8").strip()
        folder, slash, name_and_tag = destination.rpartition("/")
        return f"{folder}{slash}{name_and_tag.partition(':')[0]}@{digest}" if digest else destination

    def _quiet(self, *words: str) -> str | None:
        """Return what a command prints; None if it fails."""
        if self.program == "buildah" and words[:2] == ("image", "inspect"):
            words = ("inspect", "--type", "image", *words[2:])
        ended = _run_quietly(self.program, *words)
        return ended.stdout if ended.returncode == 0 else None

    def _run(self, *words: str) -> list[str]:
        """Run a command, hand on each of its lines, and return the last ones."""
        lines: deque[str] = deque(maxlen=_LAST_LINES)
        with subprocess.Popen(
            [self.program, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding="utf-8", errors="replace",
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip():
                    lines.append(line.rstrip())
                    self.say(line.rstrip())
        if process.returncode == 0:
            return list(lines)
        # Builders repeat the command of a step, and their last line only says that it failed: what it printed says why.
        outputs = [line for line in lines if "RUN " not in line]
        errors = [line for line in outputs if re.search(r"error|denied|wheels are for|no space", line, re.IGNORECASE)]
        text = (errors or outputs or ["failed without a message"])[-1]
        advice = next((advice for pattern, advice in _ADVICE if re.search(pattern, text, re.IGNORECASE)), "")
        cleaned = re.sub(r"^(?:error|fata\[\d+\])[: ]*", "", text.strip(), flags=re.IGNORECASE)
        remedy = f"; {advice.format(program=self.program)}" if advice else ""
        raise Mistake(f"{self.program} {words[0]}: {cleaned}{remedy}")


# What builders say, and what to do about it.
_ADVICE = (
    (r"exec format error", "this machine cannot run that platform; install qemu-user-static, or build on one that can"),
    (r"unauthorized|authentication required|denied", "log in with `{program} login REGISTRY`, or check the name"),
    (r"manifest unknown|not found|name unknown|no such image", "check the name of the image"),
    (r"no space left", "free some space"),
    (r"HTTP response to HTTPS client", "the registry has no TLS; name it as insecure in {program}'s configuration"),
    (r"connection refused|no such host|timeout|unreachable", "check the registry's address and the network"),
)


def find_builder(program: str | None, say: Callable[[str], None]) -> ImageBuilder:
    """Return the builder that is asked for, or else the first one that works here."""
    if program is not None and program not in BUILDERS:
        raise Mistake(f"--builder {quoted(program)}: {nearest(program, BUILDERS)}")
    faults = []
    for candidate in BUILDERS if program is None else (program,):
        if shutil.which(candidate) is None:
            faults.append(f"{candidate} is not installed")
            continue
        # docker's client is often there without a server that answers.
        probe = ["--format", "{{.Server.Version}}"] if candidate == "docker" else []
        ended = _run_quietly(candidate, "version", *probe)
        if ended.returncode == 0:
            return ImageBuilder(candidate, say)
        lines = ended.stderr.strip().splitlines() or ["does not work"]
        faults.append(f"{candidate} does not work ({lines[-1]})")
    raise Mistake(f"no program to build images: {'; '.join(faults)}; install one, or write the Dockerfile with --write")


def _run_quietly(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", check=False)


def _full(name: str) -> str:
    """Return the name as archives store it: with a registry, and a tag."""
    first = name.partition("/")[0]
    has_registry = "/" in name and ("." in first or ":" in first or first == "localhost")
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    return tagged if has_registry else f"localhost/{tagged}"


def command_to_build(context: ImageContext) -> str:
    return shlex.join(["docker", "build", "--network", "none", "--tag", default_name(), str(context.directory)])
