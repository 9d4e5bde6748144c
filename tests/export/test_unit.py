"""The systemd unit of a model, read by systemd itself."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from export.test_deliver import write_model
from packtrain.errors import Mistake
from packtrain.export.unit import UnitRequest, unit

PROGRAM = Path("/usr/bin/true")


def analyzed(words: list[str | Path], folder: Path, text: str) -> str:
    file = folder / "packtrain-mine.service"
    file.write_text(text)
    done = subprocess.run(["systemd-analyze", *words, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_systemd_accepts_the_unit_and_finds_it_well_protected(needs_systemd: None, tmp_path: Path) -> None:
    text = unit(UnitRequest(write_model(tmp_path / "mine")), PROGRAM)
    # Of other units of this machine systemd may say what it likes.
    assert "packtrain-mine.service:" not in analyzed(["verify", "--man=no"], tmp_path, text)
    exposure = analyzed(["security", "--offline=yes", "--no-pager"], tmp_path, text)
    level = re.search(r"exposure level for packtrain-mine.service: ([0-9.]+)", exposure)
    assert level
    assert float(level[1]) < 2.5
    assert f"ExecStart={PROGRAM} serve {tmp_path}/mine --host 127.0.0.1 --port 8000\n" in text
    assert "IPAddressDeny=any" in text


def test_other_machines_need_a_token_which_is_not_in_the_unit(needs_systemd: None, tmp_path: Path) -> None:
    model = write_model(tmp_path / "mine")
    with pytest.raises(Mistake, match="give a token with --token-file"):
        unit(UnitRequest(model, host="0.0.0.0"), PROGRAM)
    text = unit(UnitRequest(model, host="0.0.0.0", token_file=Path("/etc/packtrain/mine.token")), PROGRAM)
    assert "LoadCredential=token:/etc/packtrain/mine.token\n" in text
    assert "--host 0.0.0.0 --port 8000 --token-file ${CREDENTIALS_DIRECTORY}/token\n" in text
    assert "IPAddressDeny" not in text
    assert "packtrain-mine.service:" not in analyzed(["verify", "--man=no"], tmp_path, text)


def test_names_are_words_to_systemd_whatever_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.export.unit._HIDDEN", (tmp_path,))
    odd = write_model(tmp_path / 'a "b" $HOME 100%n')
    with pytest.raises(Mistake, match="--name"):
        unit(UnitRequest(odd), PROGRAM)
    text = unit(UnitRequest(odd, name="odd"), PROGRAM)
    assert f'serve "{tmp_path}/a \\"b\\" $$HOME 100%%n" --host' in text
    [line] = [line for line in text.splitlines() if line.startswith("#   packtrain unit ")]
    words = shlex.split(line.removeprefix("#"))
    assert words[2:6] == [str(odd), "--name", "odd", "|"], "as a person copies it into a shell"
    assert f"BindReadOnlyPaths='{tmp_path}/a \"b\" $HOME 100%%n'" in text, "only commands have variables"
    shared = unit(UnitRequest(odd, "odd", "::", 9000, tmp_path / "my token"), PROGRAM)
    [line] = [line for line in shared.splitlines() if line.startswith("#   packtrain unit ")]
    options = ["--host", "::", "--port", "9000", "--token-file", str(tmp_path / "my token")]
    assert shlex.split(line.removeprefix("#"))[5:-4] == options, "the command prints the same unit"
    with pytest.raises(Mistake, match="must be an address"):
        unit(UnitRequest(write_model(tmp_path / "mine"), host="board; reboot"), PROGRAM)


def test_a_mounted_path_is_one_path_to_systemd_whatever_is_in_it(
    needs_systemd: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtrain.export.unit._HIDDEN", (tmp_path,))
    odd = write_model(tmp_path / """it's "a": $b \\c 100%n""")
    text = unit(UnitRequest(odd, name="mine"), PROGRAM)
    assert f"""BindReadOnlyPaths='{tmp_path}/it'"'"'s "a"\\: $b \\\\c 100%%n'""" in text, 'newer versions refuse \\"'
    relative = text.replace("BindReadOnlyPaths='/", "BindReadOnlyPaths='")  # systemd repeats what it cannot use
    assert f"not absolute, ignoring: {str(odd)[1:]}\n" in analyzed(["verify", "--man=no"], tmp_path, relative)


def test_a_folder_that_is_no_model_has_no_unit(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="not an exported model"):
        unit(UnitRequest(tmp_path), PROGRAM)
