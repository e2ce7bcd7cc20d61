"""The cost formulas against numbers worked out by hand and against their own alternatives."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epitorch.cost import diagonals, formulas
from epitorch.cost.diagonals import DiagonalLayout
from epitorch.cost.formulas import (
    STRATEGIES,
    Geometry,
    Interpolated,
    Operations,
    best,
    dense_madds,
    executed,
    interpolated_channels,
    paper_madds,
    parameters,
    why_not,
)
from epitorch.spec import EpitomeSpec

BOTH = EpitomeSpec.create((64, 32, 3, 3), (16, 8, 3, 3))  # R_out = R_in = 4
SQUARE = Geometry(in_positions=100, out_positions=25)


def test_parameters_of_the_papers_setting() -> None:
    spec = EpitomeSpec.create((64, 32, 3, 3), (16, 8, 5, 4))
    found = parameters(spec, bias=64)
    assert found.epitome == 16 * 8 * 5 * 4
    assert found.routing == 3 * 4 + 4  # 3 R_cin + R_cout
    assert (found.other, found.total) == (64, 16 * 8 * 5 * 4 + 16 + 64)


def test_starts_that_do_not_exist_cost_nothing() -> None:
    assert parameters(EpitomeSpec.create((64, 32, 3, 3), (64, 8, 3, 3))).routing == 4
    assert parameters(EpitomeSpec.create((64, 32, 3, 3), (1, 32, 3, 3))).routing == 0


def test_papers_formula_by_hand() -> None:
    window, positions = 9, 25
    first = (2 * 8 * window - 1) * positions * 16
    integral = positions * window * 16
    wrapping, reuse = 2 * 4 * 100 * 8, 2 * 4 * 25 * 16
    assert paper_madds(BOTH, SQUARE) == (first + integral + wrapping + reuse) / 2


def test_papers_formula_of_a_pointwise_layer_is_the_product_map_and_one_addition_per_output() -> None:
    spec = EpitomeSpec.create((96, 16, 1, 1), (16, 16, 1, 1))
    assert paper_madds(spec, Geometry(49, 49)) == 49 * 16 * 16 + 49 * 96


def test_papers_formula_rounds_up() -> None:
    spec = EpitomeSpec.create((3, 3, 2), (3, 3, 2))
    geometry = Geometry(1, 1)
    assert 2 * paper_madds(spec, geometry) == (2 * 3 * 2 - 1) * 3 + 2 * 3 + 1


@pytest.mark.parametrize(
    "strategy, multiply_adds, interpolation",
    [
        ("folded", 64 * 32 * 9 * 25, 0),
        ("product_map", 16 * 32 * 9 * 25, 2 * 64 * 25),
        ("wrapping", 64 * 8 * 9 * 25, 2 * 32 * 100),
        ("both", 16 * 8 * 9 * 25, 2 * 64 * 25 + 2 * 32 * 100),
    ],
)
def test_executed_by_hand(strategy: formulas.Strategy, multiply_adds: int, interpolation: int) -> None:
    found = executed(BOTH, SQUARE, strategy)
    assert found == Operations(multiply_adds, interpolation)
    assert found.total == multiply_adds + interpolation


def test_whole_starts_copy_outputs_and_only_add_inputs() -> None:
    assert executed(BOTH, SQUARE, "both", Interpolated(0, 0)).interpolation == 32 * 100
    mixed = executed(BOTH, SQUARE, "both", Interpolated(16, 8))
    assert mixed.interpolation == 2 * 16 * 25 + (32 + 8) * 100


def test_a_single_epitome_channel_needs_no_interpolation() -> None:
    spec = EpitomeSpec.create((8, 4), (1, 4))
    assert executed(spec, Geometry(1, 1), "product_map") == Operations(4, 0)


def test_groups_of_a_convolution() -> None:
    spec = EpitomeSpec.create((32, 8, 3), (4, 2, 3))  # C_out, C_in / groups
    grouped = Geometry(10, 10, groups=4)
    assert executed(spec, grouped, "product_map") == Operations(4 * 4 * 8 * 3 * 10, 2 * 32 * 10)
    assert executed(spec, grouped, "wrapping") == Operations(32 * 2 * 3 * 10, 2 * 4 * 8 * 10)


def test_groups_of_a_transposed_convolution() -> None:
    spec = EpitomeSpec.create((8, 32, 3), (2, 4, 3))  # C_out / groups, C_in
    grouped = Geometry(10, 30, groups=4, transposed=True)
    assert dense_madds(spec, grouped) == 8 * 32 * 3 * 10
    assert executed(spec, grouped, "product_map") == Operations(2 * 32 * 3 * 10, 2 * 4 * 8 * 30)
    assert executed(spec, grouped, "wrapping") == Operations(8 * 4 * 4 * 3 * 10, 2 * 32 * 10)


WSNET = EpitomeSpec.create((64, 8, 9), (1, 8, 40), spatial_starts="out")  # one long filter, 64 windows of it
ROW = Geometry(in_positions=100, out_positions=46, read_positions=99, strided=True)


def test_diagonals_by_hand() -> None:
    products = 40 * 8 * 100
    assert executed(WSNET, ROW, "diagonals") == Operations(products, 64 * (2 * 8 + 2) * 46)
    map_ = (40 + 9 - 2) * 99
    assert executed(WSNET, ROW, "integral") == Operations(products, 64 * (2 * 1 + 2) * 46 + map_)
    whole = Interpolated(0, 0, axes=0)
    assert executed(WSNET, ROW, "diagonals", whole).interpolation == 64 * 8 * 46
    assert executed(WSNET, ROW, "integral", whole).interpolation == 64 * 1 * 46 + map_


def test_diagonals_in_the_plane_by_hand() -> None:
    spec = EpitomeSpec.create((32, 8, 3, 3), (8, 8, 5, 4), spatial_starts="out")
    products, rows = 8 * 20 * 8 * 100, 4 * 8  # four blocks whose fractional channel starts read all 8 rows
    taps = rows * (4 * 8 + 2 * 3) * 25 + 2 * 32 * 25
    assert executed(spec, SQUARE, "diagonals") == Operations(products, taps)
    entries = rows * (4 * 3 + 2 * 3) * 25 + 2 * 32 * 25
    map_ = 8 * (6 * 4 + 7 * 5) * 100
    assert executed(spec, SQUARE, "integral") == Operations(products, entries + map_)
    some = Interpolated(8, 0, (True, False, False, False), axes=1)
    assert executed(spec, SQUARE, "diagonals", some) == Operations(products, rows * (2 * 8 + 2) * 25 + 2 * 8 * 25)


def test_wrapping_before_the_products_by_hand() -> None:
    spec = EpitomeSpec.create((32, 8, 3, 3), (8, 4, 5, 4), spatial_starts="out")
    plain, wrapped = executed(spec, SQUARE, "integral"), executed(spec, SQUARE, "wrapped_integral")
    assert wrapped.multiply_adds * 2 == plain.multiply_adds
    assert wrapped.interpolation == plain.interpolation + 2 * 8 * 100


def test_a_map_for_every_input_block_by_hand() -> None:
    spec = EpitomeSpec.create((6, 8, 3), (6, 4, 5), block_in=3, spatial_starts="grid")  # blocks of 3, 3 and 2
    found = executed(spec, Geometry(10, 8, read_positions=10), "integral")
    assert found == Operations(6 * 5 * 8 * 10, 3 * 6 * (5 + 3 - 2) * 10 + 6 * (3 * 4 + 2) * 8)


def test_rows_that_a_fractional_block_reads() -> None:
    spec = EpitomeSpec.create((20, 8, 3), (8, 8, 5), block_out=3, spatial_starts="out")
    assert [DiagonalLayout(spec).rows_read(s, True) for s in DiagonalLayout(spec).segments()] == [4] * 6 + [3]
    grouped = replace(spec, group_length=4)
    assert [DiagonalLayout(grouped).rows_read(s, True) for s in DiagonalLayout(grouped).segments()] == [6] * 6 + [4]
    assert {DiagonalLayout(spec).rows_read(s, False) for s in DiagonalLayout(spec).segments()} == {3, 2}


def test_blocks_are_cut_where_a_group_ends() -> None:
    spec = EpitomeSpec.create((12, 2, 3), (5, 2, 5), spatial_starts="out")
    found = [(s.first_group, s.block, s.channel, s.length) for s in DiagonalLayout(spec, groups=2).segments()]
    assert found == [(0, 0, 0, 5), (0, 1, 5, 1), (1, 1, 6, 4), (1, 2, 10, 2)]
    transposed = EpitomeSpec.create((2, 12, 3), (2, 5, 5))
    maps = DiagonalLayout(transposed, groups=2, transposed=True).maps()
    assert [(m.first_group, m.block, m.column, m.length) for m in maps] == [
        (0, 0, 0, 5),
        (0, 1, 5, 1),
        (1, 1, 0, 4),
        (1, 2, 4, 2),
    ]


def test_interpolated_channels_of_a_cut_last_block() -> None:
    assert interpolated_channels(10, 4, [True, False, True]) == 4 + 2
    assert interpolated_channels(10, 4, [False, True, False]) == 4


def spec_of(**options: object) -> EpitomeSpec:
    return EpitomeSpec.create((64, 32, 3, 3), (16, 8, 4, 4), **options)  # type: ignore[arg-type]


PLAIN = Geometry(1, 1)
REASONS = [
    (spec_of(), PLAIN, "product_map", None),
    (spec_of(), PLAIN, "wrapping", "spatial starts on input blocks"),
    (spec_of(), PLAIN, "both", "spatial starts on input blocks"),
    (spec_of(spatial_starts="out"), PLAIN, "product_map", "spatial starts on output blocks"),
    (spec_of(spatial_starts="out"), PLAIN, "wrapping", None),
    (spec_of(spatial_starts="grid"), PLAIN, "product_map", "spatial starts on pairs of blocks"),
    (spec_of(spatial_starts="grid"), PLAIN, "wrapping", "spatial starts on pairs of blocks"),
    (spec_of(channel_starts="grid"), PLAIN, "product_map", "channel starts on pairs of blocks"),
    (spec_of(channel_starts="grid"), PLAIN, "wrapping", "channel starts on pairs of blocks"),
    (BOTH, PLAIN, "both", None),
    (BOTH, replace(PLAIN, flattened=True), "wrapping", "flattened kernel mixes channels and space"),
    (BOTH, replace(PLAIN, groups=4), "product_map", "groups need as many channels as the layer has"),
    (BOTH, replace(PLAIN, groups=4), "wrapping", None),
    (
        BOTH,
        Geometry(1, 1, groups=4, transposed=True),
        "wrapping",
        "groups need as many channels as the layer has",
    ),
    (BOTH, Geometry(1, 1, groups=4, transposed=True), "product_map", None),
    (EpitomeSpec.create((64, 32), (64, 8)), PLAIN, "product_map", "axis not compressed"),
    (EpitomeSpec.create((64, 32), (80, 8)), PLAIN, "product_map", "axis not compressed"),
    (spec_of(spatial_starts="grid"), PLAIN, "folded", None),
    (spec_of(), PLAIN, "integral", None),
    (spec_of(spatial_starts="out"), PLAIN, "diagonals", None),
    (spec_of(spatial_starts="grid"), PLAIN, "diagonals", None),
    (spec_of(spatial_starts="out"), PLAIN, "wrapped_integral", None),
    (spec_of(), PLAIN, "wrapped_integral", "spatial starts on input blocks"),
    (spec_of(spatial_starts="grid"), PLAIN, "wrapped_diagonals", "spatial starts on pairs of blocks"),
    (spec_of(channel_starts="grid"), PLAIN, "integral", "channel starts on pairs of blocks"),
    (BOTH, PLAIN, "integral", "no spatial starts"),
    (BOTH, replace(PLAIN, flattened=True), "integral", "flattened kernel mixes channels and space"),
    (EpitomeSpec.create((64, 32), (16, 8)), PLAIN, "diagonals", "no spatial starts"),
    (EpitomeSpec.create((64, 32, 3), (16, 8, 1)), PLAIN, "diagonals", None),
    (spec_of(), replace(PLAIN, transposed=True), "integral", None),
    (spec_of(), replace(PLAIN, transposed=True, strided=True), "integral", "stride of a transposed convolution"),
    (spec_of(), replace(PLAIN, strided=True), "integral", None),
]


@pytest.mark.parametrize("spec, geometry, strategy, reason", REASONS)
def test_what_applies(spec: EpitomeSpec, geometry: Geometry, strategy: formulas.Strategy, reason: str | None) -> None:
    assert why_not(spec, geometry, strategy) == reason


def test_one_shared_spatial_start_hinders_nothing() -> None:
    spec = EpitomeSpec.create((64, 32, 3), (16, 32, 5))
    assert spec.start_shapes["spatial"] == (1, 1)
    assert why_not(spec, PLAIN, "product_map") is None


def test_every_reason_is_in_the_closed_list() -> None:
    listed = set(formulas.Reason.__args__)  # type: ignore[attr-defined]
    assert {reason for *_, reason in REASONS if reason} < listed


def test_best_names_the_obstacle_of_a_folded_layer() -> None:
    spec = EpitomeSpec.create((64, 8, 3, 3), (16, 8, 4, 4), channel_starts="grid")
    choice = best(spec, SQUARE)
    assert (choice.strategy, choice.reason) == ("folded", "channel starts on pairs of blocks")
    assert ("wrapping", "axis not compressed") in choice.declined


def test_best_folds_what_saves_nothing() -> None:
    spec = EpitomeSpec.create((64, 1, 1, 1), (63, 1, 1, 1))
    choice = best(spec, SQUARE)
    assert (choice.strategy, choice.reason) == ("folded", "no saving")
    assert choice.operations.total == dense_madds(spec, SQUARE)


def test_best_folds_what_the_example_does_not_run() -> None:
    assert best(BOTH, Geometry(0, 0)).reason == "not run by the example input"


@st.composite
def layers(draw: st.DrawFn) -> tuple[EpitomeSpec, Geometry]:
    groups, transposed = draw(st.sampled_from([1, 1, 2, 4])), draw(st.booleans())
    sizes = st.integers(1, 12)
    shared = 1 if transposed else 0
    weight = [draw(sizes), draw(sizes), draw(st.integers(1, 3))]
    weight[shared] *= groups
    spec = EpitomeSpec.create(
        weight,
        (draw(sizes), draw(sizes), draw(st.integers(1, 4))),
        spatial_starts=draw(st.sampled_from(["in", "out", "grid"])),
        channel_starts=draw(st.sampled_from(["separable", "grid", "grid_out", "grid_in"])),
    )
    return spec, Geometry(draw(st.integers(1, 50)), draw(st.integers(1, 50)), groups, transposed)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(layers())
def test_best_is_the_cheapest_that_applies(layer: tuple[EpitomeSpec, Geometry]) -> None:
    spec, geometry = layer
    costs = {
        strategy: executed(spec, geometry, strategy).total
        for strategy in STRATEGIES
        if why_not(spec, geometry, strategy) is None
    }
    choice = best(spec, geometry)
    assert costs[choice.strategy] == choice.operations.total == min(costs.values())
    assert {strategy for strategy, _ in choice.declined} == set(STRATEGIES) - set(costs)
    assert costs["folded"] == dense_madds(spec, geometry)


@pytest.mark.parametrize(
    "module, own", [(formulas, {"epitorch.spec", "epitorch.cost.diagonals"}), (diagonals, {"epitorch.spec"})]
)
def test_formulas_need_no_torch(module: ModuleType, own: set[str]) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {str(name).split(".")[0] for name in imported} <= {
        "__future__",
        "collections",
        "dataclasses",
        "epitorch",
        "math",
        "typing",
    }
    assert {name for name in imported if str(name).startswith("epitorch")} == own
