"""What only a CUDA device shows: fp16 with a scaler, the inductor compiler, agreement with the CPU.

The training in mixed precision runs on the CPU too, so that it is known to learn there.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import epitorch
from epitorch.nn import EpitomeConv2d, EpitomeLayer

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        EpitomeConv2d(3, 32, 3, padding=1, epitome_shape=(8, 3, 3, 3)),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        EpitomeConv2d(32, 64, 1, epitome_shape=(16, 16, 1, 1)),
        nn.ReLU(),
        EpitomeConv2d(64, 10, 3, epitome_shape=(10, 16, 5, 5), spatial_starts="grid", channel_starts="grid"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(64) % 3
    images = torch.randn(64, 3, 12, 12, generator=generator) * 0.3
    images[torch.arange(64), labels] += 1.0  # the class is the brightest channel
    return images, labels


@needs_cuda
def test_weights_and_outputs_equal_the_cpus() -> None:
    cpu = network().eval().double()
    cuda = copy.deepcopy(cpu).cuda()
    images, _ = batch()
    torch.testing.assert_close(cuda(images.cuda().double()).cpu(), cpu(images.double()), atol=1e-12, rtol=1e-10)
    with torch.no_grad():
        next(m for m in cuda.modules() if isinstance(m, EpitomeLayer)).epitome.mul_(1.5)
    assert not torch.allclose(cuda(images.cuda().double()).cpu(), cpu(images.double()), atol=1e-3)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cuda", torch.float16, marks=needs_cuda),
        pytest.param("cuda", torch.bfloat16, marks=needs_cuda),
        ("cpu", torch.bfloat16),
    ],
)
def test_mixed_precision_training_learns_and_keeps_the_starts_in_float32(device: str, dtype: torch.dtype) -> None:
    model = network().to(device)
    images, labels = (part.to(device) for part in batch())
    optimizer = torch.optim.SGD(epitorch.param_groups(model, lr=0.05), momentum=0.9)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    for layer in model.modules():
        if isinstance(layer, EpitomeLayer):
            assert all(value.dtype is torch.float32 for value in layer.starts().values())
            assert all(value.isfinite().all() for value in layer.starts().values())


@needs_cuda
def test_a_skipped_step_of_the_scaler_is_no_step_of_the_routing_map() -> None:
    model = network().cuda()
    images, labels = (part.cuda() for part in batch())
    optimizer = torch.optim.SGD(epitorch.param_groups(model, lr=0.05))
    layer = next(m for m in model.modules() if isinstance(m, EpitomeLayer))

    def step(scale: float) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cuda", init_scale=scale)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        return {axis: value.clone() for axis, value in layer.starts().items()}

    step(1024.0)  # moves the learner away from its first output
    before = step(2.0**40)  # the gradients overflow: skipped
    torch.testing.assert_close(step(2.0**40), before)
    step(1024.0)
    after = step(1024.0)
    assert not torch.equal(after["out"], before["out"])


@needs_cuda
def test_inductor_compiles_training_without_a_graph_break() -> None:
    layer = EpitomeConv2d(16, 32, 3, padding=1, epitome_shape=(8, 8, 3, 3)).cuda().train()
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True)
    x = torch.randn(4, 16, 8, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    for _ in range(2):
        torch.testing.assert_close(compiled(x), layer(x), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(twin.starts(), layer.starts())


@needs_cuda
def test_deployed_networks_agree_on_the_device() -> None:
    model = network().cuda().eval().double()
    images = batch()[0].cuda().double()
    wanted = model(images)
    for strategy in ("dense", "reuse"):
        net = epitorch.deploy(model, images, strategy=strategy)
        torch.testing.assert_close(net(images), wanted, atol=1e-12, rtol=1e-10)
