"""The page as a file: whole, escaped, self-contained, readable without scripts, below its size."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from report_cases import Page

from epitorch.cli import main
from epitorch.errors import InputError
from epitorch.report import _page, report
from epitorch.results import load_results, save_results

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'$\\frac{&}$ _x"


@pytest.fixture(scope="module")
def made(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    report([runs], out, progress=False)
    return out


@pytest.fixture(scope="module")
def evil(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evil")
    shutil.copytree(runs / "epitome", folder / "run")
    (result,) = load_results(runs / "epitome" / "results.json")
    named = replace(result, name=EVIL, recipe_text=EVIL, command=[EVIL], environment={EVIL: EVIL})
    save_results(folder / "run" / "results.json", named)
    report([folder / "run"], folder / "report.html", title=EVIL, progress=False)
    return folder / "report.html"


def without_plotly(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    script = _page._plotly()
    assert text.count(script) == 1
    return text.replace(script, "")


def test_the_page_is_below_6_mb_and_has_plotly_once(made: Path) -> None:
    assert 4_000_000 < made.stat().st_size < 6_000_000
    assert len(without_plotly(made)) < 1_000_000


def test_the_page_is_well_formed_and_has_landmarks(made: Path) -> None:
    page = Page(without_plotly(made))
    assert page.wrong == []
    assert page.open == []
    assert [len(page.all(tag)) for tag in ("html", "header", "nav", "main", "footer", "h1", "title")] == [1] * 7
    assert page.all("html")[0]["lang"] == "en"
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) > 30
    named = [value for _, a in page.elements if (value := a.get("aria-labelledby"))]
    assert named
    assert set(named) <= set(ids)
    links = [a["href"] for a in page.all("a")]
    assert links
    assert {str(link).removeprefix("#") for link in links} <= set(ids)
    assert all(a.get("scope") in ("col", "row") for a in page.all("th"))
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(headings))


def test_every_figure_is_there_without_scripts(made: Path) -> None:
    page = Page(without_plotly(made))
    figures = len(page.all("figure"))
    assert figures >= 10
    assert len(page.all("svg")) == figures
    told = [a["aria-label"] for a in page.all("div") if a.get("role") == "img"]
    assert len(told) == 2 * figures  # of the picture and of plotly's
    assert all(told)
    assert len(page.all("table")) >= 6
    assert "tiny/epitome" in page.text("text")  # of the pictures


def test_nothing_is_fetched(made: Path) -> None:
    page = Page(without_plotly(made))
    for _, attributes in page.elements:
        for key in ("src", "href", "xlink:href", "action", "srcset", "poster", "data"):
            value = attributes.get(key)
            assert value is None or value.startswith(("#", "data:"))
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv")]
    assert str(policy).startswith("default-src 'none'")
    assert "@import" not in page.text("style")
    assert not re.search(r"url\((?!#)", "".join(str(a.get("style")) for _, a in page.elements) + page.text("style"))


def test_names_from_files_are_text(evil: Path) -> None:
    page = Page(without_plotly(evil))
    assert page.wrong == []
    assert page.all("img") == []
    assert len(page.all("script")) == 3
    assert EVIL in page.text("h1")
    assert EVIL in page.text("pre")
    assert EVIL in page.text("text")  # a dollar makes no formula
    (data,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', without_plotly(evil), re.DOTALL)
    names = [trace["name"] for chart in json.loads(data).values() for trace in chart["data"]]
    assert any("&lt;img" in name for name in names)
    assert not any("<" in name for name in names)


def test_without_plotly_it_is_small(runs: Path, tmp_path: Path) -> None:
    report([runs], tmp_path / "r.html", interactive=False, progress=False)
    text = (tmp_path / "r.html").read_text()
    assert "Plotly.js" not in text
    assert len(text) < 800_000
    assert len(Page(text).all("svg")) >= 10


def test_what_has_no_room_is_named(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_page, "MOST_BYTES", 160_000)
    report([runs], tmp_path / "r.html", interactive=False, progress=False)
    text = (tmp_path / "r.html").read_text()
    assert len(text.encode()) < 160_000
    found = re.search(r"(\d+) figures and tables were left out", text)
    assert found
    assert int(found[1]) > 3
    assert Page(text).wrong == []


def test_dense_runs_alone_say_that_there_are_no_epitomes(runs: Path, tmp_path: Path) -> None:
    report([runs / "dense"], tmp_path / "r.html", interactive=False, progress=False)
    text = (tmp_path / "r.html").read_text()
    assert "None of these runs has epitome layers" in text
    assert "1 run" in text


def test_an_unfinished_run_alone_is_a_page(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    report([tmp_path / "run"], tmp_path / "r.html", interactive=False, progress=False)
    text = (tmp_path / "r.html").read_text()
    for words in ("is not finished", "No accuracy is known", "No run recorded its epochs", "1 run, 0 of them finished"):
        assert words in text


def test_the_old_page_stays_where_writing_fails(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r.html"
    out.write_text("old")

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", refuse)
        with pytest.raises(OSError, match="No space"):
            report([runs / "dense"], out, interactive=False, progress=False)
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_a_page_without_a_place_is_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no place"):
        report([runs], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="no place"):
        report([runs], tmp_path / "file" / "r.html")
    with pytest.raises(InputError, match=r"no folder .*none"):
        report([runs], tmp_path / "none" / "r.html")
    with pytest.raises(InputError, match=r"ends in \.html"):
        report([runs], tmp_path / "r.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(InputError, match="no folder"):
        report([runs], tmp_path / "r.html", figures=tmp_path / "file")


def test_the_command_writes_and_prints(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "r.html")
    assert main(["report", str(runs / "dense"), "--out", out, "--static", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["page"] == out
    assert printed["methods"][0]["name"] == "tiny/dense"
    assert main(["report", str(runs / "dense"), "--out", out, "--static", "--published", "cifar10"]) == 0
    assert "written to" in capsys.readouterr().out
    assert "MobileNetV2, published" in Path(out).read_text()
    assert main(["report", str(tmp_path / "missing"), "--out", out]) == 2
    assert "there is no run here" in capsys.readouterr().err
    assert main(["report", str(runs), "--out", out, "--published", "mnist"]) == 2
    assert "mnist" in capsys.readouterr().err
