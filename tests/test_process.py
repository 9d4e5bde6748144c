"""How a process of Packtrain ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from packtrain.errors import EXIT_MISTAKE, Mistake
from packtrain.process import LOG_VARIABLE, OwnLog, exit_code_of, run_main, to_type


@pytest.mark.parametrize(
    ("ending", "code"), [(SystemExit(3), 3), (SystemExit(), 0), (SystemExit("why"), 1), (KeyError("a"), 1)]
)
def test_an_exit_code_is_the_one_with_which_python_would_end(ending: BaseException, code: int) -> None:
    def end() -> None:
        raise ending

    assert exit_code_of(end) == code
    assert exit_code_of(lambda: "a result that does not matter") == 0


def test_a_mistake_of_a_main_is_one_line_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def main(_: object) -> None:
        raise Mistake("no such verb")

    with pytest.raises(SystemExit) as ending:
        run_main(main)
    assert ending.value.code == EXIT_MISTAKE
    assert capsys.readouterr().err == "packtrain: no such verb\n"


@pytest.mark.usefixtures("processes")
def test_a_process_that_ends_at_once_writes_what_it_has_printed_and_runs_no_cleanup() -> None:
    program = "import atexit; from packtrain.process import end_process; atexit.register(print, 'cleanup')"
    command = [sys.executable, "-c", f"{program}; print('printed'); end_process(7)"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (7, b"printed\n")


def test_a_log_is_removed_and_not_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "node.log"
    path.write_text("joined")
    monkeypatch.setenv(LOG_VARIABLE, str(path))
    log = OwnLog()
    assert LOG_VARIABLE not in os.environ
    log.remove()
    assert not path.exists()
    OwnLog().remove()  # without a log of its own


def test_a_hint_has_the_path_of_the_command_where_the_shell_does_not_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "an environment" / "packtrain"
    script.parent.mkdir()
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(script), "run"])
    monkeypatch.setenv("PATH", str(script.parent))
    assert to_type("follow", "job-1") == "packtrain follow job-1"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert to_type("follow", "job-1") == f"'{script}' follow job-1"
    monkeypatch.setattr(sys, "argv", ["packtrain/__main__.py"])
    assert to_type("follow", "job-1") == "packtrain follow job-1"
