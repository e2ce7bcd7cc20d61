"""EpitomeSpec: blocks, which starts exist, sizes and ratios, and what it refuses."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import pytest

from epitorch.errors import EpitorchError, ShapeError
from epitorch.spec import EpitomeSpec


def spec(
    weight: tuple[int, ...] = (8, 6, 3, 3), epitome: tuple[int, ...] = (3, 4, 5, 4), **options: Any
) -> EpitomeSpec:
    return EpitomeSpec.create(weight, epitome, **options)


def test_blocks_default_to_the_epitome() -> None:
    made = spec()
    assert (made.block_out, made.block_in) == (3, 4)
    assert (made.num_out_blocks, made.num_in_blocks) == (3, 2)
    assert (made.kernel, made.window) == ((3, 3), (5, 4))
    shorter = spec(block_out=2, block_in=1)
    assert (shorter.num_out_blocks, shorter.num_in_blocks) == (4, 6)


def test_papers_count_of_starts() -> None:
    """3 x R_cin + R_cout numbers in 2-D."""
    made = spec()
    assert made.start_shapes == {"out": (3,), "in": (2,), "spatial": (2, 2)}
    assert made.num_starts == 3 * made.num_in_blocks + made.num_out_blocks


@pytest.mark.parametrize(
    "options, shapes",
    [
        ({"spatial_starts": "out"}, {"out": (3,), "in": (2,), "spatial": (3, 2)}),
        ({"spatial_starts": "grid"}, {"out": (3,), "in": (2,), "spatial": (3, 2, 2)}),
        ({"channel_starts": "grid"}, {"out": (3, 2), "in": (3, 2), "spatial": (2, 2)}),
        ({"channel_starts": "grid_out"}, {"out": (3, 2), "in": (2,), "spatial": (2, 2)}),
        ({"channel_starts": "grid_in"}, {"out": (3,), "in": (3, 2), "spatial": (2, 2)}),
        (
            {"channel_starts": "grid", "spatial_starts": "grid"},
            {"out": (3, 2), "in": (3, 2), "spatial": (3, 2, 2)},
        ),
        ({"epitome": (8, 4, 3, 3)}, {"in": (2,)}),
        ({"epitome": (3, 6, 3, 3)}, {"out": (3,)}),
        ({"epitome": (8, 6, 3, 3)}, {}),
        ({"epitome": (8, 6, 3, 5)}, {"spatial": (1, 1)}),
        ({"epitome": (8, 6, 1, 1)}, {}),
        ({"epitome": (1, 6, 3, 3)}, {}),
        ({"epitome": (8, 1, 2, 3)}, {"spatial": (6, 1)}),
        ({"epitome": (9, 7, 3, 3)}, {}),
        ({"epitome": (8, 6, 3, 3), "spatial_shift": True}, {"spatial": (1, 2)}),
        ({"epitome": (8, 6, 1, 3), "spatial_shift": True}, {"spatial": (1, 1)}),
        ({"epitome": (8, 6, 3, 3), "channel_starts": "grid"}, {}),
        ({"epitome": (8, 6, 3, 3), "channel_starts": "grid", "block_out": 4}, {"in": (2, 1)}),
        ({"epitome": (4, 1, 3, 3), "channel_starts": "grid"}, {"out": (2, 6)}),
        ({"weight": (8, 6), "epitome": (3, 4)}, {"out": (3,), "in": (2,)}),
    ],
)
def test_which_starts_exist(options: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    made = spec(**options)
    assert made.start_shapes == shapes
    assert list(made.start_sizes) == list(shapes)


def test_sizes_behind_the_starts() -> None:
    assert spec().start_sizes == {"out": (3,), "in": (4,), "spatial": (5, 4)}
    assert spec(epitome=(8, 6, 3, 5)).start_sizes == {"spatial": (5,)}
    grouped = spec(epitome=(4, 2, 4, 4), group_length=2)
    assert [grouped.group(axis) for axis in ("out", "in", "spatial")] == [2, 2, 1]


def test_counts_and_ratio() -> None:
    made = spec()
    assert made.num_weight == 8 * 6 * 9
    assert made.num_epitome == 3 * 4 * 20
    assert made.num_starts == 9
    assert made.ratio == pytest.approx(432 / 249)
    assert spec(epitome=(8, 6, 5, 5)).ratio < 1  # an expansion, counted honestly


@pytest.mark.parametrize(
    "options, separable",
    [
        ({"epitome": (3, 4, 3, 3)}, True),
        ({"epitome": (8, 6, 5, 5)}, True),
        ({"epitome": (3, 6, 5, 5)}, True),
        ({"epitome": (3, 4, 5, 5)}, False),
        ({"epitome": (3, 6, 5, 5), "spatial_starts": "out"}, False),
        ({"epitome": (3, 4, 3, 3), "channel_starts": "grid"}, False),
    ],
)
def test_when_tau_separates(options: dict[str, Any], separable: bool) -> None:
    assert spec(**options).separable is separable


def test_frozen_hashable_and_picklable() -> None:
    made = spec()
    assert made == spec()
    assert hash(made) == hash(spec())
    assert made != spec(block_out=2)
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.block_out = 1  # type: ignore[misc]


def test_a_group_length_need_not_divide_an_axis_without_starts() -> None:
    assert spec(epitome=(4, 6, 3, 3), weight=(8, 5, 3, 3), group_length=4).group("out") == 4


@pytest.mark.parametrize(
    "options, words",
    [
        ({"weight": (8, 0, 3, 3)}, ("weight shape", "(8, 0, 3, 3)")),
        ({"weight": (8,), "epitome": (8,)}, ("weight shape", "at least two sizes")),
        ({"epitome": (3, -4, 3, 3)}, ("epitome shape", "(3, -4, 3, 3)")),
        ({"epitome": (3, 4, 3.0, 3)}, ("epitome shape", "3.0")),
        ({"epitome": (True, 4, 3, 3)}, ("epitome shape", "True")),
        ({"epitome": (3, 4, 3)}, ("another number of axes", "4 sizes", "3 sizes")),
        ({"block_out": 4}, ("block_out", "1 to 3", "4")),
        ({"block_in": 0}, ("block_in", "1 to 4", "0")),
        ({"block_in": True}, ("block_in", "True")),
        ({"group_length": 2}, ("group_length", "'out'", "divisor of 3", "2")),
        ({"group_length": 3}, ("group_length", "'in'", "divisor of 4", "3")),
        ({"group_length": -1}, ("group_length", "-1")),
        ({"spatial_starts": "OUT"}, ("spatial_starts", "in | out | grid", "OUT")),
        ({"channel_starts": None}, ("channel_starts", "separable | grid | grid_out | grid_in", "None")),
    ],
)
def test_refusals_say_expected_and_got(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ShapeError) as caught:
        spec(**options)
    assert isinstance(caught.value, EpitorchError)
    assert [word for word in (*words, "expected", "got") if word not in str(caught.value)] == []


def test_spec_and_errors_need_no_torch() -> None:
    """Loaded without the package's own import, they bring in the standard library only."""
    code = (
        "import sys, importlib.util, types\n"
        "root = types.ModuleType('epitorch'); root.__path__ = [sys.argv[1]]; sys.modules['epitorch'] = root\n"
        "import epitorch.spec\n"
        "raise SystemExit('torch' in sys.modules)\n"
    )
    import epitorch

    assert subprocess.run([sys.executable, "-c", code, epitorch.__path__[0]], check=False).returncode == 0
