"""The container image: its Dockerfile, and images that podman and buildah build, save, load, push and run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from packtrain.errors import Mistake
from packtrain.fleet.image import ImageBuilder, ImageRequest, check_name, dockerfile, find_builder, write_context
from packtrain.fleet.wheels import WheelTarget, constraints, download
from packtrain.identity import identity
from parts import containers
from parts.command import Packtrain, in_a_process
from parts.containers import BASE, CACHE, Containers
from parts.stub_wheels import stub_index

PINNED = f"python:3.11-slim@sha256:{'0' * 64}"

pytestmark = pytest.mark.usefixtures("processes")


def silent(_text: str) -> None: ...


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_index(tmp_path / "index", monkeypatch)
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


def test_the_context_has_every_wheel_with_its_hash_and_the_versions_are_in_a_label(index: None, tmp_path: Path) -> None:
    context = write_context(ImageRequest(), tmp_path / "context", PINNED, silent)
    text = (context.directory / "Dockerfile").read_text()
    assert f"FROM {PINNED}\n" in text
    assert "USER 65532:65532" in text
    assert f'org.opencontainers.image.base.digest="sha256:{"0" * 64}"' in text
    lock = (context.directory / "requirements.txt").read_text().splitlines()[1:]
    wheels = list((context.directory / "wheels").glob("*.whl"))
    assert len(lock) == len(wheels) == len(context.wheels.wheels) > 10
    torch = next(line for line in lock if line.startswith("torch=="))
    assert "+cpu --hash=sha256:" in torch
    assert torch.split()[0] in text, "the label has its version"
    sbom = json.loads((context.directory / "sbom.cdx.json").read_text())
    assert {part["name"] for part in sbom["components"]} >= {"packtrain", "torch", "numpy"}
    again = download(WheelTarget(), tmp_path / "again", say=silent)
    assert (tmp_path / "again/sbom.cdx.json").read_text() == (context.directory / "sbom.cdx.json").read_text()
    assert dockerfile(ImageRequest(), PINNED, again) == text
    with pytest.raises(Mistake, match="is not empty"):
        write_context(ImageRequest(), context.directory, PINNED, silent)


def test_variants_differ_in_torch_and_in_what_the_driver_needs(index: None, tmp_path: Path) -> None:
    made = download(WheelTarget(torch="base", machine="aarch64"), tmp_path / "jetson", say=silent)
    assert "torch" not in {wheel.name for wheel in made.wheels}
    jetson = ImageRequest("jetson", "linux/arm64")
    assert (jetson.target.machine, jetson.target.torch, jetson.target.python) == ("aarch64", "base", "3.12")
    text = dockerfile(jetson, jetson.base_image, made)
    assert "NVIDIA_VISIBLE_DEVICES=all" in text
    assert "--system-site-packages" in text, "torch is in the base image"
    assert "NVIDIA" not in dockerfile(ImageRequest(), PINNED, made)
    assert ImageRequest("cuda", python="3.12").base_image == "docker.io/library/python:3.12-slim"


def test_the_image_for_serving_has_no_torch_and_needs_a_token(index: None, tmp_path: Path) -> None:
    request = ImageRequest("serve", "linux/arm64")
    context = write_context(request, tmp_path / "serve", PINNED, silent)
    names = {wheel.name for wheel in context.wheels.wheels}
    assert {"ctranslate2", "onnxruntime", "starlette", "uvicorn", "numpy"} <= names
    assert not names & {"torch", "sacrebleu", "tensorboard"}
    text = (context.directory / "Dockerfile").read_text()
    assert 'CMD ["serve", "/model", "--host", "0.0.0.0", "--port", "8000"]' in text
    assert "HEALTHCHECK" in text
    assert "NVIDIA" not in text
    assert "aarch64, without torch" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--variant", "cud"], "must be cpu, cuda, jetson or serve"),
        (["--variant", "jetson", "--platform", "linux/amd64"], "linux/arm64"),
        (["--platform", "linux/arm"], "did you mean 'linux/arm64'"),
        (["--python", "3.9"], "3.11 or later"),
        (["--builder", "kaniko"], "known: buildah, docker, podman"),
        (["--base", "-v /:/host"], "must be an image"),
        (["Bad Name"], "must be an image"),
        (["--push", "registry.example/-x:"], "must be an image"),
        (["--write", "x", "--save", "y"], "only writes"),
        pytest.param(
            ["--builder", "buildah", "--load", "none.tar"], "there is no file none.tar", marks=pytest.mark.system
        ),
        (["--write", "context", "--base", PINNED, "--requirements", "none.txt"], "there is no file none.txt"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(words: list[str], said: str, index: None, packtrain: Packtrain) -> None:
    done = packtrain("image", *words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr


@pytest.mark.parametrize("name", ["packtrain", "packtrain:1", "127.0.0.1:5000/team/packtrain:1.0-a", "a.b/c/d"])
def test_names_of_images_are_accepted(name: str) -> None:
    assert check_name(name, "NAME") == name


def test_without_a_builder_the_dockerfile_is_still_written_and_not_called_pinned(
    index: None, packtrain: Packtrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = packtrain("image")
    assert done.returncode == 2
    assert "docker is not installed; podman is not installed; buildah is not installed; install one" in done.stderr
    done = packtrain("image", "--write", "context")
    assert done.returncode == 0, done.stderr
    assert "is not pinned; pass --base with its @sha256: digest" in done.stdout
    assert "FROM docker.io/library/python:" in (tmp_path / "context/Dockerfile").read_text()


def test_a_package_that_the_index_lacks_is_named_and_nothing_is_left(
    index: None, packtrain: Packtrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next((tmp_path / "index").glob("numpy-*.whl")).unlink()
    done = packtrain("image", "--base", PINNED, "--write", "context")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip download: the index has no wheel of numpy==2" in done.stderr
    for name, value in {"PIP_NO_INDEX": "", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    done = packtrain("image", "--base", PINNED, "--write", "other")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip download: cannot reach the package index" in done.stderr


@pytest.fixture(scope="module")
def pods(needs_containers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    with containers.containers(tmp_path_factory.mktemp("containers")) as made:
        yield made


@pytest.fixture
def here(pods: Containers, monkeypatch: pytest.MonkeyPatch) -> Containers:
    for name, value in pods.environment.items():
        monkeypatch.setenv(name, value)
    return pods


def test_an_image_is_built_on_a_pinned_base_pushed_saved_and_loaded_elsewhere(
    index: None, here: Containers, tmp_path: Path
) -> None:
    """Podman builds it, the registry is a real one, and buildah loads the archive as if on another network."""
    base = f"{here.registry}/base:1"
    here.run("podman", "push", "--quiet", BASE, base)
    target = f"{here.registry}/team/packtrain:1"
    words = ["image", "built:1", "--builder", "podman", "--base", base, "--save", "image.tar", "--push", target]
    done = in_a_process(*words, directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    pinned = next(line for line in done.stdout.splitlines() if "base image" in line).split()[-1]
    assert pinned.startswith(f"{base}@sha256:")
    pushed = done.stdout.splitlines()[-1].removeprefix("Pushed ")
    [label] = json.loads(here.run("podman", "image", "inspect", "built:1").stdout)
    assert label["Config"]["User"] == "65532:65532"
    assert label["Config"]["Labels"]["org.opencontainers.image.base.digest"] == pinned.partition("@")[2]
    assert "torch==" in label["Config"]["Labels"]["dev.packtrain.packages"]
    here.run("podman", "rmi", "--force", "built:1", target, base)
    # By its digest, from the registry, as any user.
    shown = here.run("podman", "run", "--rm", "--user", "1234", "--entrypoint", "sh", pushed, "-c", "id -u; echo > x")
    assert shown.stdout.strip() == "1234"
    copied = in_a_process(
        "image", "--builder", "buildah", "--load", "image.tar", "--push", f"{target}-copy", directory=tmp_path
    )
    assert copied.returncode == 0, copied.stdout + copied.stderr
    assert copied.stdout.splitlines()[-1].startswith(f"Pushed {here.registry}/team/packtrain@sha256:")
    here.run("podman", "rmi", "--force", pushed, f"{target}-copy")


def test_what_a_builder_refuses_is_one_line_and_leaves_no_archive(
    index: None, here: Containers, tmp_path: Path, small_disk: Path
) -> None:
    builder = find_builder("podman", silent)
    with pytest.raises(Mistake, match=r"podman pull: .*; check the name of the image"):
        builder.pin(f"{here.registry}/none:1", "linux/amd64")
    with pytest.raises(Mistake, match=r"podman push: .*; check the registry's address and the network"):
        builder.push(BASE, "127.0.0.1:9/packtrain:1")
    with pytest.raises(Mistake, match="no space left on device; free some space"):
        builder.save(BASE, small_disk / "image.tar")
    assert list(small_disk.iterdir()) == []
    (tmp_path / "half.tar").write_bytes(b"half an archive")
    with pytest.raises(Mistake, match="podman load: "):
        builder.load(tmp_path / "half.tar")
    context = write_context(ImageRequest(python="3.12"), tmp_path / "context", BASE, silent)
    with pytest.raises(Mistake, match=r"the base image has Python 3\.11, but the wheels are for 3\.12"):
        builder.build(context, "other:1", "linux/amd64")


def test_a_container_of_the_image_trains_as_any_user(here: Containers, tmp_path: Path) -> None:
    """With torch itself. Its layer is kept between runs of the tests, and made again when a version changes."""
    context = tmp_path / "context"
    builder = ImageBuilder("podman", silent)
    base = builder.pin(BASE, "linux/amd64")
    wheels = CACHE / f"wheels-{hashlib.sha256(repr(constraints()).encode()).hexdigest()[:12]}"
    if not (wheels / "complete").exists():
        shutil.rmtree(wheels, ignore_errors=True)
        download(WheelTarget(), wheels, say=silent)
        (wheels / "complete").touch()
    cached = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": f"{wheels / 'wheels'} {wheels / 'tools'}"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in cached.items():
            patched.setenv(name, value)
        builder.build(write_context(ImageRequest(), context, base, silent), "trains:1", "linux/amd64")
    script = (
        "set -e; packtrain init translate; packtrain run translate.yaml --set train.duration='2 steps'"
        " --set fleet.workers=1 --set evaluate.samples=8; stat -c '%A %u' .cache/packtrain"
    )
    run = ["podman", "run", "--rm", "--user", "4321:4321", "--env", "OMP_NUM_THREADS=1", "--entrypoint", "sh"]
    done = here.run(*run, "trains:1", "-c", script, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished: reached 2 steps" in done.stdout
    assert done.stdout.splitlines()[-1] == "drwx------ 4321"
    versions = here.run("podman", "run", "--rm", "--entrypoint", "python", "trains:1", "-m", "packtrain.identity")
    assert versions.stdout.strip() == identity()
