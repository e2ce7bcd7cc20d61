"""Convert every model of torchvision and one of each of timm's families, and check what must hold.

    python benchmarks/sweep.py --out runs/sweep --jobs 2            # resumes: what has a line is not run again
    python benchmarks/sweep.py --out runs/sweep --only timm:resnet18.a1_in1k
    python benchmarks/sweep.py --out runs/sweep --table docs/sweep.md --save benchmarks/results/sweep.json

For each model, with fresh weights: plan for half of its parameters, convert, and check that output shapes stay, that
gradients are finite, that the converted model in eval mode equals the one made dense again, that its state goes into a
fresh conversion by the same plan with nothing missing or left over, that the deployed network agrees, and that the
parameters are those planned. One process per model, so that a model that takes too long or too much memory
costs only itself.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import subprocess
import sys
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import epitorch
from epitorch.conversion import weight_layers, why_left
from epitorch.cost._trace import tensors
from epitorch.nn import EpitomeLayer
from sweep_inputs import Subject, subject, timm_names, torchvision_names

RATIO = 2.0
COVERAGE = 0.95
AT_ONCE = 250_000_000  # elements of generated weights that one backward pass trains
TOLERANCE = 1e-4  # of the largest output, float32


def main() -> int:
    arguments = _arguments()
    if arguments.run_one:
        print(json.dumps(check(arguments.run_one)))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = arguments.only or [*torchvision_names(), *timm_names()]
    for row in _rows_of(arguments.resume):
        if row["name"] in names and not _line(arguments.out, row["name"]).exists():
            _line(arguments.out, row["name"]).write_text(json.dumps(row) + "\n")
    todo = [] if arguments.sum_up else [name for name in names if not _line(arguments.out, name).exists()]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda name: _run(name, arguments), todo))
    rows = [json.loads(_line(arguments.out, name).read_text()) for name in names if _line(arguments.out, name).exists()]
    _finish(rows, arguments)
    return 0 if all(row["verdict"] != "failed" for row in rows) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"), help="one JSON file per model")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=15, help="limit of one model")
    parser.add_argument("--only", nargs="+", metavar="SOURCE:NAME")
    parser.add_argument(
        "--resume", type=Path, help="what --save wrote before: its models that passed are not run again"
    )
    parser.add_argument("--sum-up", action="store_true", help="run nothing, only write --table and --save")
    parser.add_argument("--table", type=Path, help="write a Markdown table")
    parser.add_argument("--save", type=Path, help="write all rows as JSON")
    parser.add_argument("--run-one", help=argparse.SUPPRESS)
    return parser.parse_args()


def _rows_of(saved: Path | None) -> list[dict[str, Any]]:
    rows = [] if saved is None else json.loads(saved.read_text())["rows"]
    return [row for row in rows if row["verdict"] != "failed"]


def _line(out: Path, name: str) -> Path:
    return out / f"{name.replace(':', '_').replace('/', '_')}.json"


def _run(name: str, arguments: argparse.Namespace) -> None:
    command = [sys.executable, __file__, "--run-one", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60 * arguments.minutes)
        lines = done.stdout.strip().splitlines()
        row = json.loads(lines[-1]) if done.returncode == 0 else _broken(name, _last_words(done))
    except subprocess.TimeoutExpired:
        row = _broken(name, f"took more than {arguments.minutes:g} minutes")
    _line(arguments.out, name).write_text(json.dumps(row) + "\n")
    print(
        f"{row['verdict']:8} {row['seconds']:7.1f} s  {name}  {row['problem'] or ''}".splitlines()[0][:200], flush=True
    )


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    """A process killed for memory says nothing."""
    return done.stderr.strip()[-500:] or f"the process ended with status {done.returncode} (-9: killed, out of memory)"


def _broken(name: str, problem: str) -> dict[str, Any]:
    return {"name": name, "verdict": "failed", "step": "process", "problem": problem, "seconds": 0.0}


# ---- one model ----


def check(name: str) -> dict[str, Any]:
    """Run all checks on one model; a row for the table."""
    begun, row = time.perf_counter(), {"name": name, "verdict": "failed", "step": "build", "problem": None}
    with warnings.catch_warnings(action="ignore"):
        try:
            _steps(subject(name), row)
            row["verdict"] = row.pop("outcome", "passed")
        except Exception as error:
            row["problem"] = f"{type(error).__name__}: {error}"[:600]
            row["where"] = traceback.format_exc().strip().splitlines()[-3].strip()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**row, "commit": _commit(), "seconds": round(time.perf_counter() - begun, 1), "peak_bytes": peak}


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _steps(what: Subject, row: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = _awake(what.build()).eval()
    row["step"] = "example input"
    inputs, wanted = _first_that_runs(model, what.inputs)
    before = sum(parameter.numel() for parameter in model.parameters())
    row.update(params=before, input=[list(tensor.shape) for tensor in tensors(inputs)][:2], step="plan")
    if all(why_left(layer) is not None for _, layer in weight_layers(model)):
        row.update(outcome="nothing", problem="no convolution or linear layer that could be converted", step=None)
        return
    plan = epitorch.plan(model, inputs, ratio=RATIO, depthwise=True)
    row["step"] = "convert"
    report = epitorch.convert_(model, plan)
    if what.settle:
        epitorch.reestimate_batch_norm_(model, [inputs], forward=lambda model, batch: model(*batch))
    row.update(_coverage(model, report), converted=len(report.converted), left=len(report.left))
    row["step"] = "parameters"
    planned = epitorch.count(model, inputs).params
    row.update(params_after=planned)
    _must(planned <= before / RATIO, f"{planned:,} parameters, more than {before / RATIO:,.0f}")
    kept = sum(p.numel() for n, p in model.named_parameters() if ".learner." not in f".{n}.")
    routed = sum(
        value.numel() for layer in _epitomes(model) if layer.index != "direct" for value in layer.starts().values()
    )
    _must(planned == kept + routed, f"{planned:,} counted, {kept + routed:,} in the model")
    row["step"] = "output shapes"
    with torch.no_grad():
        output = model(*_fresh(inputs))
    _must(_shapes(output) == _shapes(wanted) or _ragged(wanted), f"{_shapes(output)} instead of {_shapes(wanted)}")
    row["step"] = "state"
    _check_state(what, model, plan, inputs, output)
    row["step"] = "to_dense"
    dense = epitorch.to_dense_(copy.deepcopy(model))
    _must(not _epitomes(dense), "epitomes are left")
    with torch.no_grad():
        row["to_dense_difference"] = _difference(output, dense(*_fresh(inputs)))
    _must(row["to_dense_difference"] <= TOLERANCE, f"outputs differ by {row['to_dense_difference']:.1e}")
    del dense
    row["step"] = "deploy"
    net = epitorch.deploy(model, inputs, strategy="reuse")
    with torch.no_grad():
        row["deploy_difference"] = _difference(output, net(*_fresh(inputs)))
    # `deploy` lets a larger difference pass only where both models agree in float64: then it is rounding, amplified.
    _must(row["deploy_difference"] <= 100 * TOLERANCE, f"outputs differ by {row['deploy_difference']:.1e}")
    del net
    row["step"] = "backward"
    _check_backward(what, model, inputs)
    _must(row["coverage"] >= COVERAGE, f"{row['coverage']:.1%} of the convertible weight converted")
    row["step"] = None


@torch.no_grad()
def _awake(model: nn.Module) -> nn.Module:
    """Layers that begin as zero, a head or the end of a branch, would hide whatever comes before them."""
    for _, layer in weight_layers(model):
        weight = layer._parameters.get("weight")
        if weight is not None and not isinstance(weight, nn.UninitializedParameter) and not weight.any():
            weight.normal_(0, 0.02)
    return model


def _first_that_runs(model: nn.Module, inputs: tuple[tuple[Any, ...], ...]) -> tuple[tuple[Any, ...], Any]:
    for candidate in inputs:
        try:
            with torch.no_grad():
                return candidate, model(*_fresh(candidate))
        except (RuntimeError, AssertionError, ValueError, IndexError, ZeroDivisionError):
            if candidate is inputs[-1]:
                raise
    raise AssertionError("no inputs")


def _coverage(model: nn.Module, report: Any) -> dict[str, Any]:
    """Share of the weight in convolutions and linear layers that is generated now."""
    sizes = {row.name: row for row in report.layers if row.left != "other_kind"}
    total = sum(row.params_before for row in sizes.values())
    done = sum(row.params_before for row in sizes.values() if row.left is None)
    reasons: dict[str, int] = {}
    for row in report.left:
        reasons[row.left] = reasons.get(row.left, 0) + 1
    return {"coverage": done / total, "reasons": reasons, "own_forward": sum(row.own_forward for row in report.layers)}


def _check_state(what: Subject, model: nn.Module, plan: Any, inputs: tuple[Any, ...], output: Any) -> None:
    torch.manual_seed(1)
    other = what.build().eval()
    epitorch.convert_(other, plan)
    other.load_state_dict(model.state_dict(), strict=True)
    with torch.no_grad():
        difference = _difference(output, other(*_fresh(inputs)))
    _must(difference <= TOLERANCE, f"after loading the state outputs differ by {difference:.1e}")


def _check_backward(what: Subject, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """In several passes where one would keep more than this machine has: each trains some of the epitomes."""
    layers = _epitomes(model)
    passes = 1 + sum(layer.spec.num_weight for layer in layers) // AT_ONCE
    model.train().requires_grad_(passes == 1)
    missing = 0
    for number in range(passes):
        trained = layers[number::passes]
        for layer in trained:
            layer.requires_grad_(True)
        output = what.train(model, _fresh(inputs))
        parts = [tensor for tensor in tensors(output) if tensor.is_floating_point() and tensor.requires_grad]
        torch.stack([part.float().square().mean() for part in parts]).sum().backward()
        gradients = [layer.epitome.grad for layer in trained]
        missing += sum(gradient is None for gradient in gradients)
        _must(all(g is None or bool(g.isfinite().all()) for g in gradients), "a gradient is not finite")
        if passes > 1:
            del output, parts, gradients
            model.zero_grad(set_to_none=True)
            model.requires_grad_(False)
    _must(missing < len(layers) / 2, f"{missing} of {len(layers)} epitomes got no gradient")


def _epitomes(model: nn.Module) -> list[EpitomeLayer]:
    return [layer for _, layer in weight_layers(model) if isinstance(layer, EpitomeLayer)]


def _fresh(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return copy.deepcopy(inputs)


def _shapes(output: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors(output)]


def _ragged(output: Any) -> bool:
    """Detections: how many there are depends on the weights."""
    return isinstance(output, list)


def _difference(one: Any, two: Any) -> float:
    """Largest difference over the largest value."""
    pairs = list(zip(tensors(one), tensors(two), strict=True))
    return max((_relative(a, b) for a, b in pairs if a.numel()), default=0.0)


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().double().max() / a.abs().double().max().clamp_min(1e-30))


def _must(holds: bool, problem: str) -> None:
    if not holds:
        raise AssertionError(problem)


# ---- the table ----


def _finish(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("passed", "nothing", "failed")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if arguments.save:
        import timm
        import torchvision

        versions = {"torch": torch.__version__, "torchvision": torchvision.__version__, "timm": timm.__version__}
        report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **versions, "ratio": RATIO, "rows": rows}
        arguments.save.write_text(json.dumps({**report, "counts": counts}, indent=1) + "\n")
    if arguments.table:
        arguments.table.write_text(_table(rows, counts))


def _table(rows: list[dict[str, Any]], counts: dict[str, int]) -> str:
    lines = [
        "# Every model of torchvision, one of each timm family",
        "",
        f"{len(rows)} of {len([*torchvision_names(), *timm_names()])} models run, fresh weights, planned for half of "
        f"their parameters (`python benchmarks/sweep.py`): {counts['passed']} passed, {counts['nothing']} with nothing "
        f"to convert, {counts['failed']} failed. Differences are in float32, relative to the largest output; "
        f"`deploy` accepts one above {TOLERANCE:.0e} only where both networks agree in float64 (rounding that the "
        "network amplifies).",
        "",
        "| model | parameters | after | layers converted | coverage | to_dense | deploy | verdict |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    return "\n".join([*lines, *(_table_row(row) for row in rows)]) + "\n"


def _table_row(row: dict[str, Any]) -> str:
    def shown(key: str, form: str) -> str:
        return format(row[key], form) if key in row else ""

    cells = [row["name"], shown("params", ","), shown("params_after", ","), shown("converted", "d")]
    cells += [shown("coverage", ".1%"), shown("to_dense_difference", ".0e"), shown("deploy_difference", ".0e")]
    problem = f": {row['step']}, {row['problem']}" if row["verdict"] == "failed" else ""
    return "| " + " | ".join([*cells, (row["verdict"] + problem).replace("|", "/").splitlines()[0]]) + " |"


if __name__ == "__main__":
    sys.exit(main())
