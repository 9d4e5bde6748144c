"""The clock of a file system, which ticks every few milliseconds."""

from __future__ import annotations

from pathlib import Path

from parts.sandbox import wait_until


def wait_for_tick(directory: Path) -> None:
    """Return when a file that is written now has a later time than those written before, here or below."""
    probe = directory / ".tmp-clock"
    probe.touch()
    before = probe.stat().st_mtime_ns

    def has_ticked() -> bool:
        probe.touch()
        return probe.stat().st_mtime_ns > before

    wait_until(has_ticked, "the clock of the file system", pause=0.001)
    probe.unlink()
