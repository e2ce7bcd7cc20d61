"""The methods that are compared, by name."""

from __future__ import annotations

from benchmarks.peers.methods import epitomes, int8, kmeans, low_rank, pruning, width
from benchmarks.peers.methods.base import Changes, Method, Task, code_lines, user_lines

__all__ = ["METHODS", "Changes", "Method", "Task", "code_lines", "user_lines"]

_COSTS = ("params", "madds")
_PRUNING = ("torch-pruning",)
_LOW_RANK = ("tensorly-torch", "tensorly")
_ONNX = ("onnxruntime", "onnx")


def _unchanged(task: Task) -> Changes:
    return {}


_ALL = (
    Method("dense", "dense", ("own",), changes=_unchanged),
    # what the methods of "half" begin from; no row of its own
    Method("start", "dense, first part of the epochs", ("own",), changes=_unchanged),
    Method("width", "width multiplier", _COSTS, changes=width.narrow, code=width.CODE),
    Method(
        "width-positions",
        "width multiplier, shares by positions",
        _COSTS,
        changes=width.narrow_by_positions,
        code=width.POSITIONS_CODE,
    ),
    Method("width-hidden", "width multiplier, hidden channels", _COSTS, changes=width.narrow_hidden),
    Method("wsnet", "WSNet (fixed starts)", _COSTS, changes=epitomes.wsnet, convert=epitomes.convert_wsnet),
    Method("epitome", "epitome, learned starts", _COSTS, changes=epitomes.epitome, convert=epitomes.convert_epitome),
    Method(
        "epitome-positions",
        "epitome, shares by positions",
        _COSTS,
        changes=epitomes.by_positions,
        convert=epitomes.convert_by_positions,
    ),
    Method("epitome-fixed", "epitome, fixed starts", _COSTS, changes=epitomes.fixed),
    Method("epitome-partial", "epitome, partial products", _COSTS, changes=epitomes.partial),
    Method("epitome-warm", "epitome, warm start", _COSTS, "half", changes=epitomes.warm),
    Method("epitome-distil", "epitome, distilled", _COSTS, "half", changes=epitomes.distilled),
    Method("epitome-warm-distil", "epitome, warm start, distilled", _COSTS, "half", changes=epitomes.warm_distilled),
    Method(
        "torch-pruning",
        "Torch-Pruning, group magnitude",
        _COSTS,
        "half",
        prepare=pruning.prune,
        needs=_PRUNING,
        code=(pruning.prune, pruning.iterate, pruning.last_layer),
    ),
    Method(
        "torch-pruning-hidden",
        "Torch-Pruning, channels inside of blocks",
        _COSTS,
        "half",
        prepare=pruning.prune_hidden,
        needs=_PRUNING,
        code=(pruning.prune_hidden, pruning.iterate, pruning.last_layer),
    ),
    Method(
        "tucker",
        "tensorly-torch Tucker, SVD of 1x1",
        _COSTS,
        "half",
        prepare=low_rank.tucker,
        needs=_LOW_RANK,
        code=(low_rank.tucker, *low_rank.TUCKER_CODE),
    ),
    Method(
        "tucker-positions",
        "tensorly-torch Tucker, ranks by positions",
        ("params",),
        "half",
        prepare=low_rank.tucker_by_positions,
        needs=_LOW_RANK,
        code=low_rank.POSITIONS_CODE,
    ),
    Method(
        "cp",
        "tensorly-torch CP, SVD of 1x1",
        _COSTS,
        "half",
        prepare=low_rank.cp,
        needs=_LOW_RANK,
        code=(low_rank.cp, *low_rank.CP_CODE),
    ),
    Method(
        "kmeans",
        "k-means weight sharing",
        ("bytes",),
        "dense",
        finish=kmeans.share_weights,
        needs=("scikit-learn",),
        code=kmeans.CODE,
        timed_as="dense",
    ),
    Method("int8", "int8 (ONNX Runtime)", ("own",), "dense", finish=int8.quantize, needs=_ONNX, code=int8.CODE),
    Method(
        "width-int8",
        "width multiplier + int8",
        _COSTS,
        "width",
        finish=int8.quantize,
        needs=_ONNX,
        code=(*width.CODE, *int8.CODE),
    ),
    Method(
        "epitome-int8",
        "epitome + int8 (file)",
        _COSTS,
        "epitome",
        finish=epitomes.store_int8,
        code=epitomes.INT8_CODE,
        timed_as="epitome",
    ),
    Method(
        "epitome-positions-int8",
        "epitome, shares by positions + int8 (file)",
        _COSTS,
        "epitome-positions",
        finish=epitomes.store_int8,
        code=epitomes.INT8_CODE,
        timed_as="epitome-positions",
    ),
)
METHODS = {method.name: method for method in _ALL}
