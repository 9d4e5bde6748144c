"""Parts that a test needs and a machine may not have."""

from __future__ import annotations

import os

import pytest


def need(present: object, reason: str) -> None:
    """Skip the test if the part is missing; in CI, which has all of them, fail."""
    if present:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"missing in CI: {reason}")
    pytest.skip(reason)
