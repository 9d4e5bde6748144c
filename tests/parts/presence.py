"""What to do where a part that a test needs is missing."""

from __future__ import annotations

import os

import pytest


def need(present: object, reason: str) -> None:
    """Skip the test if the part is not there; in CI, which has all of them, fail."""
    if present:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"missing in CI: {reason}")
    pytest.skip(reason)
