"""ResNets for 32x32 images: ordinary 3x3 convolutions, where MobileNetV2 has 1x1 ones."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from epitorch.errors import InputError, explain


def resnet20(num_classes: int = 10, *, width: int = 16, stem_stride: int = 1) -> nn.Module:
    """Return the ResNet-20 of He et al. (2016, section 4.2) for CIFAR-10.

    Three stages of three blocks of two 3x3 convolutions, with `width`, `2 width` and `4 width` channels; shortcuts
    without parameters: every second pixel, and zeros for the new channels. 269,722 parameters at width 16. Narrowing
    is a smaller width: 8 has a quarter of the parameters.

    Args:
        num_classes: Number of classes.
        width: Channels of the first stage.
        stem_stride: Stride of the first convolution; 2 quarters the multiply-adds.

    Returns:
        The network, for images of shape (N, 3, H, W).

    Raises:
        InputError: If a size is not a whole number above 0.
    """
    if not all(type(size) is int and size > 0 for size in (num_classes, width, stem_stride)):
        raise InputError(
            explain(
                "this network cannot be built",
                expected="num_classes, width and stem_stride, whole numbers above 0",
                got=f"num_classes={num_classes!r}, width={width!r}, stem_stride={stem_stride!r}",
                where="resnet20",
            )
        )
    net = _ResNet(3, num_classes, width, stem_stride)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


class _ResNet(nn.Module):
    """Stem, three stages, mean over the image, classifier."""

    def __init__(self, depth: int, num_classes: int, width: int, stem_stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, stem_stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(depth, width, width, stride=1)
        self.layer2 = _stage(depth, width, 2 * width, stride=2)
        self.layer3 = _stage(depth, 2 * width, 4 * width, stride=2)
        self.fc = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


def _stage(depth: int, before: int, after: int, stride: int) -> nn.Sequential:
    blocks = [_Block(before, after, stride)]
    blocks += [_Block(after, after, 1) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.stride, self.new_channels = stride, after - before

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1 and not self.new_channels:
            return x
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))
