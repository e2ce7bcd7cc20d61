"""The tables of results in the README and the pages: what `results/NAME/summary.json` holds, where they mark a place.

python benchmarks/results_tables.py           # writes the tables into the pages
python benchmarks/results_tables.py --check   # exit code 1 if a page has others
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

from epitorch.sweeps.summary import markdown

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"(<!-- summary ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_PATHS = re.compile(r"--(data|out|results)=")


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    stale = [page for page in pages() if page.read_text(encoding="utf-8") != filled(page)]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'has other tables' if arguments.check else 'written'}")
        if not arguments.check:
            page.write_text(filled(page), encoding="utf-8")
    return int(arguments.check and bool(stale))


def pages() -> list[Path]:
    """The README and every page of docs/ that has a place for a table."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [file for file in files if _BLOCK.search(file.read_text(encoding="utf-8"))]


def filled(page: Path) -> str:
    """Return a page's text with its tables made anew."""

    def made(match: re.Match[str]) -> str:
        summary = json.loads((ROOT / "results" / match[2] / "summary.json").read_text(encoding="utf-8"))
        summary["command"] = anywhere(summary["command"])
        unfinished = "" if summary["complete"] else "\nNot all runs of this sweep are made yet.\n"
        return f"{match[1]}{markdown(summary)}\n{unfinished}{match[4]}"

    return _BLOCK.sub(made, page.read_text(encoding="utf-8"))


def anywhere(command: str) -> str:
    """Return a command as one would type it in a clone, without the folders of the machine that ran it."""
    words = [part for word in shlex.split(command) for part in (word.split("=", 1) if _PATHS.match(word) else [word])]
    for i, option in enumerate(words[:-1]):
        if option == "--data":
            words[i + 1] = "DIR"
        elif option in ("--out", "--results"):
            parts = Path(words[i + 1]).parts
            own = [k for k, part in enumerate(parts) if part in ("runs", "results")]
            words[i + 1] = "/".join(parts[own[-1] :]) if own else "DIR"
    return shlex.join(words)


if __name__ == "__main__":
    sys.exit(main())
