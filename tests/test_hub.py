"""Publishing and fetching checkpoints, against a Hub on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import epitorch
from epitorch.checkpoint import CheckpointConfig, load_checkpoint, save_checkpoint
from epitorch.cli import main
from epitorch.errors import CheckpointError, HubError, InputError
from epitorch.models.resolve import build_model
from hub_server import TOKEN, Hub, serving

FILES = {"README.md", "config.json", "model.safetensors"}
IMAGE = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made


def make() -> nn.Module:
    model = build_model("epitorch:digits_cnn", {"widths": [4, 4, 8]})
    epitorch.convert_(model, epitorch.Plan({"conv3": epitorch.LayerPlan((4, 2, 3, 3))}))
    return model.eval()


def test_there_and_back(hub: Hub) -> None:
    model = make()
    report = epitorch.push_to_hub(model, "me/digits", metrics={"test_accuracy": 0.5}, message="the first")
    files = hub.repositories["me/digits"]["main"]
    assert set(files) == FILES
    assert hub.messages == ["the first"]
    assert hub.private["me/digits"] is False
    assert report.bytes == sum(map(len, files.values()))
    assert report.commit == hub.commit_of("me/digits", "main")
    assert str(report.url).startswith(hub.url)
    assert b"| test_accuracy | 0.5 |" in files["README.md"]
    loaded = epitorch.from_pretrained("me/digits")
    torch.testing.assert_close(loaded(IMAGE), model(IMAGE), rtol=0, atol=0)
    other = epitorch.push_to_hub(make(), "me/digits")
    assert other.commit != report.commit
    assert not torch.equal(epitorch.from_pretrained("me/digits")(IMAGE), model(IMAGE))  # the newer one


def test_a_branch_and_a_private_repository(hub: Hub) -> None:
    model = make()
    epitorch.push_to_hub(model, "me/other", private=True, revision="int8", dtype="int8")
    assert hub.private["me/other"] is True
    assert set(hub.repositories["me/other"]["int8"]) == FILES
    assert hub.repositories["me/other"]["main"] == {}
    loaded: Any = epitorch.from_pretrained("me/other", revision="int8")
    torch.testing.assert_close(loaded(IMAGE), model(IMAGE), rtol=0.05, atol=0.05)
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        epitorch.from_pretrained("me/other")


def test_offline_what_was_fetched_is_there_and_the_rest_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    epitorch.push_to_hub(model, "me/digits")
    epitorch.from_pretrained("me/digits")
    before = len(hub.requests)
    loaded = epitorch.from_pretrained("me/digits", local_files_only=True)
    assert len(hub.requests) == before
    torch.testing.assert_close(loaded(IMAGE), model(IMAGE), rtol=0, atol=0)
    with pytest.raises(HubError, match="'me/unseen' is no folder here and cannot be taken from the Hub"):
        epitorch.from_pretrained("me/unseen", local_files_only=True)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing answers there
    torch.testing.assert_close(epitorch.from_pretrained("me/digits")(IMAGE), model(IMAGE), rtol=0, atol=0)
    with pytest.raises(HubError, match="to do: "):
        epitorch.from_pretrained("me/unseen")


def test_what_the_hub_refuses_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HubError, match="cannot be taken from the Hub"):
        epitorch.from_pretrained("me/nothing")
    with pytest.raises(HubError, match="'me/digits' could not be published"):
        epitorch.push_to_hub(make(), "me/digits", token="hf_wrong")
    assert hub.repositories == {}


@pytest.mark.parametrize("name", ["digits", "a/b/c", "../up", "me/..", "/etc/passwd", "me/digits/", "", "a b/c"])
def test_names_that_are_none(name: str, hub: Hub) -> None:
    with pytest.raises(InputError, match="no name on the Hub"):
        epitorch.push_to_hub(make(), name)
    if name != "":  # the folder that the tests run in
        with pytest.raises(CheckpointError, match="expected: a folder"):
            epitorch.from_pretrained(name)
    assert hub.requests == []


def test_a_folder_comes_before_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    epitorch.save_pretrained(make(), "me/digits")
    assert epitorch.from_pretrained("me/digits") is not None
    assert hub.requests == []


def test_damage_on_the_hub_is_found(hub: Hub) -> None:
    epitorch.push_to_hub(make(), "me/digits")
    files = hub.repositories["me/digits"]["main"]
    files["model.safetensors"] = files["model.safetensors"][:-1] + b"!"
    with pytest.raises(CheckpointError, match="damaged"):
        epitorch.from_pretrained("me/digits")


def test_the_command_publishes_a_run(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make()
    config = CheckpointConfig(
        "epitorch:digits_cnn",
        {"widths": [4, 4, 8]},
        epitorch.Plan({"conv3": epitorch.LayerPlan((4, 2, 3, 3))}),
        None,
        None,
        {"test_accuracy": 0.875},
    )
    save_checkpoint(tmp_path / "checkpoint", model, config)
    assert main(["push", str(tmp_path), "me/run", "--json", "--dtype", "float16"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["repo_id"] == "me/run"
    assert report["commit"] == hub.commit_of("me/run", "main")
    loaded: Any = epitorch.from_pretrained("me/run")
    assert loaded.conv3.learner is None
    torch.testing.assert_close(loaded(IMAGE), model(IMAGE), rtol=1e-2, atol=1e-2)
    assert main(["push", str(tmp_path), "me/run", "--learner"]) == 0
    assert "3 files" in capsys.readouterr().out
    assert b"0.875" in hub.repositories["me/run"]["main"]["README.md"]
    again: Any = epitorch.from_pretrained("me/run")
    assert again.conv3.learner is not None
    assert load_checkpoint(tmp_path).config == config


def test_the_command_s_errors(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(tmp_path), "me/run"]) == 2
    assert "there is no checkpoint here" in capsys.readouterr().err
    assert main(["push", str(tmp_path), "run"]) == 2
    assert "OWNER/NAME" in capsys.readouterr().err
    epitorch.save_pretrained(make(), tmp_path)
    assert main(["push", str(tmp_path), "me/run", "--dtype", "int4"]) == 2
    assert "float32 | float16 | bfloat16 | int8" in capsys.readouterr().err
    assert hub.requests == []
