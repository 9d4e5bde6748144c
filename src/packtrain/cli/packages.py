"""Commands that carry Packtrain to other machines: image, bundle."""

from __future__ import annotations

import platform as this_machine
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer
import yaml

from packtrain.cli.common import DropsOption, JobArgument, SetOption, run_in
from packtrain.cli.screen import ProgressBars, console, say_detail
from packtrain.errors import Mistake, nearest, quoted
from packtrain.fleet.bundle import add_pack, add_run, add_wheels, new_bundle
from packtrain.fleet.image import (
    PLATFORMS,
    ImageRequest,
    check_name,
    command_to_build,
    default_name,
    find_builder,
    scratch,
    write_context,
)
from packtrain.fleet.wheels import WheelTarget, download
from packtrain.identity import identity
from packtrain.launch.check import make_portable
from packtrain.launch.load import load
from packtrain.run.code import files_of
from packtrain.store import open_store
from packtrain.units import show_bytes

PlatformOption = Annotated[
    str | None, typer.Option(metavar="linux/amd64|linux/arm64", help="Target platform. Default: this machine's.")
]
RequirementsOption = Annotated[Path | None, typer.Option(metavar="FILE", help="pip requirements of your own programs.")]
PythonOption = Annotated[str | None, typer.Option(metavar="3.X", help="Target version of Python. Default: this one.")]


def image(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME:TAG", help="Name of the image. Default: packtrain and its version.")
    ] = None,
    variant: Annotated[
        str,
        typer.Option(
            metavar="cpu|cuda|jetson|serve",
            help="Build of torch; jetson uses the base image's, serve has none and serves exported models.",
        ),
    ] = "cpu",
    platform: PlatformOption = None,
    base: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Base image, e.g. python:3.12-slim@sha256:...")
    ] = None,
    python: PythonOption = None,
    requirements: RequirementsOption = None,
    builder: Annotated[
        str | None,
        typer.Option(
            metavar="docker|podman|buildah", help="Program that builds it. Default: the first one that works here."
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only write the Dockerfile and its files, to DIR.")
    ] = None,
    load: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Load an archive written by --save instead of building.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the image as an archive.")] = None,
    push: Annotated[
        str | None, typer.Option(metavar="REGISTRY/NAME:TAG", help="Tag the image and push it to a registry.")
    ] = None,
) -> None:
    """Build a container image, for Kubernetes or to serve models.

    It contains no job and no model, so one image serves all.
    """
    _check_requirements(requirements)
    if write is not None and any(option is not None for option in (load, save, push)):
        raise Mistake("--write only writes; omit --load, --save and --push")
    name = check_name(name or default_name(), "NAME")
    if push is not None:
        check_name(push, "--push")
    arm = this_machine.machine() in ("aarch64", "arm64")
    default_platform = "linux/arm64" if arm or variant == "jetson" else "linux/amd64"
    request = ImageRequest(variant, platform or default_platform, base, python, requirements)
    if write is not None:
        _write(request, write, builder)
        return
    image_builder = find_builder(builder, say_detail)
    if load is not None:
        name = image_builder.load(load)
        console().say("Loaded ", (name, "bold"))
    else:
        base_image = image_builder.pin(request.base_image, request.platform)
        say_detail(f"base image {base_image}")
        with scratch() as directory:
            context = write_context(request, directory, base_image, say_detail)
            if not context.is_pinned:
                say_detail(f"{base_image} was built here and has no digest; it is used by its name")
            image_builder.build(context, name, request.platform)
        console().say("Built ", (name, "bold"), f" with {image_builder.program}")
    if save is not None:
        image_builder.save(name, save)
        console().say(f"Saved {save}")
    if push is not None:
        console().say("Pushed ", (image_builder.push(name, push), "bold"))


def _write(request: ImageRequest, directory: Path, builder: str | None) -> None:
    base = request.base_image
    try:
        base = find_builder(builder, say_detail).pin(base, request.platform)
    except Mistake as mistake:
        if builder is not None:
            raise
        say_detail(str(mistake))
    context = write_context(request, directory, base, say_detail)
    if not context.is_pinned:
        say_detail(f"the base image {base} is not pinned; pass --base with its @sha256: digest")
    console().say(f"Wrote {directory}/Dockerfile from ", (base, "bold"))
    console().say("  build: ", (command_to_build(context), "bold"))


def _check_requirements(path: Path | None) -> None:
    if path is not None and not path.is_file():
        raise Mistake(f"--requirements: there is no file {path}")


def bundle(
    job: JobArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="File to write. Default: NAME-bundle.tar.")
    ] = None,
    overrides: SetOption = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Include this run, to resume from its newest checkpoint.")
    ] = None,
    variant: Annotated[str, typer.Option(metavar="cpu|cuda", help="Build of torch.")] = "cpu",
    platform: PlatformOption = None,
    python: PythonOption = None,
    requirements: RequirementsOption = None,
    allow_drops: DropsOption = False,
) -> None:
    """Bundle a job with its wheels, code and pack, for offline use."""
    _check_requirements(requirements)
    if platform is not None and platform not in PLATFORMS:
        raise Mistake(f"--platform {quoted(platform)}: {nearest(platform, PLATFORMS)}")
    if variant not in ("cpu", "cuda"):
        raise Mistake(f"--variant {quoted(variant)}: must be cpu or cuda")
    machine = PLATFORMS[platform] if platform is not None else WheelTarget.machine
    target = WheelTarget(python or WheelTarget.python, machine, "cuda" if variant == "cuda" else "cpu")
    loaded, screen = load(job, overrides or (), allow_drops), console()
    name = f"{loaded.job.name}-bundle"
    file = output or Path(f"{name}.tar")
    if not file.parent.is_dir():  # before the download, which takes minutes
        raise Mistake(f"--output {file}: there is no directory {file.parent}")
    store = open_store(loaded.job.store, create=loaded.job.program is None)  # a program has nothing to pack
    included = run_in(store, run) if run is not None else None
    prepared = make_portable(loaded, store, ProgressBars(screen))
    with scratch() as directory, new_bundle(file, name) as writer:
        wheels = download(target, directory, requirements, say_detail)
        add_wheels(writer, wheels, target, identity(), included.name if included is not None else None)
        code = prepared.document.get("code", ".") if loaded.job.has_own_code else None
        for own_file in files_of(prepared.code.archive) if code is not None else ():
            place = str(PurePosixPath("job") / (code or ".") / own_file.name)  # where the job file looks for it
            if place != "job/job.yaml":
                writer.add_bytes(place, own_file.data, own_file.mode)
        note = "# As bundled: with what --set changed, and the pack that the store beside it has.\n"
        text = note + yaml.safe_dump(prepared.document, sort_keys=False, allow_unicode=True)
        writer.add_bytes("job/job.yaml", text.encode())
        for key in prepared.files:  # that the model options name
            writer.add_object(store, key, PurePosixPath(key).name)
        if prepared.pack is not None:
            add_pack(writer, store, prepared.pack)
        if included is not None:
            resumed = add_run(writer, included)
            step = f"its checkpoint of step {resumed.step}" if resumed is not None else "no checkpoint yet"
            say_detail(f"took {included.name} with {step}")
    screen.say("Wrote ", (str(file), "bold"), f" ({show_bytes(file.stat().st_size)}) for {target}")
    screen.say("  there: ", (f"tar -xf {file.name} && cd {name} && sh install.sh", "bold"))
