"""List what wheels and sdists hold, and say what is wrong with it.

python tools/dist.py build/dist/*
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

_PACKAGE = r"epitorch/([a-z0-9_]+/)*[a-z0-9_]+\.py|epitorch/py\.typed|epitorch/report/page\.(css|js)"
_NATIVE = r"epitorch/deploy/native/[a-z0-9_]+\.(cpp|h)|epitorch/deploy/_fused\.so"
_FILES = r"epitorch/sweeps/published\.yaml|epitorch/(recipes/[\w.-]+|tables|sweep_files)/[\w.-]+\.yaml"
_ABOUT = r"epitorch-[^/]+\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt|licenses/LICENSE)"
_AROUND = r"PKG-INFO|\.gitignore|README\.md|CHANGELOG\.md|LICENSE|pyproject\.toml|hatch_build\.py"
_EXPECTED = re.compile("|".join((_PACKAGE, _NATIVE, _FILES, _ABOUT, _AROUND)))
_FORBIDDEN = re.compile(r"(^|/)(tests?|runs|results|benchmarks|data|docs|__pycache__)/")
_NEEDED = (
    "epitorch/__init__.py",
    "epitorch/cli.py",
    "epitorch/py.typed",
    "epitorch/report/page.css",
    "epitorch/report/page.js",
    "epitorch/sweeps/published.yaml",
    "epitorch/recipes/digits/epitome.yaml",
    "epitorch/tables/cifar10.yaml",
    "epitorch/sweep_files/digits.yaml",
    "epitorch/deploy/native/entry.cpp",
)
_PLACES = {
    "src/": "",
    "recipes/": "epitorch/recipes/",
    "tables/": "epitorch/tables/",
    "sweeps/": "epitorch/sweep_files/",
}


def names_of(path: Path) -> list[str]:
    """Files of a wheel, or of an sdist under the names that they get in a wheel."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return [entry.filename for entry in archive.infolist() if not entry.is_dir()]
    with tarfile.open(path) as archive:
        return [installed(entry.name.partition("/")[2]) for entry in archive.getmembers() if entry.isfile()]


def installed(name: str) -> str:
    """The place in a wheel of a file of the source tree."""
    for source, place in _PLACES.items():
        if name.startswith(source):
            return place + name.removeprefix(source)
    return name


def problems(names: Iterable[str]) -> list[str]:
    """What should not be there, and what should."""
    given = set(names)
    wrong = [name for name in sorted(given) if not _EXPECTED.fullmatch(name) or _FORBIDDEN.search(name)]
    return [f"does not belong there: {name}" for name in wrong] + [f"missing: {n}" for n in _NEEDED if n not in given]


def tag_problems(wheel: str, names: Iterable[str]) -> list[str]:
    """A wheel with a native library is for one platform; one without is for all."""
    native, pure = any(name.endswith(".so") for name in names), wheel.endswith("-any.whl")
    return [f"{wheel}: {'has' if native else 'lacks'} a native library"] if native == pure else []


def listing(path: Path, names: Iterable[str]) -> str:
    """Files by folder, counted."""
    counts = Counter(str(PurePosixPath(name).parent) for name in names)
    lines = [f"{counts[folder]:5} {folder}/" for folder in sorted(counts)]
    return "\n".join([f"{path.name}: {path.stat().st_size:,} bytes, {sum(counts.values())} files", *lines])


def main(paths: list[str]) -> int:
    """Print the listings; 1 if something is wrong."""
    held = {Path(path): names_of(Path(path)) for path in paths}
    wrong = [] if held else ["no files given"]
    for path, names in held.items():
        print(listing(path, names))
        wrong += problems(names) + (tag_problems(path.name, names) if path.suffix == ".whl" else [])
    sources = [{n for n in names if n.startswith("epitorch/") and not n.endswith(".so")} for names in held.values()]
    wrong += [f"not in all of them: {name}" for name in sorted(set.union(*sources) - set.intersection(*sources))]
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
