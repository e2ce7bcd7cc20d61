"""What the paper prints (Neural Epitome Search, ICLR 2020), digit by digit. Nothing here is ours.

Parameters in millions and multiply-adds in millions stay strings where the number of digits matters.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Printed:
    """One row of a table.

    Args:
        row: The paper's name of the method.
        params: Millions.
        madds: Millions; "" where the table has none.
        top1: Accuracy in percent.
        rate: "Param Compression Rate"; "" where the table has none.
    """

    row: str
    params: str
    madds: str
    top1: str
    rate: str = ""


IMAGENET_DENSE = Printed("MobilenetV2-1.0", "3.4", "301", "71.8", "1.00")  # table "Ablation"
IMAGENET_NARROW = {
    0.75: Printed("MobilenetV2-0.75*", "2.94", "217", "69.14", "1.17"),
    0.5: Printed("MobilenetV2-0.5*", "2.52", "153", "67.22", "1.36"),
    0.35: Printed("MobilenetV2-0.35*", "2.26", "115", "65.18", "1.54"),
    0.18: Printed("MobilenetV2-0.18*", "1.98", "71", "60.70", "1.80"),
}
IMAGENET_EPITOME = {
    0.75: Printed("Our method-0.75", "2.94", "220", "71.54", "1.17"),
    0.5: Printed("Our method-0.5", "2.52", "157", "69.42", "1.36"),
    0.35: Printed("Our method-0.35", "2.26", "120", "67.01", "1.54"),
    0.18: Printed("Our method-0.18", "1.95", "79", "64.48", "1.80"),
}

# table "ImageNet-cross comparison": networks with MobileNetV2's own width multiplier, cited by the paper
WIDTH_MULTIPLIER = {
    0.75: Printed("MobilenetV2-0.75 (cited)", "2.6", "209", "69.8"),
    0.5: Printed("MobilenetV2-0.5 (cited)", "2.0", "97", "65.4"),
    0.35: Printed("MobilenetV2-0.35 (cited)", "1.7", "59", "60.3"),
}
LARGER_UPPER_LAYERS = Printed("Our method-0.75-A", "3.7", "225", "73.27")
EFFICIENTNET = {
    "b0": Printed("Our method-0.5 (EfficientNet-b0)", "3.92", "240", "75.55"),
    "b1": Printed("Our method-0.5 (EfficientNet-b1)", "5.46", "350", "77.5"),
}

CIFAR_DENSE = Printed("MobilenetV2-1", "2.2", "93.52", "94.06")  # table "CIFAR10"
CIFAR_NARROW = Printed("MobilenetV2-0.18*", "0.4", "21.59", "91.70")
CIFAR_EPITOME = Printed("Our method", "0.39", "26.8", "93.22")
AUTO_SLIM = (Printed("Auto-Slim", "0.7", "59", "93.00"), Printed("Auto-Slim", "0.3", "28", "92.00"))
CLASSIFIER_NARROW = Printed("MobileNetV2-0.5 FC*", "0.4", "", "91.8", "5.55")  # table "CIFAR10 FC Compress"
CLASSIFIER_EPITOME = Printed("Our method-0.5 FC", "0.39", "", "92.96", "5.64")

ESC_WSNET, ESC_OURS = "66.5", "73.0"  # table "ESC-50", accuracy at the same size

CLAIMED_OVER_B0_POINTS, CLAIMED_OVER_B0_MADDS = "1.2", "40"  # text: "1.2% with 40M less MAdd"; b0 has no row of its own
