"""Checkpoints made to do harm, or spoiled by chance: a CheckpointError, little memory, and nothing run."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import epitorch
from epitorch.checkpoint import TooLargeError, _guard, load_checkpoint, save_checkpoint
from epitorch.checkpoint._config import MAX_BYTES, content_hash
from epitorch.checkpoint._guard import Bounded
from epitorch.checkpoint._tensors import MAX_HEADER
from epitorch.cli import main
from epitorch.errors import CheckpointError
from epitorch.models.resolve import build_model

ROOT = Path(__file__).resolve().parents[1]


def write(folder: Path, dtype: Any = None) -> Path:
    torch.manual_seed(0)
    model = build_model("epitorch:digits_cnn", {"widths": [4, 4, 8]})
    epitorch.convert_(model, epitorch.Plan({"conv3": epitorch.LayerPlan((4, 2, 3, 3))}))
    known = epitorch.checkpoint.ModelInput((1, 8, 8), (0.5,), (0.25,), tuple("0123456789"))
    return epitorch.save_pretrained(model, folder, dtype=dtype, input=known)


def change(folder: Path, edit: Callable[[dict[str, Any]], object] = lambda content: None) -> None:
    """Edit the configuration and make both hashes right: what an attacker would do."""
    content, weights = json.loads((folder / "config.json").read_text()), (folder / "model.safetensors").read_bytes()
    del content["sha256"]
    content["weights"].update(sha256=sha256(weights).hexdigest(), bytes=len(weights))
    edit(content)
    (folder / "config.json").write_text(json.dumps({**content, "sha256": content_hash(content)}))


def assert_refused(folder: Path, words: str | None = None) -> str:
    with pytest.raises(CheckpointError, match=words) as caught:
        load_checkpoint(folder)
    assert len(str(caught.value)) < 4000
    return str(caught.value)


# ---- the configuration ----


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000])
def test_json_nested_too_deeply(text: bytes, tmp_path: Path) -> None:
    (write(tmp_path) / "config.json").write_bytes(text)
    assert_refused(tmp_path, "damaged")


def test_a_configuration_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    with (write(tmp_path) / "config.json").open("r+b") as file:
        file.truncate(MAX_BYTES * 1000)  # a sparse file
    assert_refused(tmp_path, f"at most {MAX_BYTES:,}")


@pytest.mark.parametrize(
    "text", ["1" * 5000, '{"format": [1, 2], "model": NaN}', '{"format": [1, 1e999]}', '{"format": [1, true]}']
)
def test_numbers_that_are_none(text: str, tmp_path: Path) -> None:
    (write(tmp_path) / "config.json").write_text(text)
    assert_refused(tmp_path, "damaged")


BOMBS: dict[str, Callable[[dict[str, Any]], object]] = {
    "wide": lambda c: c["arguments"].update(widths=[10**6, 10**6, 8]),
    "absurd": lambda c: c["arguments"].update(widths=[10**18, 10**18, 8]),
    "beyond integers": lambda c: c["arguments"].update(widths=[10**400, 4, 8]),
    "deep": lambda c: c["arguments"].update(widths=[1] * 50_000),
    "epitome": lambda c: c["plan"]["layers"]["conv3"].update(epitome_shape=[10**6, 10**6, 3, 3]),
    "positions": lambda c: c.update(model="timm:vit_tiny_patch16_224", arguments={"img_size": 10**6}, plan=None),
    "classes": lambda c: c.update(model="timm:resnet10t", arguments={"num_classes": 10**9}, plan=None),
    "layers": lambda c: c.update(model="timm:resnet18", arguments={"layers": [10**7, 2, 2, 2]}, plan=None),
    "window": lambda c: c.update(
        model="timm:swin_tiny_patch4_window7_224", arguments={"window_size": 2**11, "img_size": 2**15}, plan=None
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_network_of_absurd_size_is_not_built(bomb: str, tmp_path: Path) -> None:
    import resource

    change(write(tmp_path), BOMBS[bomb])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_refused(tmp_path, "rebuilt")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 1500  # MiB; the bound is 1 GiB of tensors


def test_the_bound_can_be_moved(tmp_path: Path) -> None:
    change(write(tmp_path))
    with pytest.raises(TooLargeError, match="give max_bytes"):
        load_checkpoint(tmp_path, max_bytes=1000)
    assert epitorch.from_pretrained(tmp_path, max_bytes=10**6) is not None


def test_an_example_of_absurd_size_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(write(tmp_path), lambda c: c["input"].update(shape=[1, 10**6, 10**6]))
    assert main(["count", str(tmp_path)]) == 2
    assert "input.shape has more than" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made", "ends"),
    [
        (lambda: torch.zeros(1000), 4000),
        (lambda: torch.ones(10, 10, dtype=torch.float64), 800),
        (lambda: torch.arange(100), 800),
        (lambda: torch.linspace(0, 1, 50), 200),
        (lambda: torch.ones(10, 1) * torch.ones(1, 10), 40 + 40 + 400),
        (lambda: torch.zeros(1).expand(500).clone(), 4 + 2000),
        (lambda: torch.zeros(4).repeat(25), 16 + 400),
    ],
)
def test_what_is_made_is_measured_before(made: Callable[[], Any], ends: int) -> None:
    with Bounded(10**6, 100) as mode:
        made()
    assert mode._made == ends
    with pytest.raises(TooLargeError), Bounded(ends - 1, 100):
        made()
    with pytest.raises(TooLargeError, match="operations"), Bounded(10**6, 0):
        made()


def test_the_bounds_fit_networks_of_timm() -> None:
    import timm

    for name in ("mobilenetv3_small_050", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"):
        with torch.random.fork_rng(devices=[]), Bounded(_guard.LEAST, 10**9) as mode:
            model = timm.create_model(name)
        state = model.state_dict()
        assert mode._made < _guard.LEAST / 4
        assert mode._ran < (_guard._OPERATIONS + _guard._EACH * len(state)) / 3


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "__class__", "forward", "conv3.learner.head", "", "conv3.", "é"]
)
def test_layers_of_strange_names(name: str, tmp_path: Path) -> None:
    change(write(tmp_path), lambda c: c["plan"]["layers"].update({name: c["plan"]["layers"].pop("conv3")}))
    assert_refused(tmp_path, "rebuilt|another architecture")


@pytest.mark.parametrize(
    "name",
    ["os:system", "builtins:eval", "subprocess:run", "timm:hf-hub:a/b", "torchvision:../x", "x", ":", "epitorch:"],
)
def test_names_that_would_run_something(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(write(tmp_path), lambda c: c.update(model=name, arguments={"command": f"touch {tmp_path}/ran"}))
    assert_refused(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["pretrained", "checkpoint_path", "weights", "pretrained_cfg"])
def test_arguments_that_would_read_a_file(key: str, tmp_path: Path) -> None:
    change(write(tmp_path), lambda c: c["arguments"].update({key: "/etc/passwd"}))
    assert load_checkpoint(tmp_path)  # left out: digits_cnn takes none of them


# ---- the tensors ----


def edit_header(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    change(folder)


def test_a_header_longer_than_any(tmp_path: Path) -> None:
    path = write(tmp_path) / "model.safetensors"
    path.write_bytes(struct.pack("<Q", MAX_HEADER + 1) + b" " * (MAX_HEADER + 100))
    change(tmp_path)
    assert_refused(tmp_path, f"at most {MAX_HEADER:,}")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**9, 0, 3])
def test_a_header_of_another_length(length: int, tmp_path: Path) -> None:
    path = write(tmp_path) / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    change(tmp_path)
    assert_refused(tmp_path, "damaged")


@pytest.mark.parametrize("content", [b"", b"1234567", b"\x80\x04.", b"PK\x03\x04" + b"\0" * 100])
def test_other_files_under_the_name(content: bytes, tmp_path: Path) -> None:
    (write(tmp_path) / "model.safetensors").write_bytes(content)
    assert_refused(tmp_path, "damaged")
    if content:
        change(tmp_path)
        assert_refused(tmp_path, "damaged")


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "missing": (lambda h: h.pop("conv1.weight"), "damaged"),
    "renamed": (lambda h: h.update(other=h.pop("conv1.weight")), "missing: conv1.weight; unexpected: other"),
    "shape": (lambda h: h["conv1.weight"].update(shape=[36]), r"other shape: conv1.weight \(36,\)"),
    "overflow": (lambda h: h["conv1.weight"].update(shape=[2**62, 2**62]), "damaged"),
    "offsets": (lambda h: h["conv1.weight"].update(data_offsets=[0, 2**63]), "damaged"),
    "overlap": (lambda h: h["conv1.weight"].update(data_offsets=h["conv3.epitome"]["data_offsets"]), "damaged"),
    "dtype": (lambda h: h["conv1.weight"].update(dtype="I32"), "other dtype: conv1.weight in torch.int32"),
    "narrow": (lambda h: h["conv1.weight"].update(dtype="F16", shape=[4, 1, 3, 6]), "other shape"),
    "unknown dtype": (lambda h: h["conv1.weight"].update(dtype="Q7"), "damaged"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_that_lie(kind: str, tmp_path: Path) -> None:
    edit_header(write(tmp_path), HEADERS[kind][0])
    assert_refused(tmp_path, HEADERS[kind][1])


def stored_as(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    change(folder)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.update({"conv3.epitome.scale": t["conv3.epitome.scale"][:1].clone()}), "a float32 scale for each"),
        (lambda t: t.pop("conv3.epitome.scale"), "no scales"),
        (lambda t: t.update({"conv3.epitome.scale": t["conv3.epitome.scale"].double()}), "a float32 scale for each"),
        (lambda t: t["conv3.epitome.scale"].fill_(float("nan")), "not finite"),
        (lambda t: t["conv3.epitome.scale"].fill_(-1), "negative"),
        (lambda t: t.update({"conv3.epitome": t["conv3.epitome"].float()}), "in int8"),
        (lambda t: t.update({"conv3.epitome": t["conv3.epitome"][:1].clone()}), "an epitome"),
        (lambda t: t.update({"conv1.weight": t["conv1.weight"].double()}), "other dtype: conv1.weight"),
        (lambda t: t.update({"norm1.num_batches_tracked": torch.zeros(())}), "dtype|unexpected"),
        (lambda t: t.update({"conv3.routing_map.frozen": torch.zeros((), dtype=torch.bool)}), "missing: conv3.learner"),
        (lambda t: t["conv3.routing_map.out_starts"].fill_(float("inf")), "not a finite number"),
        (lambda t: t.update({"conv3.routing_map.frozen": torch.ones(2, dtype=torch.bool)}), "missing|other shape"),
    ],
)
def test_tensors_that_are_not_what_was_stored(
    edit: Callable[[dict[str, torch.Tensor]], object], words: str, tmp_path: Path
) -> None:
    stored_as(write(tmp_path, "int8"), edit)
    assert_refused(tmp_path, words)


@pytest.mark.parametrize(
    "edit",
    [
        lambda w: w.update(shared={"conv1.weight": "conv2.weight"}),
        lambda w: w.update(shared={"x": "nothing"}),
        lambda w: w.update(shared={"a": "b", "b": "a"}),
        lambda w: w.update(shared={"x": "conv1.weight"}),
        lambda w: w.update(others={"conv1.weight": "int64"}),
        lambda w: w.update(dtype="float16"),
        lambda w: w.update(dtype="no dtype"),
        lambda w: w.update(epitomes="int4"),
        lambda w: w.update(epitomes="float16"),
        lambda w: w.update(bytes=10**15),
        lambda w: w.update(sha256="0" * 64),
        lambda w: w.update(sha256=3),
        lambda w: w.clear(),
    ],
)
def test_statements_about_the_file_that_are_wrong(edit: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    change(write(tmp_path), lambda c: edit(c["weights"]))
    assert_refused(tmp_path)


def test_folders_and_pipes_in_place_of_files(tmp_path: Path) -> None:
    import os

    for name in ("config.json", "model.safetensors"):
        folder = write(tmp_path / name.replace(".", "-"))
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert_refused(folder, "is missing")
        (folder / name).unlink()
        (folder / name).mkdir()
        assert_refused(folder, "is missing")


def test_a_sound_checkpoint_passes_through_the_same_hands(tmp_path: Path) -> None:
    for dtype in (None, "int8"):
        change(write(tmp_path, dtype))
        assert load_checkpoint(tmp_path)
        stored_as(tmp_path, lambda tensors: None)
        edit_header(tmp_path, lambda header: None)
        assert isinstance(load_checkpoint(tmp_path).model, nn.Module)


# ---- older files ----


def test_files_of_the_format_before_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save

    from epitorch.checkpoint._tensors import tensors_hash

    write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    metadata = {"format": "pt", "sha256": tensors_hash(tensors, {"format": "pt"})}
    (tmp_path / "model.safetensors").write_bytes(save(tensors, metadata=metadata))
    change(tmp_path, lambda c: (c.update(format=[1, 1]), c.pop("weights"), c.pop("cost")))
    assert load_checkpoint(tmp_path)
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    assert_refused(tmp_path, "the file's own hash")


# ---- by chance ----


def fuzzer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_checkpoint", ROOT / "benchmarks" / "fuzz_checkpoint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "benchmarks"))
    return module


def test_a_few_hundred_spoiled_checkpoints() -> None:
    found = fuzzer().fuzz(300, seed=20)
    assert found.failures == []
    assert found.inputs == 300
    assert len(found.outcomes) >= 4
    assert found.outcomes["is damaged"] < 300


def test_the_fuzzer_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fuzzer()

    def careless(folder: Path) -> Any:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))["model"].upper()
        (Path("/etc") / "hostname").open().close()
        return load_checkpoint(folder)

    monkeypatch.setattr(module, "load_checkpoint", careless)
    found = module.fuzz(40, seed=1)
    wrong = " ".join(failure["wrong"] for failure in found.failures)
    assert "Error" in wrong
    assert "did open /etc/hostname" in wrong


def test_what_the_fuzzer_starts_from_is_sound(tmp_path: Path) -> None:
    module = fuzzer()
    for seed in module.seeds(tmp_path):
        (tmp_path / "config.json").write_bytes(seed.config)
        (tmp_path / "model.safetensors").write_bytes(seed.weights)
        assert load_checkpoint(tmp_path)
    assert save_checkpoint is sys.modules["checkpoint_mutations"].save_checkpoint  # type: ignore[attr-defined]
