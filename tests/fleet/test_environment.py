"""Finding and creating the Python environment on a host."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path

import pytest

from packtrain.errors import Mistake
from packtrain.fleet import environment
from packtrain.fleet.host import Host
from packtrain.fleet.remote import Remote, Unreachable
from packtrain.fleet.wheels import constraints, digests, own_wheel
from packtrain.identity import altered, identity, installed_digest, source, wheel_of
from parts import hosts
from parts.hosts import Network
from parts.stub_wheels import installed_packages, stub_wheel


@pytest.fixture(scope="module")
def network(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with hosts.hosts(tmp_path_factory.mktemp("hosts"), 1) as network:
        # On the host's PATH, as if installed there; a link to it would look for its library beside itself.
        script = f'#!/bin/sh\nexec {sys.base_prefix}/bin/python3 "$@"\n'
        network[0].run(["sh", "-c", 'cat > "$0"; chmod 755 "$0"', "/usr/local/bin/python3.11"], text=script)
        yield network


@pytest.fixture
def remote(network: Network, monkeypatch: pytest.MonkeyPatch) -> Remote:
    monkeypatch.setenv("PATH", network.search_path())
    return Remote("host1")


@pytest.mark.usefixtures("processes")
def test_the_wheel_of_packtrain_is_the_same_every_time_and_installs(tmp_path: Path) -> None:
    name, data = own_wheel()
    assert own_wheel() == (name, data)
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        assert wheel.testzip() is None
        names = set(wheel.namelist())
    assert names >= {f"packtrain/{name}" for name in source()}, "scripts, style sheets and pages are in it"
    assert {"packtrain/fleet/create.sh", "packtrain/report/page.css", "packtrain/export/packtrain.service"} <= names
    (tmp_path / name).write_bytes(data)
    target = tmp_path / "there"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(tmp_path / name)], check=True)
    code = ["-c", "import packtrain; print(packtrain.__file__)"]
    done = subprocess.run([sys.executable, *code], env={"PYTHONPATH": str(target)}, capture_output=True, text=True)
    assert done.stdout.strip() == str(target / "packtrain" / "__init__.py")


def test_constraints_pin_the_versions_installed_here() -> None:
    import numpy
    import torch

    lines = constraints()
    assert f"numpy=={numpy.__version__}" in lines
    assert f"torch=={torch.__version__.partition('+')[0]}" in lines
    assert not any(line.startswith(("pytest==", "packtrain==")) for line in lines)


def test_a_bundle_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="has no wheels"):
        environment.check_bundle(tmp_path)


def test_the_python_at_this_machines_own_path_is_found(remote: Remote) -> None:
    assert environment.find(remote, None) == sys.executable
    assert environment.find(remote, sys.executable) == sys.executable
    assert environment.find_any(remote, None) == Host(remote, sys.executable)


def test_a_host_without_packtrain_has_nothing_to_end_unless_a_node_runs_there(
    network: Network, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert environment.find_any(remote, None) is None
    start = 'exec -a "/gone/python -m packtrain node a-1 --store s" sleep 100 > /dev/null 2>&1 & echo $!'
    process = network[0].run(["bash", "-c", start]).stdout.strip()
    with pytest.raises(Unreachable, match="a node runs there, but packtrain is not installed"):
        environment.find_any(remote, None)
    network[0].run(["kill", process])


def test_a_python_without_packtrain_is_refused(remote: Remote) -> None:
    with pytest.raises(Unreachable, match="host1: "):
        environment.find(remote, "/usr/bin/python3")


# An ssh without a host behind it; it prints a greeting, as many a .bashrc does.
SSH = """#!/bin/bash
echo "Welcome to gpu-a"
echo
exec sh -c "${@: -1}"
"""

# Answers like an environment with this Packtrain; `venv` creates another one, which takes a moment.
PYTHON = """#!/bin/sh
case "$*" in
  *identity*) echo IDENTITY ;;
  "-I -m venv"*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  *"pip install"*) sleep 0.2; touch "$(dirname "$0")/../installed" ;;
esac
"""


@pytest.fixture
def greeting_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"ssh": SSH, "python3.13": PYTHON.replace("IDENTITY", identity())}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    return Remote("gpu-a")


@pytest.mark.usefixtures("processes")
def test_a_greeting_on_login_does_not_hide_the_answer(greeting_host: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.find(greeting_host, None) == sys.executable
    assert environment.find(greeting_host, sys.executable) == sys.executable
    assert environment.find_any(greeting_host, sys.executable) == Host(greeting_host, sys.executable)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert environment.find(greeting_host, None) is None
    with pytest.raises(Unreachable, match="not found") as refused:
        environment.find(greeting_host, "/nowhere/python")
    assert refused.value.answers


@pytest.mark.usefixtures("processes")
def test_nodes_of_an_older_packtrain_are_found_by_the_name_that_the_module_had(
    greeting_host: Remote, tmp_path: Path
) -> None:
    python = tmp_path / "bin" / "python3.13"
    python.write_text(python.read_text().replace("*identity*)", "*packtrain.fleet.on_host*) exit 1 ;;\n  *identity*)"))
    assert environment.find_any(greeting_host, str(python)) == Host(greeting_host, str(python), "packtrain.fleet.local")


@pytest.mark.usefixtures("processes")
def test_runs_that_create_the_same_environment_at_the_same_time_all_get_it(
    greeting_host: Remote, tmp_path: Path
) -> None:
    made = tmp_path / "cache/environments" / identity()
    (made / "bin").mkdir(parents=True)  # left behind by an interrupted creation
    (made / "bin/leftover").touch()
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: environment.create(greeting_host, None), range(3)))
    assert set(paths) == {str(made / "bin/python")}
    assert sorted(path.name for path in made.iterdir()) == ["bin", "installed"]
    assert [path.name for path in made.parent.iterdir()] == [identity()], "nothing temporary is left"
    before = (made / "installed").stat().st_ino
    environment.create(greeting_host, None)
    assert (made / "installed").stat().st_ino == before, "a matching environment is kept"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("WARNING: connection broken by NewConnectionError(': Connection refused')", "cannot reach the package index"),
        ("WARNING: the repository is not trusted", "No matching distribution found for torch==2"),
    ],
)
def test_an_index_that_does_not_answer_is_named_and_not_the_package(
    said: str, told: str, greeting_host: Remote, tmp_path: Path
) -> None:
    fails = f'*"pip install"*) echo "{said}" >&2; echo "ERROR: No matching distribution found for torch==2" >&2; exit 1'
    python = PYTHON.replace("IDENTITY", identity()).replace('*"pip install"*)', f'{fails} ;;\n  *"pip twice"*)')
    (tmp_path / "bin" / "python3.13").write_text(python)
    with pytest.raises(Unreachable, match=f"gpu-a: .*{told}"):
        environment.create(greeting_host, None)


def test_an_environment_is_created_offline_from_a_bundle_with_our_own_packtrain_and_found_again(
    network: Network, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip, venv and the wheel of Packtrain are real; the others are stubs, for torch alone would take a minute."""
    for line in constraints():
        stub_wheel(tmp_path, *line.split("=="))
    stub_wheel(tmp_path, "Packtrain", "99.0")  # somebody else's, which pip would prefer
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert environment.find(remote, None) is None
    made = environment.create(remote, tmp_path)
    assert made == f"/root/.cache/packtrain/environments/{identity()}/bin/python"
    assert environment.find(remote, None) == made
    facts = Host(remote, made).facts("", "", {})
    assert (facts.python, facts.identity, facts.torch) == (made, identity(), True)
    where = remote.run([made, "-c", "import packtrain; print(packtrain.__file__)"])
    assert where.startswith("/root/.cache/packtrain/environments/")
    assert [path.name for path in (network[0].home / ".cache/packtrain/environments").iterdir()] == [identity()]


def test_an_error_names_the_wheel_that_a_bundle_lacks(network: Network, remote: Remote, tmp_path: Path) -> None:
    stub_wheel(tmp_path, "numpy", "2.0.0")
    with pytest.raises(Unreachable, match="No matching distribution found for"):
        environment.create(remote, tmp_path)
    assert not list((network[0].home / ".cache/packtrain/environments").glob("part-*"))


def test_an_index_with_other_files_for_a_wheel_of_this_machine_is_refused_before_anything_runs_there(
    network: Network, remote: Remote, tmp_path: Path
) -> None:
    """The stubs have names, versions and tags of the wheels that are installed here, but not their files."""
    for line in constraints():
        stub_wheel(network.shared, *line.split("=="))
    folder = network[0].home / ".config/pip"
    folder.mkdir(parents=True)
    (folder / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {network.shared}\n")
    with pytest.raises(Unreachable, match=r"the package index has other files than this machine's for [\w.-]+=="):
        environment.create(remote, None)
    shutil.rmtree(folder)
    assert not list((network[0].home / ".cache/packtrain/environments").glob("part-*"))


def test_the_packages_here_are_as_they_were_recorded() -> None:
    small = [line for line in digests() if not line.startswith(("torch==", "sympy=="))]
    assert len(small) > 20
    assert altered(installed_packages(), small) == []


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("change", ["a file", "another file", "a script", "nothing", "bytecode"])
def test_a_package_whose_files_differ_is_found(tmp_path: Path, change: str) -> None:
    stub_wheel(tmp_path, "click", "1.0")
    target = tmp_path / "there"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    free = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}  # of this project's versions
    subprocess.run([*command, str(tmp_path / "click-1.0-py3-none-any.whl")], check=True, env=free)
    [package] = distributions(path=[str(target)])
    line = f"{wheel_of(package)} {installed_digest(package)}"
    record = target / "click-1.0.dist-info/RECORD"
    if change == "a file":
        (target / "click-of-the-test.pth").write_text("import os\n")
    elif change != "nothing":
        name = {"another file": "evil.pth", "a script": "../../../bin/python", "bytecode": "__pycache__/x.pyc"}[change]
        record.write_text(record.read_text() + f"{name},,\n")
        (target / "evil.pth").touch()
    assert altered(str(target), [line]) == ([] if change in ("nothing", "bytecode") else [line.split(maxsplit=1)[0]])
