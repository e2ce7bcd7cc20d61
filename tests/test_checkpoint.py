"""Checkpoints: round trips, damage, foreign architectures, and that nothing half-written is taken for whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import epitorch
from epitorch import _files
from epitorch.checkpoint import (
    CheckpointConfig,
    ModelInput,
    load_checkpoint,
    save_checkpoint,
)
from epitorch.conversion import convert_
from epitorch.errors import CheckpointError
from epitorch.models.resolve import build_model
from epitorch.nn import EpitomeLayer
from epitorch.plans import LayerPlan, Plan

WIDTHS = [4, 4, 8]
FILES = ["README.md", "config.json", "model.safetensors"]
IMAGE = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def make(
    index: str | None = "learner", widths: list[int] = WIDTHS, **changes: Any
) -> tuple[nn.Module, CheckpointConfig]:
    arguments = {"widths": widths}
    model, plan = build_model("epitorch:digits_cnn", arguments), None
    if index is not None:
        plan = Plan({"conv3": LayerPlan((4, 2, 3, 3), index=index)}, {"conv1": "stem"})  # type: ignore[arg-type]
        convert_(model, plan)
    model.train()(IMAGE)  # batch statistics and routing map move
    config = CheckpointConfig(
        "epitorch:digits_cnn",
        arguments,
        plan,
        ModelInput((1, 8, 8), (0.5,), (0.25,), tuple("0123456789")),
        64,
        {"test_accuracy": 0.5},
        {"training": {"epochs": 1}},
    )
    return model.eval(), CheckpointConfig(**{**vars(config), **changes})


@pytest.mark.parametrize("index", [None, "learner", "direct", "fixed"])
def test_round_trip(index: str | None, tmp_path: Path) -> None:
    model, config = make(index)
    save_checkpoint(tmp_path, model, config)
    assert sorted(p.name for p in tmp_path.iterdir()) == FILES
    state = torch.get_rng_state()
    loaded = load_checkpoint(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert loaded.config == config
    assert not loaded.model.training
    torch.testing.assert_close(loaded.model(IMAGE), model(IMAGE), rtol=0, atol=0)
    assert list(loaded.model.state_dict()) == list(model.state_dict())
    with torch.no_grad():  # the comparison can fail
        loaded.model.conv1.weight.add_(0.1)  # type: ignore[operator,union-attr]
    assert not torch.equal(loaded.model(IMAGE), model(IMAGE))


def test_learner_and_frozen_flag_are_kept(tmp_path: Path) -> None:
    model, config = make()
    layer: Any = model.conv3
    layer.freeze_routing()
    loaded: Any = load_checkpoint(save_checkpoint(tmp_path, model, config)).model
    assert loaded.conv3.routing_map.is_frozen
    torch.testing.assert_close(loaded.conv3.learner.head.bias, layer.learner.head.bias)


def test_a_state_without_learner_loads(tmp_path: Path) -> None:
    model, config = make()
    layer: Any = model.conv3
    layer.drop_learner()
    loaded: Any = load_checkpoint(save_checkpoint(tmp_path, model, config)).model
    assert loaded.conv3.learner is None
    torch.testing.assert_close(loaded(IMAGE), model(IMAGE), rtol=0, atol=0)


def test_a_learner_missing_from_an_unfrozen_layer_is_an_error(tmp_path: Path) -> None:
    model, config = make()
    layer: Any = model.conv3
    layer.learner = None
    save_checkpoint(tmp_path, model, config)
    with pytest.raises(CheckpointError, match=r"missing: conv3\.learner\."):
        load_checkpoint(tmp_path)


def test_channels_last_and_shared_tensors_are_stored(tmp_path: Path) -> None:
    model, config = make(None)
    model.to(memory_format=torch.channels_last)
    loaded = load_checkpoint(save_checkpoint(tmp_path, model, config)).model
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_the_run_s_folder_will_do(tmp_path: Path) -> None:
    model, config = make()
    save_checkpoint(tmp_path / "checkpoint", model, config)
    assert load_checkpoint(tmp_path).config.model == "epitorch:digits_cnn"


# ---- damage ----


def saved(tmp_path: Path) -> Path:
    model, config = make()
    return save_checkpoint(tmp_path / "c", model, config)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing") as caught:
        load_checkpoint(folder)
    assert str(folder) in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load_checkpoint(tmp_path / "none")
    (tmp_path / "file").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match=r"got: +a file"):
        load_checkpoint(tmp_path / "file")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.99])
def test_truncated_file(name: str, keep: float, tmp_path: Path) -> None:
    path = saved(tmp_path) / name
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(CheckpointError, match="damaged") as caught:
        load_checkpoint(path.parent)
    assert str(path) in str(caught.value)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    name=st.sampled_from(["config.json", "model.safetensors"]),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_is_never_loaded(name: str, where: float, bit: int, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    if not folder.exists():
        saved(tmp_path)
    path = folder / name
    content = path.read_bytes()
    spoiled = bytearray(content)
    spoiled[int(where * len(content))] ^= 1 << bit
    path.write_bytes(spoiled)
    try:
        loaded = None
        with pytest.raises(CheckpointError):
            loaded = load_checkpoint(folder)
        assert loaded is None
    finally:
        path.write_bytes(content)


def test_no_bit_of_the_metadata_may_flip(tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    start, end = content.index(b'{"__metadata__"'), content.index(b"}") + 1
    assert b"format" in content[start:end]
    for bit in range(8 * start, 8 * end):
        spoiled = bytearray(content)
        spoiled[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoiled)
        with pytest.raises(CheckpointError):
            load_checkpoint(path.parent)
    path.write_bytes(content)
    assert load_checkpoint(path.parent)


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": 1}', '{"format": []}', "null", '"x"'])
def test_config_of_another_kind(content: str, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(folder)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change the configuration and make its hash right again."""
    from epitorch.checkpoint._config import content_hash

    content = json.loads((folder / "config.json").read_text())
    del content["sha256"]
    content.update(changes)
    (folder / "config.json").write_text(json.dumps({**content, "sha256": content_hash(content)}))


def test_newer_formats(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    rewrite(folder, format=[1, 7], later="a key of a later minor version")
    assert load_checkpoint(folder).config.batch_size == 64
    rewrite(folder, format=[2, 0])
    with pytest.raises(CheckpointError, match="format 2"):
        load_checkpoint(folder)


def test_config_without_a_key(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    rewrite(folder, input={})
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(folder)


# ---- another architecture ----


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arguments": {"widths": [4, 4, 6]}}, "other shape: "),
        ({"arguments": {"widths": [4, 4]}}, "rebuilt"),
        ({"arguments": {"widths": [4, 4, 8, 8]}}, "missing: conv4.weight"),
        ({"plan": None}, "missing: conv3.weight; unexpected: conv3.epitome"),
        ({"model": "epitorch:nothing"}, "rebuilt"),
    ],
)
def test_weights_of_another_architecture(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    rewrite(folder, **change)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)


def test_long_lists_of_tensors_are_cut(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    rewrite(folder, arguments={"widths": [4, 4, 8, 8, 8]})
    with pytest.raises(CheckpointError, match=r"and \d+ more"):
        load_checkpoint(folder)


def test_foreign_code_runs_only_when_allowed(tmp_path: Path) -> None:
    model, config = make(None, model="epitorch.models.small:digits_cnn")
    save_checkpoint(tmp_path, model, config)
    with pytest.raises(CheckpointError, match="allow_factory"):
        load_checkpoint(tmp_path)
    assert isinstance(load_checkpoint(tmp_path, allow_factory=True).model, nn.Sequential)
    made = tmp_path / "made-by-the-checkpoint"
    _, evil = make(None, model="os:mkdir", arguments={"path": str(made)})
    save_checkpoint(tmp_path, model, evil)
    with pytest.raises(CheckpointError, match="os:mkdir"):
        load_checkpoint(tmp_path)
    assert not made.exists()


def test_pretrained_weights_are_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = make(None, arguments={"widths": WIDTHS, "pretrained": True, "checkpoint_path": "/etc/passwd"})
    save_checkpoint(tmp_path, model, config)
    # the factory takes neither argument: loading works only because both are left out
    torch.testing.assert_close(load_checkpoint(tmp_path).model(IMAGE), model(IMAGE), rtol=0, atol=0)


# ---- nothing half-written ----


class Killed(BaseException):
    pass


def killed_at(count: int, monkeypatch: pytest.MonkeyPatch, name: str) -> Callable[..., Any]:
    """Raise at the given call of `os.<name>`, as a kill at that moment would end the process."""
    real, calls = getattr(os, name), iter(range(100))

    def dying(*arguments: Any) -> Any:
        if next(calls) == count:
            raise Killed
        return real(*arguments)

    monkeypatch.setattr(_files.os, name, dying)
    return dying


@pytest.mark.parametrize("widths", [WIDTHS, [4, 6]], ids=["same architecture", "another"])
@pytest.mark.parametrize("name", ["replace", "fsync"])
@pytest.mark.parametrize("moment", range(6))
def test_a_killed_save_leaves_the_old_or_the_new(
    name: str, moment: int, widths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, *make())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    old = load_checkpoint(tmp_path)
    model, config = make(None if widths != WIDTHS else "learner", widths, metrics={"test_accuracy": 0.75})
    killed_at(moment, monkeypatch, name)
    # the configuration is the third file that is written; two renames follow
    calls, holds = (5, 3) if name == "replace" else (3, 3)
    if moment < calls:
        with pytest.raises(Killed):
            save_checkpoint(tmp_path, model, config)
    else:
        save_checkpoint(tmp_path, model, config)
    monkeypatch.undo()
    got = load_checkpoint(tmp_path)
    whole, metrics = (model, config.metrics) if moment >= holds else (old.model, old.config.metrics)
    torch.testing.assert_close(got.model(IMAGE), whole(IMAGE), rtol=0, atol=0)
    assert got.config.metrics == metrics
    if moment < holds:
        assert {name: (tmp_path / name).read_bytes() for name in before} == before
    save_checkpoint(tmp_path, model, config)  # the next one clears up
    assert sorted(p.name for p in tmp_path.iterdir()) == FILES
    torch.testing.assert_close(load_checkpoint(tmp_path).model(IMAGE), model(IMAGE), rtol=0, atol=0)


def test_a_process_killed_while_it_saves_again_and_again(tmp_path: Path) -> None:
    """SIGKILL at moments of its own choosing; what is there afterwards opens and is one of the two, with its number."""
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_checkpoint import *
from pathlib import Path
both = [make(metrics={{"which": 0}}), make(None, [4, 6], metrics={{"which": 1}})]
while True:
    for model, config in both:
        with torch.no_grad(): model.conv1.weight.fill_(config.metrics["which"])
        save_checkpoint(Path({str(tmp_path)!r}), model, config)
        print("saved", flush=True)
"""
    seen = set()
    for turn in range(4):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.003 * turn)
            process.kill()
        loaded: Any = load_checkpoint(tmp_path)
        which = loaded.config.metrics["which"]
        assert bool((loaded.model.conv1.weight == which).all())
        seen.add(which)
    assert seen <= {0, 1}


def test_checkpoint_holds_no_pickle(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    header_length = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    header = json.loads((folder / "model.safetensors").read_bytes()[8 : 8 + header_length])
    assert set(header["__metadata__"]) == {"format"}
    layers = [n for n, m in make()[0].named_modules() if isinstance(m, EpitomeLayer)]
    assert {f"{name}.epitome" for name in layers} <= set(header)


def test_dtypes_are_those_that_were_saved(tmp_path: Path) -> None:
    model, config = make()
    loaded = load_checkpoint(save_checkpoint(tmp_path, model.double(), config)).model
    assert {p.dtype for p in loaded.parameters()} == {torch.float64}
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert all(p.requires_grad for p in loaded.parameters())


def test_starts_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model, config = make()
    layer = next(m for m in model.modules() if isinstance(m, epitorch.EpitomeLayer))
    next(iter(layer.starts().values())).fill_(float("nan"))
    with pytest.raises(CheckpointError, match="not a finite number"):
        load_checkpoint(save_checkpoint(tmp_path, model, config))


def test_a_deployed_network_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    model, config = make()
    net = epitorch.deploy(model.eval(), torch.randn(1, 1, 8, 8), strategy="dense")
    with pytest.raises(CheckpointError, match="a deployed network is not a checkpoint"):
        save_checkpoint(tmp_path / "c", net, config)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("change", [{"model": 3}, {"arguments": [1]}, {"batch_size": "x"}])
def test_values_of_another_type_are_damage(change: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path)
    rewrite(folder, **change)
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(folder)
