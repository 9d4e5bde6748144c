"""Pack your data once, train it anywhere, bring the model home.

import packtrain as pt
run = pt.run("job.yaml")
run.wait()
run.metrics()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packtrain.api import RunHandle, run
    from packtrain.api import open_ as open  # noqa: A004 - pt.open reads as what it is

__version__ = "0.1.0"
__all__ = ["RunHandle", "open", "run"]


def __getattr__(name: str) -> object:
    """The interface is imported when it is used, so that the command line starts at once."""
    if name not in __all__:
        raise AttributeError(f"module 'packtrain' has no attribute {name!r}")
    from packtrain import api

    return getattr(api, "open_" if name == "open" else name)
