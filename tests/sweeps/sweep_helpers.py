"""Stand-ins for runs and for Ray, so that what a sweep decides can be tested without training."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from epitorch.results import Accuracy, MAdds, Parameters, PeakMemory, RunResult, Seconds, save_results
from epitorch.sweeps.cluster import Resources
from epitorch.training.recipe import Recipe, load_recipe
from epitorch.training.recipe_sound import with_fold

TINY = """\
model: {name: "epitorch:digits_cnn", arguments: {widths: [4, 4]}}
data: {holdout: 100, crop_padding: 1, flip: false}
training: {epochs: 1, batch_size: 64, peak_lr: 0.1}
"""
EPITOME = "epitome: {index: learner, layers: {conv2: {epitome_shape: [2, 4, 3, 3]}}}\n"
SOUND = """\
model: {name: "epitorch:soundnet8", arguments: {num_classes: 10}}
data: {holdout: 40}
sound: {subset: esc10}
training: {epochs: 1, batch_size: 32, peak_lr: 0.01}
"""


def write_tiny_recipes(folder: Path) -> None:
    """Write recipes/tiny/{dense,epitome,wide}.yaml and recipes/sound/{one,two}.yaml."""
    texts = {"tiny/dense": TINY, "tiny/epitome": TINY + EPITOME, "tiny/wide": TINY.replace("[4, 4]", "[8, 8]")}
    texts |= {"sound/one": SOUND, "sound/two": SOUND.replace("0.01", "0.02")}
    for name, content in texts.items():
        path = folder / "recipes" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def write_sounds(folder: Path) -> None:
    """Write a data set's table and empty clips: one of each of two classes in each of five folds."""
    (folder / "meta").mkdir(parents=True)
    (folder / "audio").mkdir()
    lines = ["filename,fold,target,category,esc10,src_file,take"]
    for fold in range(1, 6):
        for target, name in enumerate(("dog", "rain")):
            (folder / "audio" / f"{fold}-{target}.ogg").touch()
            lines.append(f"{fold}-{target}.ogg,{fold},{target},{name},True,{fold}{target},A")
    (folder / "meta" / "esc50.csv").write_text("\n".join(lines) + "\n")


def write_sweep(path: Path, text: str) -> Path:
    """Write a sweep file."""
    path.write_text(text)
    return path


def fake_result(recipe: Recipe, seed: int, test: float, fold: int | None = None) -> RunResult:
    """Return a result of a run that reached so much."""
    recipe = with_fold(recipe, fold)
    return RunResult(
        name=recipe.name,
        accuracy=Accuracy(test, heldout=[0.5], test_images=80),
        parameters=Parameters(1, 1, 1, 2_000_000),
        madds=MAdds(10_000_000, 10, 1),
        seconds=Seconds(9.0, [1.0], [1.0]),
        peak_memory_bytes=PeakMemory(1),
        seed=seed,
        loss={"train": [0.5]},
        environment={"git_commit": "abc"},
        command=["epitorch", "train"],
        recipe=recipe.content(),
        recipe_text=recipe.text,
        recipe_sha256=recipe.sha256,
        data={"steps_run": 2, "epochs_run": 1},
        date="today",
    )


def option(command: Sequence[str], name: str) -> str | None:
    """Return the value of an option of a command."""
    return command[command.index(name) + 1] if name in command else None


def fake_run(command: Sequence[str], test: float = 0.5) -> None:
    """Do what `epitorch train` does to its folder."""
    out, seed, fold, steps = (option(command, name) for name in ("--out", "--seed", "--fold", "--max-steps"))
    assert out is not None
    recipe = load_recipe(command[1])
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    began = {"recipe_sha256": recipe.sha256, "seed": int(seed or 0), "max_steps": int(steps) if steps else None}
    (folder / "run.json").write_text(json.dumps({**began, "data": option(command, "--data")}))
    save_results(folder / "results.json", fake_result(recipe, int(seed or 0), test, int(fold) if fold else None))


class FakeCluster:
    """Makes its runs at once; fails or interrupts where told."""

    def __init__(self, jobs: int = 2, broken: str = "", interrupt_after: int | None = None) -> None:
        self.jobs, self.broken, self.interrupt_after = jobs, broken, interrupt_after
        self.commands: list[list[str]] = []
        self.most, self.stopped = 0, 0
        self._problems: dict[int, str | None] = {}

    def capacity(self) -> int:
        return self.jobs

    def start(self, command: Sequence[str], folder: str, log: str) -> int:
        self.commands.append(list(command))
        handle = len(self.commands)
        name = Path(folder).name
        if self.broken and self.broken in name:
            Path(log).write_text("before\nerror: it broke\n  expected: luck\n")
            self._problems[handle] = "exit code 1"
        else:
            fake_run(command, 0.5 + 0.01 * len(name))
            self._problems[handle] = None
        return handle

    def ended(self, handles: Sequence[int], seconds: float) -> list[int]:
        self.most = max(self.most, len(handles))
        if self.interrupt_after is not None and len(self.commands) > self.interrupt_after:
            raise KeyboardInterrupt
        return list(handles)[:1]

    def outcome(self, handle: int) -> str | None:
        return self._problems[handle]

    def stop(self, handles: Sequence[int]) -> None:
        self.stopped += len(handles)

    @contextmanager
    def connected(self, resources: Resources) -> Iterator[Any]:
        yield self

    @property
    def names(self) -> list[str]:
        """Folders of the runs that were started."""
        return [Path(option(command, "--out") or "").name for command in self.commands]


def console() -> Console:
    """Return a console that writes plain lines into a buffer."""
    return Console(file=io.StringIO(), width=200)


def written(console: Console) -> str:
    """Return what was printed there."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
