"""Packtrain's side on a host of the ssh fleet: facts, a link probe, and nodes as processes.

Nothing in the package imports this module, so that `python -m packtrain.fleet.on_host` loads it once.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from packtrain.errors import EXIT_ALREADY_JOINED
from packtrain.fleet.host import (
    END_SECONDS,
    JOIN_SECONDS,
    MODULE,
    end_processes,
    find_processes,
    gather,
    is_settled,
    new_log,
    read_secrets,
)
from packtrain.node.preemption import SECONDS_VARIABLE
from packtrain.process import LOG_VARIABLE, end_process, exit_code_of, run_main


def start_node(run: str, arguments: list[str], tied: bool) -> None:
    """Become the node of a run if tied; else fork it, wait until it has joined, and print where it is.

    The pid is null if the run already has its node on this machine.
    """
    os.environ.setdefault(SECONDS_VARIABLE, f"{END_SECONDS:.0f}")
    if tied:  # no fork: the node is this process, and its standard input is the connection
        threading.Thread(target=_leave_with_connection, daemon=True).start()
        _become_node(arguments)
    log = new_log(run)
    os.environ[LOG_VARIABLE] = str(log)
    child = os.fork()
    if child == 0:
        os.setsid()  # a session of its own, so that the end of the ssh session does not signal it
        # Let go of the connection: sshd keeps it open as long as any process holds its pipes.
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        for number, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, number)
        os.closerange(3, 1024)
        _become_node(arguments)
    _show_in_tmux(run, child, log)
    # A node that fails early would otherwise leave the client waiting for it without a reason.
    deadline, code = time.monotonic() + JOIN_SECONDS, None
    while not is_settled(code, log) and time.monotonic() < deadline:
        time.sleep(0.1)
        ended, status = os.waitpid(child, os.WNOHANG)  # before the log is read, so that it is complete
        code = os.waitstatus_to_exitcode(status) if ended else None
    print(json.dumps({"pid": None if code == EXIT_ALREADY_JOINED else child, "log": str(log)}), flush=True)


def _become_node(arguments: list[str]) -> None:
    """Run the node in this process, whose environment has the secrets: they must not appear in arguments."""
    sys.argv = ["packtrain", *arguments]
    code = exit_code_of(lambda: runpy.run_module("packtrain", run_name="__main__"))
    end_process(code)  # never return into the code that forked


def _leave_with_connection() -> None:
    """End the node when standard input closes: that is how it notices that the client or the connection is gone."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _show_in_tmux(run: str, node: int, log: Path) -> None:
    """Open a tmux session that shows the log as long as the node lives. The node does not depend on it."""
    if shutil.which("tmux") is None:
        return
    watch = ["tail", f"--pid={node}", "-n", "+1", "-F", str(log)]
    # tmux keeps the environment of its first session for all later ones: no secret may be in it.
    plain = {name: os.environ[name] for name in ("HOME", "PATH", "LANG", "USER", "SHELL") if name in os.environ}
    subprocess.run(
        ["tmux", "new-session", "-d", "-s", f"packtrain-{run}", *watch],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=plain,
    )


def main(words: Sequence[str]) -> None:
    place = words.index("--") if "--" in words else len(words)  # what follows is for the node or the link probe
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("verb", choices=["check", "link-probe", "start", "list", "end"])
    parser.add_argument("--run", default="")
    parser.add_argument("--store", default="")
    parser.add_argument("--key", default="")
    parser.add_argument("--tied", action="store_true")
    options, arguments = parser.parse_args(words[:place]), list(words[place + 1 :])
    read_secrets()
    if options.verb == "start":
        from packtrain.node.address import ssh_address

        # Other machines reach this one where ssh did, unless the job says otherwise.
        address = None if {"--interface", "--address"} & {*arguments} else ssh_address(os.environ)
        start_node(options.run, arguments if address is None else [*arguments, "--address", address], options.tied)
    elif options.verb == "link-probe":
        from packtrain.fleet import link_probe

        link_probe.main(arguments)
    elif options.verb == "check":
        print(json.dumps(asdict(gather(options.store, options.key))))
    else:
        processes = find_processes("python", options.run, options.store)
        if options.verb == "end":
            end_processes(processes)
        print(json.dumps([process.pid for process in processes]))


if __name__ == "__main__":
    run_main(main)
