"""What a wheel and an sdist hold, and when a wheel is for one platform."""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("hatchling")


def module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


dist, hook = module("tools/dist.py"), module("hatch_build.py")


@pytest.fixture(scope="module")
def wheel() -> list[str]:
    from hatchling.builders.wheel import WheelBuilder

    return [file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()]


@pytest.fixture(scope="module")
def sdist() -> list[str]:
    from hatchling.builders.sdist import SdistBuilder

    return [dist.installed(file.distribution_path) for file in SdistBuilder(str(ROOT)).recurse_included_files()]


def test_both_hold_the_package_and_nothing_else(wheel: list[str], sdist: list[str]) -> None:
    assert dist.problems(wheel) == []
    assert dist.problems(sdist) == []


def test_a_wheel_from_the_sdist_is_that_of_the_source_tree(wheel: list[str], sdist: list[str]) -> None:
    assert set(wheel) == {name for name in sdist if name.startswith("epitorch/")}


def test_every_file_that_git_has_is_in_the_wheel(wheel: list[str]) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no repository")
    command = ["git", "ls-files", "src", "recipes", "tables", "sweeps"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(tracked) > 300
    assert {dist.installed(name) for name in tracked if (ROOT / name).exists()} - set(wheel) == set()


@pytest.mark.parametrize(
    "name",
    [
        "epitorch/tests/test_cli.py",
        "tests/conftest.py",
        "epitorch/training/train.parquet",
        "epitorch/data/images.py",
        "epitorch/__pycache__/cli.cpython-311.pyc",
        "runs/digits/results.json",
        "epitorch/recipes/model.safetensors",
        "epitorch/_fused.so",
    ],
)
def test_what_does_not_belong_is_seen(name: str, wheel: list[str]) -> None:
    assert dist.problems([*wheel, name]) == [f"does not belong there: {name}"]


def test_what_is_missing_is_seen(wheel: list[str]) -> None:
    kept = [name for name in wheel if not name.startswith("epitorch/sweep_files/")]
    assert dist.problems(kept) == ["missing: epitorch/sweep_files/digits.yaml"]


def test_a_native_library_goes_with_a_platform() -> None:
    native, pure = "epitorch-1-py3-none-linux_x86_64.whl", "epitorch-1-py3-none-any.whl"
    library = ["epitorch/deploy/_fused.so"]
    assert dist.tag_problems(native, library) == dist.tag_problems(pure, []) == []
    assert dist.tag_problems(native, []) == [f"{native}: lacks a native library"]
    assert dist.tag_problems(pure, library) == [f"{pure}: has a native library"]


# ---- the build hook ----


def built(tmp_path: Path) -> tuple[dict[str, Any], list[str]]:
    """What the hook leaves of a build, and its warnings."""
    said: list[str] = []
    app: Any = SimpleNamespace(display_warning=said.append)
    data: dict[str, Any] = {"artifacts": [], "pure_python": True}
    (tmp_path / hook.PACKAGE).mkdir(parents=True)
    (tmp_path / hook.LIBRARY).write_bytes(b"of an earlier build")
    made = hook.NativeKernel(str(tmp_path), {}, None, None, str(tmp_path), "wheel", app)
    made.initialize("standard", data)
    return data, said


def test_a_compiled_kernel_makes_a_wheel_for_this_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "compile_kernel", lambda root: "")
    data, said = built(tmp_path)
    assert data["tag"] == f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    assert (data["pure_python"], data["artifacts"]) == (False, ["src/epitorch/deploy/_fused.so"])
    assert said == []


def test_no_compiler_makes_a_wheel_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nothing/here")
    data, said = built(tmp_path)
    assert data == {"artifacts": [], "pure_python": True}
    assert not (tmp_path / hook.LIBRARY).exists()
    assert "no C++ compiler" in said[0]


def test_python_for_two_processors_gets_a_kernel_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook.sysconfig, "get_platform", lambda: "macosx-11.0-universal2")
    monkeypatch.setattr(hook.platform, "machine", lambda: "arm64")
    assert hook._platform_tag() == "macosx_11_0_arm64"
