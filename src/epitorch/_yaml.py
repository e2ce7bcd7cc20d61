"""YAML as plain data plus the line of every key, so that a message about a recipe or plan can point at it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from epitorch._rules import KeyPath, dotted
from epitorch.errors import RecipeError, explain


@dataclass(frozen=True)
class YamlDocument:
    """Plain values, where each key stands (lines counted from 1), and the text that they were read from."""

    data: Any
    lines: dict[KeyPath, int]
    text: str


class _Loader(yaml.SafeLoader):
    """Safe loading that reads `5e-4` as a number: YAML 1.1 asks for `5.0e-4` and gives a string otherwise."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml_file(path: Path, what: str) -> YamlDocument:
    """Read and parse a file of one document.

    Args:
        path: The file.
        what: What it is, for messages: recipe, sweep, table.

    Raises:
        RecipeError: If it cannot be read, and as `read_yaml`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            explain(f"the {what} cannot be read", expected="a UTF-8 text file", got=error, where=str(path))
        ) from error
    return read_yaml(text, str(path))


def read_yaml(text: str, source: str) -> YamlDocument:
    """Parse one YAML document.

    Args:
        text: The file's content.
        source: File name, for messages.

    Raises:
        RecipeError: If the text is not YAML, repeats a key, has a key that is not text or contains itself.
    """
    lines: dict[KeyPath, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        data = None if node is None else _plain(loader, node, (), lines, source, ())
    except yaml.YAMLError as error:
        raise RecipeError(
            explain("this is not valid YAML", expected="a YAML mapping", got=_problem(error), where=source)
        ) from error
    return YamlDocument(data, lines, text)


def _plain(
    loader: _Loader,
    node: yaml.Node,
    path: KeyPath,
    lines: dict[KeyPath, int],
    source: str,
    above: tuple[int, ...],
) -> Any:
    if id(node) in above:
        raise RecipeError(explain("an alias contains itself", expected="plain values", got=dotted(path), where=source))
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        items = enumerate(node.value)
        return [_plain(loader, item, (*path, str(i)), lines, source, above) for i, item in items]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(loader, node, source)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _key(loader, key_node, source)
        line = key_node.start_mark.line + 1
        if key in result:
            raise _repeated((*path, key), f"{source}, line {line}", lines[(*path, key)])
        lines[(*path, key)] = line
        result[key] = _plain(loader, value_node, (*path, key), lines, source, above)
    return result


def _scalar(loader: _Loader, node: yaml.Node, source: str) -> Any:
    try:
        return loader.construct_object(node)
    except (ValueError, OverflowError) as error:  # a date such as 2026-02-30
        where = f"{source}, line {node.start_mark.line + 1}"
        got = f"{node.value!r}: {error}"
        raise RecipeError(explain("a value is not valid", expected="plain values", got=got, where=where)) from error


def _key(loader: _Loader, node: yaml.Node, source: str) -> str:
    key = _scalar(loader, node, source) if isinstance(node, yaml.ScalarNode) else None
    if not isinstance(key, str):
        where = f"{source}, line {node.start_mark.line + 1}"
        raise RecipeError(
            explain("a key is not text", expected="a word", got=repr(key), where=where, fix=f'in quotes it is: "{key}"')
        )
    return key


def _repeated(path: KeyPath, where: str, first: int) -> RecipeError:
    return RecipeError(
        explain(
            f"the key '{dotted(path)}' is given twice",
            expected="each key once",
            got=f"it stands in line {first} already",
            where=where,
            fix="remove one of the two",
        )
    )


def _problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    text = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{text} (line {mark.line + 1}, column {mark.column + 1})" if mark else text
