"""Wheels that install quickly: each only adds this environment to Python's path. torch alone would take a minute."""

from __future__ import annotations

import ensurepip
import importlib.util
import sysconfig
import zipfile
from pathlib import Path

import pytest

from packtrain.fleet.wheels import constraints


def installed_packages() -> str:
    """Return the directory that has torch, and with it everything else that Packtrain needs."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parents[1])


def pip_wheels() -> Path:
    """Return the directory from which ensurepip installs pip: its own, or the one that the system's Python names."""
    own = Path(ensurepip.__file__).with_name("_bundled")
    named = sysconfig.get_config_var("WHEEL_PKG_DIR")
    folders = [Path(named), own] if named else [own]
    for folder in folders:
        if any(folder.glob(f"pip-{ensurepip.version()}-*.whl")):
            return folder
    raise FileNotFoundError(f"no wheel of pip {ensurepip.version()} in {' or '.join(map(str, folders))}")


def stub_wheel(directory: Path, name: str, version: str, shown: str | None = None) -> None:
    """Write a wheel whose only file adds a directory to Python's path, by default that of the tests."""
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{name}-of-the-test.pth": shown or installed_packages(),
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{folder}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{folder}/RECORD"])
    with zipfile.ZipFile(directory / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(zipfile.ZipInfo(file), text)


def stub_index(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pip find stubs of everything that Packtrain needs, and Python's own copy of pip, and nothing else."""
    directory.mkdir(exist_ok=True)
    for line in {*constraints(), *constraints("runtime")}:
        name, version = line.split("==")
        stub_wheel(directory, name, f"{version}+cpu" if name == "torch" else version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{directory} {pip_wheels()}")
