"""Runs on a real Ray of this machine: made, failed, stopped, resumed; and what a killed sweep leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sweep_helpers import TINY, console, write_sweep

from epitorch.cli import main
from epitorch.errors import InputError
from epitorch.results import load_results
from epitorch.sweeps import child
from epitorch.sweeps.cluster import Cluster, Resources, connected
from epitorch.training.recipe import load_recipe
from epitorch.training.run import train

BROKEN = TINY.replace("epitorch:digits_cnn", "torch.nn:Nothing")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells that a parent has ended")


def wait_for(path: Path, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.1)


def test_runs_are_not_stopped_for_memory_that_others_take(local_ray: Cluster) -> None:
    import ray

    name = "RAY_memory_monitor_refresh_ms"
    asked = ray.remote(lambda: os.environ.get(name))
    assert ray.get(asked.remote()) == "0"


@linux
def test_runs_are_not_the_first_that_the_system_kills(local_ray: Cluster) -> None:
    import ray

    score = ray.remote(lambda: Path("/proc/self/oom_score_adj").read_text())
    assert ray.get(score.remote()) == Path("/proc/self/oom_score_adj").read_text()


def test_a_sweep_from_the_command_line(recipes: Path, local_ray: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    (recipes / "recipes/tiny/broken.yaml").write_text(BROKEN)
    write_sweep(recipes / "s.yaml", "recipes: [tiny/broken, tiny/dense]\nset: {training.peak_lr: 0.2}\nseeds: [1]\n")
    command = [
        "sweep",
        "s.yaml",
        "--data",
        "digits",
        "--max-steps",
        "2",
        "--jobs",
        "2",
        "--cpus-per-run",
        "1",
        "--json",
    ]
    assert main([*command, "--out", "out"]) == 1
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert (summary["complete"], list(summary["methods"])) == (False, ["dense"])
    assert "error: 1 runs failed" in err
    assert "broken-seed1" in err
    assert Path("out/broken-seed1.log").read_text().count("error: ") == 1
    (result,) = load_results(Path("out/dense-seed1/results.json"))
    assert (result.seed, result.recipe["training"]["peak_lr"], result.data["steps_run"]) == (1, 0.2, 2)
    assert result.command[:3] == ["epitorch", "train", "out/recipes/dense.yaml"]
    reached = train(load_recipe("out/recipes/dense.yaml"), "digits", "alone", seed=1, max_steps=2, console=console())
    assert reached.accuracy == result.accuracy
    assert main([*command, "--out", "out", "--methods", "dense"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"] is True


@pytest.mark.slow
def test_a_stopped_run_keeps_its_state_and_goes_on_to_the_same_numbers(recipes: Path, local_ray: Cluster) -> None:
    long = recipes / "long.yaml"
    long.write_text(TINY.replace("epochs: 1", "epochs: 200"))
    command = ["train", "long.yaml", "--data", "digits", "--max-steps", "120", "--out", "out/long"]
    Path("out").mkdir()
    handle = local_ray.start(command, "out/long", "out/long.log")
    wait_for(Path("out/long/lightning/last.ckpt"))
    local_ray.stop([handle])
    assert not Path("out/long/results.json").exists()
    assert "the same command goes on" in Path("out/long.log").read_text()
    handle = local_ray.start(command, "out/long", "out/long.log")
    assert local_ray.ended([handle], 300) == [handle]
    assert local_ray.outcome(handle) is None
    assert "goes on with the unfinished run" in Path("out/long.log").read_text()
    (result,) = load_results(Path("out/long/results.json"))
    whole = train(load_recipe(long), "digits", "whole", max_steps=120, console=console())
    assert (result.accuracy, result.loss) == (whole.accuracy, whole.loss)


@linux
def test_a_run_ends_by_itself_when_its_parent_is_killed(tmp_path: Path) -> None:
    ends = (
        "import pathlib, runpy, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('ended').touch(), sys.exit()))\n"
        "runpy.run_path(sys.argv[1])['follow_parent'](int(sys.argv[2]))\n"
        "pathlib.Path('begun').touch()\n"
        "time.sleep(120)\n"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        "command = [sys.executable, '-c', *sys.argv[1:], str(os.getpid())]\n"
        "subprocess.Popen(command, start_new_session=True)\n"
        "time.sleep(120)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, ends, child.__file__], cwd=tmp_path)
    try:
        wait_for(tmp_path / "begun", 60)
        assert not (tmp_path / "ended").exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(tmp_path / "ended", 60)


@linux
@pytest.mark.parametrize(
    ("parent", "code", "printed"), [("1 << 22", 128 + signal.SIGTERM, ""), ("os.getppid()", 0, "went on\n")]
)
def test_a_child_whose_parent_has_ended_already_leaves(parent: str, code: int, printed: str) -> None:
    program = f"import os, runpy, sys; runpy.run_path(sys.argv[1])['follow_parent']({parent}); print('went on')"
    done = subprocess.run([sys.executable, "-c", program, child.__file__], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, printed)


def test_a_run_cannot_ask_for_more_than_there_is(local_ray: Cluster) -> None:
    before = dict(os.environ)
    with pytest.raises(InputError, match="more CPUs than any machine has"), connected(Resources(cpus=1000)):
        pass
    with pytest.raises(InputError, match="more GPUs than any machine has"), connected(Resources(gpus=64)):
        pass
    assert dict(os.environ) == before


def test_an_address_without_a_cluster_is_told_at_once(
    recipes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pytest.importorskip("ray"), "is_initialized", lambda: False)
    write_sweep(recipes / "s.yaml", "recipe: tiny/dense\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: nothing answers
        address = f"127.0.0.1:{free.getsockname()[1]}"
        assert main(["sweep", "s.yaml", "--data", "digits", "--out", "out", "--address", address]) == 2
    err = capsys.readouterr().err
    assert "--address: no Ray cluster answers" in err
    assert address in err


@pytest.mark.parametrize("package", ["ray", "matplotlib"])
def test_a_missing_package_says_which_extra(
    recipes: Path, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    write_sweep(recipes / "s.yaml", "recipe: tiny/dense\n")
    assert main(["sweep", "s.yaml", "--data", "digits", "--out", "out"]) == 2
    assert "pip install 'epitorch[sweep]'" in capsys.readouterr().err


def test_runs_that_have_not_begun_are_stopped_at_once(recipes: Path, local_ray: Cluster) -> None:
    """More than fit, so that some are starting and some wait; none of them may go on to its end."""
    (recipes / "long.yaml").write_text(TINY.replace("epochs: 1", "epochs: 500"))
    Path("out").mkdir()
    command = ["train", "long.yaml", "--data", "digits", "--out"]
    handles = [local_ray.start([*command, f"out/{i}"], f"out/{i}", f"out/{i}.log") for i in range(4)]
    local_ray.stop(handles)
    assert len(local_ray.ended(handles, 0)) == 1
    assert not list(Path("out").glob("*/results.json"))
    assert not Path("out/.stop").exists()


def test_a_process_that_dies_is_a_failure(recipes: Path, local_ray: Cluster) -> None:
    handle = local_ray.start(["train", "nothing", "--data", "digits"], "out", str(recipes / "x.log"))
    assert local_ray.ended([handle], 120) == [handle]
    assert local_ray.outcome(handle) == "exit code 2"
    assert "there is no recipe 'nothing'" in (recipes / "x.log").read_text()
