"""Shell scripts and the Dockerfile: files beside the modules that use them, with `@name@` where a value belongs."""

from __future__ import annotations

import re

from packtrain.identity import source


def script_text(name: str, /, **values: object) -> str:
    """Return a file of the fleet package, such as `aws/boot.sh`, with each value in place of its name as `@name@`."""
    # In one pass: a value may contain what looks like such a name.
    return re.sub(r"@([a-z_]+)@", lambda match: str(values[match[1]]), source()[f"fleet/{name}"].decode())
