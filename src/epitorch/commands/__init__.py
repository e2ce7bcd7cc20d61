"""What the command line does with a model's name, as functions."""

from epitorch.commands._int8 import calibration_images, export_int8_named
from epitorch.commands._models import convert_named, count_named, plan_named
from epitorch.commands._runtimes import bench_named, deploy_named, export_named, images_to_check

__all__ = [
    "bench_named",
    "calibration_images",
    "convert_named",
    "count_named",
    "deploy_named",
    "export_int8_named",
    "export_named",
    "images_to_check",
    "plan_named",
]
