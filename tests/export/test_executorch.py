"""ExecuTorch programs, where the package is installed: every kind of layer, stored as dense weight or as epitome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from export_nets import NETS, moved

import epitorch

pytest.importorskip("executorch", reason="executorch is not installed")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["reuse", "size"])
@pytest.mark.parametrize("name", NETS)
def test_executorch(tmp_path: Path, name: str, strategy: Any) -> None:
    make, shape = NETS[name]
    torch.manual_seed(0)
    model, x = moved(make()), torch.randn(1, *shape)
    report = epitorch.export(model, x, "executorch", tmp_path / "net.pte", strategy=strategy)
    assert report.difference < 1e-4
    assert report.checked == ((1, *shape),)


def test_what_is_wrong_in_the_file_is_noticed(tmp_path: Path) -> None:
    from epitorch.export._executorch import run_executorch

    make, shape = NETS["made_in_the_graph"]
    model, x = moved(make()), torch.randn(1, *shape)
    epitorch.export(model, x, "executorch", tmp_path / "net.pte", strategy="size")
    ((got,),) = run_executorch(tmp_path / "net.pte", [(x,)])
    with torch.no_grad():
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
        assert (got - model(x + 0.1)).abs().max() > 1e-3
