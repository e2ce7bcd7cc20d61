"""The paper's tables as files: which recipe stands for each row, and what the paper prints there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epitorch._rules import Place, Rule, check_keys, number, optional, read_section, read_value, ruled, text
from epitorch._yaml import read_yaml_file
from epitorch.errors import InputError, RecipeError, explain, suggest


@dataclass(frozen=True)
class PaperNumbers:
    """What the paper prints in a row; None where it prints nothing.

    Args:
        accuracy: In percent.
        params: In millions.
        madds: Multiply-adds of a sample, in millions.
        note: What a reader should know of them.
    """

    accuracy: float | None = ruled(optional(number(0, 100)), None)
    params: float | None = ruled(optional(number(0)), None)
    madds: float | None = ruled(optional(number(0)), None)
    note: str | None = ruled(optional(text()), None)


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
        name: For files and `--rows`.
        label: As the paper prints it.
        recipe: Name of the recipe with the paper's schedule.
        short: Name of the recipe with a short schedule.
        paper: What is printed.
    """

    name: str = ruled(text())
    label: str = ruled(text())
    recipe: str = ruled(text())
    short: str = ruled(text())
    paper: PaperNumbers = ruled(Rule("the paper's numbers", lambda v: isinstance(v, PaperNumbers)))  # noqa: RUF009


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        name: Of the file.
        title: What it compares.
        source: Where it stands.
        metric: What its accuracies are.
        data: What the data must be.
        rows: In the order of the paper.
    """

    name: str
    title: str
    source: str
    metric: str
    data: str
    rows: tuple[Row, ...]

    def chosen(self, names: Sequence[str] | None) -> tuple[Row, ...]:
        """Return the rows of these names, in the table's order; all for None.

        Raises:
            InputError: If there is no such row.
        """
        known = [row.name for row in self.rows]
        for name in names or ():
            if name not in known:
                raise InputError(
                    explain(
                        f"the table '{self.name}' has no row '{name}'{suggest(name, known)}",
                        expected=f"some of {', '.join(known)}",
                        got=name,
                        where="--rows",
                    )
                )
        return tuple(row for row in self.rows if names is None or row.name in names)


_TEXTS = ("title", "source", "metric", "data")


def table_folders() -> list[Path]:
    """Return the folders in which tables are looked up; first that of the user, then those of the package."""
    package = Path(__file__).resolve().parents[1]
    # An installed package carries its tables inside; a source tree has them beside src/.
    folders = (Path("tables"), package / "tables", package.parents[1] / "tables")
    return [folder for folder in folders if folder.is_dir()]


def table_names() -> list[str]:
    """Return the names that `load_table` finds without a path."""
    return sorted({file.stem for folder in table_folders() for file in folder.glob("*.yaml")})


def load_table(path_or_name: str | Path) -> Table:
    """Read a table.

    Args:
        path_or_name: A path, or a name such as `cifar10`, looked up in `tables/` of the working directory, then among
            the tables that come with epitorch.

    Raises:
        RecipeError: If there is no such file or it is not a valid table.
    """
    path = _find(path_or_name)
    document = read_yaml_file(path, "table")
    return parse_table(document.data, Place(str(path), document.lines), name=path.stem)


def parse_table(data: Any, place: Place, *, name: str) -> Table:
    """Read a table from plain data.

    Raises:
        RecipeError: If a key is unknown or missing, a value does not fit, or two rows have one name.
    """
    rules = {**dict.fromkeys(_TEXTS, text()), "rows": Rule("a list of rows", lambda v: isinstance(v, list) and bool(v))}
    check_keys(data, list(rules), place)
    given = {key: read_value(rule, data.get(key), place.below(key)) for key, rule in rules.items()}
    below = place.below("rows")
    rows = tuple(_row(item, below.below(str(i))) for i, item in enumerate(given["rows"]))
    twice = [row for row, n in Counter(row.name for row in rows).items() if n > 1]
    if twice:
        raise RecipeError(
            explain(f"two rows are called '{twice[0]}'", expected="a name for each", got=twice[0], where=str(below))
        )
    return Table(name, given["title"], given["source"], given["metric"], given["data"], rows)


def _row(data: Any, place: Place) -> Row:
    if isinstance(data, dict) and "paper" in data:
        data = {**data, "paper": read_section(PaperNumbers, data["paper"], place.below("paper"))}
    return read_section(Row, data, place)


def _find(path_or_name: str | Path) -> Path:
    path = Path(path_or_name)
    if path.is_file():
        return path
    name = path if path.suffix in (".yaml", ".yml") else path.with_name(f"{path.name}.yaml")
    for folder in table_folders():
        if not path.is_absolute() and (folder / name).is_file():
            return folder / name
    known = table_names()
    raise RecipeError(
        explain(
            f"there is no table '{path_or_name}'{suggest(str(path_or_name), known)}",
            expected=f"a path to a YAML file, or one of {', '.join(known) or 'tables/ (empty here)'}",
            got="no such file",
        )
    )
