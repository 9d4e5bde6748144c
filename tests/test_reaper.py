"""The tests themselves: one that fails leaves nothing running."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

TESTS = '''
import subprocess, sys
import pytest

def start(name):
    """Start a process that detaches itself, as a run does."""
    sleep = "subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=subprocess.DEVNULL)"
    program = f"import subprocess; print({sleep}.pid)"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    open(name, "w").write(done.stdout)

@pytest.fixture(scope="module")
def server():
    start("server.pid")

def test_failing(server):
    start("failed.pid")
    assert False

def test_after(server):
    import os
    failed, server = (int(open(name).read()) for name in ("failed.pid", "server.pid"))
    with pytest.raises(ProcessLookupError):
        os.kill(failed, 0)
    os.kill(server, 0)
    start("passed.pid")
'''

pytestmark = pytest.mark.usefixtures("processes")


def test_processes_of_a_failed_test_end_with_it_and_all_others_with_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "parts.reaper", "-p", "no:cacheprovider", "test_some.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    for name in ("failed", "server", "passed"):
        assert not psutil.pid_exists(int((tmp_path / f"{name}.pid").read_text()))
