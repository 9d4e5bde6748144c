"""Render the terminal output of the demo as docs/demo.svg.

TTY_COMPATIBLE=1 TTY_INTERACTIVE=0 COLUMNS=110 make demo > demo.txt
python docs/picture.py demo.txt
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parent / "demo.svg"
WIDTH = 110


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    shown = re.sub(r"\x1b\[\?25[hl]", "", Path(sys.argv[1]).read_text())  # show and hide cursor
    shown = re.sub(r"\n{3,}", "\n\n", shown)  # where progress bars were
    shown = shown.replace(str(Path.home()), "~")
    console.print(Text.from_ansi(shown))
    console.save_svg(str(PICTURE), title="make demo")


if __name__ == "__main__":
    main()
