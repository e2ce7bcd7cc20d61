"""The optional dependencies: what belongs to which extra, and how it is imported."""

from __future__ import annotations

EXTRAS: dict[str, dict[str, str]] = {
    "models": {"torchvision": "torchvision", "timm": "timm"},
    "train": {
        "pytorch-lightning": "pytorch_lightning",
        "tensorboard": "tensorboard",
        "rich": "rich",
        "pyyaml": "yaml",
        "pyarrow": "pyarrow",
        "pillow": "PIL",
        "safetensors": "safetensors",
        "psutil": "psutil",
        "filelock": "filelock",
        "numpy": "numpy",
        "shtab": "shtab",
    },
    "audio": {"soundfile": "soundfile", "soxr": "soxr"},
    "streaming": {"webdataset": "webdataset"},
    "demo": {"scikit-learn": "sklearn"},
    "onnx": {"onnx": "onnx", "onnxscript": "onnxscript", "onnxruntime": "onnxruntime"},
    "openvino": {"openvino": "openvino"},
    "int8": {"nncf": "nncf"},
    "sweep": {"ray": "ray", "matplotlib": "matplotlib"},
    "report": {"plotly": "plotly", "matplotlib": "matplotlib"},
    "hub": {"huggingface-hub": "huggingface_hub", "safetensors": "safetensors"},
    "loggers": {"wandb": "wandb", "mlflow-skinny": "mlflow", "comet-ml": "comet_ml"},
}
"""Extra to the distributions that it adds, each with the name that is imported; in the order in which they build up."""


def extra_of(module: str) -> str | None:
    """Return the extra that brings a top-level module; None if none does."""
    return next((extra for extra, packages in EXTRAS.items() if module in packages.values()), None)
