"""The cards at the top of the page, and what is said of each run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape

from epitorch.report._contents import latency_words
from epitorch.report._data import Latency, Method, Run
from epitorch.report._methods import accuracy_of

_ROLES = {"epitome": "epitomes", "dense": "dense", "narrow": "narrow"}


def cards(methods: Sequence[Method], latencies: Sequence[Latency]) -> str:
    """Return a card for each method: accuracy, size, multiply-adds, latency, against dense and narrow."""
    named = {method.name: method for method in methods}
    return f'<ul class="cards">{"".join(_card(method, named, latencies) for method in methods)}</ul>'


def _card(method: Method, others: dict[str, Method], latencies: Sequence[Latency]) -> str:
    dense = others.get(method.dense or "")
    facts = [
        *_accuracy(method),
        ("parameters", _cost(method.params, None if dense is None else dense.params)),
        ("multiply-adds", _cost(method.madds, None if dense is None else dense.madds)),
    ]
    words = latency_words(latencies, method.name)
    if words is not None:
        facts.append(("a pass", escape(words)))
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in facts)
    role = f'<span class="role">{_ROLES[method.role]}</span>' if method.role in _ROLES else ""
    return f'<li class="card"><h3>{escape(method.name)}{role}</h3><dl>{rows}</dl></li>'


def _accuracy(method: Method) -> list[tuple[str, str]]:
    if method.accuracy is None:
        return [("accuracy", "not known")]
    sd = "" if method.sd is None else f" ± {100 * method.sd:.2f}"
    runs = f"{method.n} run{'s' if method.n != 1 else ''}"
    facts = [(f"{method.measured} accuracy", f'<span class="big">{100 * method.accuracy:.2f}%</span>{sd}')]
    facts.append(("measured in", runs))
    for difference, name, what in (
        (method.to_dense, method.dense, "dense"),
        (method.to_narrow, method.narrow, "narrow"),
    ):
        if difference is not None:
            side = "up" if difference >= 0 else "down"
            shown = f'<span class="{side}">{100 * difference:+.2f} points</span>'
            facts.append((f"against {what}", f'{shown} <span class="soft">({escape(name or "")})</span>'))
    return facts


def _cost(value: int | None, dense: int | None) -> str:
    if value is None:
        return "not known"
    ratio = "" if not dense else f' <span class="soft whole">({100 * value / dense:.1f}% of dense)</span>'
    return f"{value:,}{ratio}"


def notes(runs: Sequence[Run], more: Sequence[str]) -> str:
    """Return what a reader must know of the runs: what is missing, and why."""
    told = [f"{escape(note)} <strong>{escape('; '.join(labels))}</strong>" for note, labels in by_note(runs).items()]
    told += [escape(note) for note in more]
    entries = "".join(f"<li>{each}</li>" for each in told)
    return f'<ul class="notes">{entries}</ul>' if entries else ""


def by_note(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the labels of the runs that each note is about."""
    found: dict[str, list[str]] = {}
    for run in runs:
        unknown = run.state != "checkpoint" and accuracy_of(run)[0] is None
        for note in (*run.notes, *(["No accuracy is known."] if unknown else [])):
            found.setdefault(note, []).append(run.label)
    return found


def made_by(runs: Sequence[Run]) -> str:
    """Return how each run was made: command, data, machine and recipe."""
    return "".join(_made(run) for run in runs if run.result is not None)


def _made(run: Run) -> str:
    result = run.result
    if result is None:
        return ""
    environment = ", ".join(f"{key} {value}" for key, value in result.environment.items() if value is not None)
    facts = (
        ("command", shlex.join(map(str, result.command))),
        ("data", str(result.data.get("train", "not known"))),
        ("machine", environment),
        ("recipe", result.recipe_text.strip()),
    )
    inside = "".join(f"<h3>{name}</h3><pre>{escape(text)}</pre>" for name, text in facts if text)
    return f"<details><summary>How {escape(run.label)} was made</summary>{inside}</details>"
