"""save_pretrained and from_pretrained: where models come from, how epitomes are stored, how long the file is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import epitorch
from epitorch.checkpoint import ModelInput, load_checkpoint
from epitorch.checkpoint._tensors import SCALE
from epitorch.errors import CheckpointError, InputError
from epitorch.models.resolve import build_model

IMAGE = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8}


def digits(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = build_model("epitorch:digits_cnn", {"widths": [4, 4, 8]})
    epitorch.convert_(model, epitorch.Plan({"conv3": epitorch.LayerPlan((4, 2, 3, 3), **options)}))
    model.train()(IMAGE)
    return model.eval()


def same(first: nn.Module, second: nn.Module, *x: torch.Tensor) -> None:
    torch.testing.assert_close(first(*x), second(*x), rtol=0, atol=0)


# ---- where the model comes from ----


def test_model_and_folder_are_enough(tmp_path: Path) -> None:
    model = digits()
    epitorch.save_pretrained(model, tmp_path)
    loaded: Any = epitorch.from_pretrained(tmp_path)
    same(loaded, model, IMAGE)
    assert not loaded.training
    assert loaded.conv3.learner is None
    assert loaded.conv3.routing_map.is_frozen
    again = epitorch.from_pretrained(epitorch.save_pretrained(loaded, tmp_path / "again"))
    same(again, model, IMAGE)
    with torch.no_grad():
        loaded.conv3.epitome.add_(0.1)
    assert not torch.equal(loaded(IMAGE), again(IMAGE))


@pytest.mark.parametrize("index", ["learner", "direct"])
def test_the_learner_is_kept_when_asked_for(index: Any, tmp_path: Path) -> None:
    model: Any = digits(index=index)
    loaded: Any = epitorch.from_pretrained(epitorch.save_pretrained(model, tmp_path, learner=True))
    assert list(loaded.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert not loaded.conv3.routing_map.is_frozen
    assert (loaded.conv3.learner is not None) == (index == "learner")


def test_saving_changes_nothing(tmp_path: Path) -> None:
    model: Any = digits().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    epitorch.save_pretrained(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert model.training
    assert not model.conv3.routing_map.is_frozen


def test_a_timm_model_is_known_by_itself(tmp_path: Path) -> None:
    import timm

    model = timm.create_model("resnet10t", num_classes=7)
    x = torch.randn(1, 3, 64, 64)
    epitorch.convert_(model, epitorch.plan(model, x, ratio=3.0))
    epitorch.save_pretrained(model.eval(), tmp_path)
    same(epitorch.from_pretrained(tmp_path), model, x)
    config = load_checkpoint(tmp_path).config
    assert (config.model, config.arguments) == ("timm:resnet10t", {"num_classes": 7})
    assert config.input == ModelInput((3, 176, 176), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), ())


def test_a_torchvision_model_is_named(tmp_path: Path) -> None:
    from torchvision.models import squeezenet1_1

    model = squeezenet1_1(num_classes=3).eval()
    with pytest.raises(CheckpointError, match="does not build this model"):
        epitorch.save_pretrained(model, tmp_path, backbone="torchvision:squeezenet1_1")
    assert not list(tmp_path.iterdir())
    options = {"backbone": "torchvision:squeezenet1_1", "arguments": {"num_classes": 3}}
    epitorch.save_pretrained(model, tmp_path, **options)  # type: ignore[arg-type]
    same(epitorch.from_pretrained(tmp_path), model, torch.randn(1, 3, 64, 64))


def test_no_weights_of_a_backbone_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    def fetching(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", fetching)
    model = lraspp_mobilenet_v3_large(weights_backbone=None).eval()
    epitorch.save_pretrained(model, tmp_path, backbone="torchvision:lraspp_mobilenet_v3_large")
    assert epitorch.from_pretrained(tmp_path).state_dict().keys() == model.state_dict().keys()


class Own(nn.Module):
    """A network of the user's own, with an epitome layer, two names for one weight and two for one module."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.again = nn.Linear(width, width, bias=False)
        self.again.weight = self.embed.weight
        self.mix: nn.Module = epitorch.nn.EpitomeLinear(width, 16, epitome_shape=(8, 4), index="direct")
        self.twice = self.mix
        self.register_buffer("table", torch.arange(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(self.again(self.embed(x))) + self.table.sum()  # type: ignore[operator]


def test_a_factory_of_the_user_s(tmp_path: Path) -> None:
    model, x = Own(6).eval(), torch.randn(2, 6)
    epitorch.save_pretrained(model, tmp_path)
    assert "factory=..." in (tmp_path / "README.md").read_text()
    with pytest.raises(CheckpointError, match=r"(?s)does not say how 'Own' is built.*backbone='torchvision:NAME'"):
        epitorch.from_pretrained(tmp_path)
    loaded: Any = epitorch.from_pretrained(tmp_path, factory=lambda: Own(6))
    same(loaded, model, x)
    assert loaded.again.weight is loaded.embed.weight
    assert loaded.twice is loaded.mix
    stored = json.loads((tmp_path / "config.json").read_text())["weights"]["shared"]
    assert stored["again.weight"] == "embed.weight"
    assert stored["twice.epitome"] == "mix.epitome"
    with pytest.raises(CheckpointError, match="other shape"):
        epitorch.from_pretrained(tmp_path, factory=Own)
    with pytest.raises(CheckpointError, match="did not return a model"):
        epitorch.from_pretrained(tmp_path, factory=dict)
    same(epitorch.from_pretrained(epitorch.save_pretrained(loaded, tmp_path), factory=lambda: Own(6)), model, x)


def test_a_factory_gets_the_arguments(tmp_path: Path) -> None:
    name = f"{Own.__module__}:Own"
    epitorch.save_pretrained(Own(6), tmp_path, backbone=name, arguments={"width": 6})
    assert isinstance(epitorch.from_pretrained(tmp_path, factory=Own), Own)
    with pytest.raises(CheckpointError, match="a factory of another package, which loading would run"):
        epitorch.from_pretrained(tmp_path)


def test_a_name_in_a_file_is_never_imported_by_saving_again(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('the file ran')")
    epitorch.save_pretrained(Own(6), tmp_path / "c", backbone=f"{Own.__module__}:Own", arguments={"width": 6})
    rewrite(tmp_path / "c", model="evil:Own")
    code = (
        f"import sys, epitorch; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_pretrained import Own\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"model = epitorch.from_pretrained({str(tmp_path / 'c')!r}, factory=Own)\n"
        f"epitorch.save_pretrained(model, {str(tmp_path / 'd')!r}); print('evil' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def rewrite(folder: Path, **changes: Any) -> None:
    from epitorch.checkpoint._config import content_hash

    content = json.loads((folder / "config.json").read_text())
    del content["sha256"]
    content.update(changes)
    (folder / "config.json").write_text(json.dumps({**content, "sha256": content_hash(content)}))


@pytest.mark.parametrize("name", ["", "  "])
def test_no_name_is_not_the_working_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epitorch.save_pretrained(build_model("epitorch:digits_cnn"), tmp_path)
    monkeypatch.chdir(tmp_path)
    for load in (epitorch.from_pretrained, load_checkpoint):
        with pytest.raises(CheckpointError, match="has no name"):
            load(name)
    assert epitorch.from_pretrained(".") is not None


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="arguments without a backbone"):
        epitorch.save_pretrained(digits(), tmp_path, arguments={"widths": [4]})
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        epitorch.save_pretrained(digits(), tmp_path, metrics={"accuracy": float("nan")})
    with pytest.raises(CheckpointError, match="has no model"):
        epitorch.save_pretrained(digits(), tmp_path, backbone="timm:no_such_model")
    with pytest.raises(InputError, match="this is no model"):
        epitorch.save_pretrained({}, tmp_path)  # type: ignore[arg-type]
    net = epitorch.deploy(digits(), IMAGE, strategy="dense")
    with pytest.raises(CheckpointError, match="a deployed network is not a checkpoint"):
        epitorch.save_pretrained(net, tmp_path)

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"x": 1}

        def set_extra_state(self, state: Any) -> None:
            return

    with pytest.raises(CheckpointError, match="not only tensors"):
        epitorch.save_pretrained(Extra(2, 2), tmp_path)
    assert not list(tmp_path.iterdir())


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    epitorch.save_pretrained(digits(), tmp_path)
    epitorch.save_pretrained(digits(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 4


def test_the_card_says_cost_and_results(tmp_path: Path) -> None:
    model, known = digits(), ModelInput((1, 8, 8), (0.5,), (0.25,), ("null", "ei|ns\n<b>"))
    epitorch.save_pretrained(model, tmp_path, example_input=IMAGE, input=known, metrics={"test_accuracy": 0.91})
    text, cost = (tmp_path / "README.md").read_text(), epitorch.count(model, IMAGE)
    assert text.startswith("---\nlibrary_name: epitorch\n")
    assert f"| parameters | {cost.params:,} |" in text
    assert f"| multiply-adds per sample, executed | {cost.madds:,} |" in text
    assert "| test_accuracy | 0.91 |" in text
    assert "null, einsb" in text
    config = load_checkpoint(tmp_path).config
    assert config.input == known
    assert config.cost is not None
    assert config.cost["madds"] == cost.madds
    assert config.metrics == {"test_accuracy": 0.91}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_dtypes_stay_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    model = digits().to(dtype)
    loaded = epitorch.from_pretrained(epitorch.save_pretrained(model, tmp_path))
    wanted = model.state_dict()
    assert all(value.dtype == wanted[name].dtype for name, value in loaded.state_dict().items())
    assert all(torch.equal(value, wanted[name]) for name, value in loaded.state_dict().items() if "frozen" not in name)
    with pytest.raises(InputError, match="float32 only"):
        epitorch.save_pretrained(model, tmp_path, dtype="int8")


# ---- how epitomes are stored ----


LAYERS = {
    "conv": lambda: epitorch.nn.EpitomeConv2d(6, 8, 3, epitome_shape=(4, 3, 3, 3)),
    "grouped": lambda: epitorch.nn.EpitomeConv2d(8, 8, 3, groups=4, epitome_shape=(4, 1, 3, 3)),
    "transposed": lambda: epitorch.nn.EpitomeConvTranspose2d(6, 8, 3, epitome_shape=(3, 4, 3, 3)),
    "flat": lambda: epitorch.nn.EpitomeConv2d(6, 8, 3, epitome_shape=(4, 9), flatten_kernel=True),
    "flat transposed": lambda: epitorch.nn.EpitomeConvTranspose2d(6, 8, 3, epitome_shape=(9, 4), flatten_kernel=True),
    "linear": lambda: epitorch.nn.EpitomeLinear(6, 8, epitome_shape=(4, 3)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_epitomes_are_rounded_and_nothing_else(kind: str, dtype: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), LAYERS[kind]()).eval()
    layer: Any = model[1]
    epitorch.save_pretrained(model, tmp_path, dtype=dtype)
    loaded: Any = epitorch.from_pretrained(tmp_path, factory=lambda: nn.Sequential(nn.Identity(), LAYERS[kind]()))
    got, own = loaded[1].epitome.detach(), layer.epitome.detach()
    assert got.dtype == torch.float32
    assert not torch.equal(got, own)
    if dtype == "int8":  # a reference with a loop over the channels
        if "transposed" in kind:  # its output channels come second
            got, own = got.transpose(0, 1), own.transpose(0, 1)
        assert own.shape[0] == layer.spec.epitome_shape[0]
        for channel in range(own.shape[0]):
            step = float(own[channel].abs().max()) / 127
            wanted = torch.tensor([round(float(v) / step) * step for v in own[channel].reshape(-1)])
            torch.testing.assert_close(got[channel].reshape(-1), wanted, rtol=1e-5, atol=1e-7)
    else:
        assert torch.equal(got, own.to(getattr(torch, dtype)).float())
    rest = {name: value for name, value in model.state_dict().items() if "learner" not in name and "frozen" not in name}
    for name, value in rest.items():
        if name != "1.epitome":
            assert torch.equal(loaded.state_dict()[name], value)


def test_int8_of_zeros_and_of_what_is_not_finite(tmp_path: Path) -> None:
    model: Any = digits()
    with torch.no_grad():
        model.conv3.epitome.zero_()
    loaded: Any = epitorch.from_pretrained(epitorch.save_pretrained(model, tmp_path, dtype="int8"))
    assert torch.equal(loaded.conv3.epitome, model.conv3.epitome)
    with torch.no_grad():
        model.conv3.epitome[0, 0, 0, 0] = float("inf")
    with pytest.raises(InputError, match="finite"):
        epitorch.save_pretrained(model, tmp_path, dtype="int8")


def test_storage_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such storage"):
        epitorch.save_pretrained(digits(), tmp_path, dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="nothing to store as int8"):
        epitorch.save_pretrained(build_model("epitorch:digits_cnn"), tmp_path, dtype="int8")


# ---- the length of the file ----


def networks() -> dict[str, Any]:
    import timm

    def timm_model(name: str, **options: Any) -> nn.Module:
        model = timm.create_model(name, num_classes=10)
        epitorch.convert_(model, epitorch.plan(model, torch.zeros(1, 3, 64, 64), **options))
        return model

    def mobilenet() -> nn.Module:
        model = timm.create_model("mobilenetv2_100", num_classes=10)
        epitorch.convert_(model, epitorch.mobilenetv2_plan(model, 0.18, last_conv=True))
        return model

    return {
        "mobilenetv2 0.18": mobilenet,
        "resnet18 grid": lambda: timm_model("resnet18", ratio=4.0),
        "resnet18 separable": lambda: timm_model("resnet18", ratio=2.0, form="separable", index="direct"),
        "efficientnet_b0 dense": lambda: timm.create_model("efficientnet_b0", num_classes=10),
        "convnext_atto": lambda: timm_model("convnext_atto", ratio=2.0),
    }


@pytest.mark.parametrize("name", networks())
def test_the_file_is_as_long_as_the_cost_says(name: str, tmp_path: Path) -> None:
    model = networks()[name]().eval()
    cost = epitorch.count(model, torch.zeros(1, 3, 64, 64))
    narrower = ["float16", "int8"] if cost.params_epitome else []
    for dtype in ["float32", *narrower]:
        epitorch.save_pretrained(model, tmp_path, dtype=dtype)  # type: ignore[arg-type]
        said, size = cost.stored_bytes(BITS[dtype]), (tmp_path / "model.safetensors").stat().st_size
        assert abs(size - said) <= 0.02 * said + 64 * 1024, dtype
    assert said < cost.stored_bytes() or not narrower
    assert 4 * cost.params <= cost.stored_bytes() <= 4.5 * cost.params
    if narrower:  # the comparison can fail: with the learner it does not hold, or the file is that of other storage
        assert abs(size - cost.stored_bytes()) > 0.02 * said + 64 * 1024


def test_scales_are_named_after_their_epitome(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    stored = load_file(epitorch.save_pretrained(digits(), tmp_path, dtype="int8") / "model.safetensors")
    assert stored["conv3.epitome"].dtype == torch.int8
    assert stored["conv3.epitome" + SCALE].shape == (4,)
    assert not any("learner" in name for name in stored)
    assert stored["conv1.weight"].dtype == torch.float32


# ---- what tensors do not tell ----


class Squashed(type(build_model("epitorch:digits_cnn"))):  # type: ignore[misc]
    """The same tensors, another function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).softmax(1)


def become_squashed(model: nn.Module) -> None:
    model.__class__ = Squashed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: setattr(model, "relu1", nn.Tanh()), r"relu1 is .*Tanh.*, rebuilt it is .*ReLU"),
        (lambda model: setattr(model.norm2, "eps", 0.5), r"norm2 is .*eps=0.5"),
        (lambda model: setattr(model.conv2, "stride", (1, 1)), r"conv2 is "),
        (lambda model: setattr(model.conv1, "forward", lambda x: x), r"conv1 is .*forward replaced"),
        (become_squashed, r"the model itself is .*Squashed"),
    ],
)
def test_a_model_that_computes_something_else_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    model = digits()
    epitorch.save_pretrained(model, tmp_path / "before")
    change(model)
    with pytest.raises(CheckpointError, match=rf"(?s)does not build this model.*{words}"):
        epitorch.save_pretrained(model, tmp_path / "after")
    assert not (tmp_path / "after").exists()


def test_settings_of_timm_are_seen_and_dropout_is_not(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_classes": 3, "bn_eps": 0.1, "global_pool": "max", "drop_rate": 0.2}
    model = timm.create_model("mobilenetv2_050", **options).eval()
    with pytest.raises(CheckpointError, match="does not build this model"):
        epitorch.save_pretrained(model, tmp_path)
    epitorch.save_pretrained(model, tmp_path, backbone="timm:mobilenetv2_050", arguments=options)
    x = torch.randn(1, 3, 32, 32)
    same(epitorch.from_pretrained(tmp_path), model, x)
    other = timm.create_model("mobilenetv2_050", num_classes=3, drop_rate=0.2, drop_path_rate=0.1).eval()
    same(epitorch.from_pretrained(epitorch.save_pretrained(other, tmp_path / "other")), other, x)


def test_epitomes_too_large_for_half_precision(tmp_path: Path) -> None:
    model: Any = digits()
    with torch.no_grad():
        model.conv3.epitome[0, 0] = 7e4
    with pytest.raises(InputError, match=r"(?s)conv3.epitome.*too large for float16.*6.55e\+04.*7e\+04"):
        epitorch.save_pretrained(model, tmp_path / "half", dtype="float16")
    assert not (tmp_path / "half").exists()
    loaded: Any = epitorch.from_pretrained(epitorch.save_pretrained(model, tmp_path / "wide", dtype="bfloat16"))
    assert loaded.conv3.epitome.isfinite().all()


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors"])
def test_files_of_something_else_are_not_replaced(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match=rf"(?s)would replace other files.*{name}"):
        epitorch.save_pretrained(digits(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "{}"
    with pytest.raises(InputError, match="a file"):
        epitorch.save_pretrained(digits(), tmp_path / name / "below")
