"""How many runs go on a cluster at a time, and what each takes of it; Ray is stood in for."""

from __future__ import annotations

from typing import Any

import pytest

from epitorch.errors import InputError
from epitorch.sweeps import cluster
from epitorch.sweeps.cluster import Resources


class FakeRay:
    """Two machines of 16 cores and 2 GPUs each, or without GPUs."""

    def __init__(self, gpus: int = 2) -> None:
        each = {"CPU": 16.0, **({"GPU": float(gpus)} if gpus else {})}
        self._nodes = [{"Alive": alive, "Resources": each} for alive in (True, True)]
        self._nodes.append({"Alive": False, "Resources": {"CPU": 999.0, "GPU": 99.0}})
        self.asked: dict[str, Any] = {}

    def cluster_resources(self) -> dict[str, float]:
        alive = [node["Resources"] for node in self._nodes if node["Alive"]]
        return {key: sum(each[key] for each in alive) for key in alive[0]}

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes

    def remote(self, **asked: Any) -> Any:
        self.asked = asked
        return lambda function: function


@pytest.mark.parametrize(
    ("resources", "gpus_there", "capacity", "cpus", "gpus"),
    [
        (Resources(address="auto"), 2, 4, 1, 1.0),  # a GPU each
        (Resources(address="auto", gpus=0.5), 2, 8, 1, 0.5),
        (Resources(address="auto", gpus=0), 2, 32, 1, 0),
        (Resources(address="auto"), 0, 32, 1, 0),
        (Resources(address="auto", cpus=5), 0, 6, 5, 0),
        (Resources(address="auto", cpus=16), 2, 2, 16, 1.0),
        (Resources(address="auto", jobs=3), 2, 3, 1, 1.0),
    ],
)
def test_as_many_runs_as_fit(resources: Resources, gpus_there: int, capacity: int, cpus: int, gpus: float) -> None:
    ray = FakeRay(gpus_there)
    made = cluster._cluster(ray, resources)
    assert made.capacity() == capacity
    assert ray.asked == {"num_cpus": cpus, "num_gpus": gpus, "max_retries": 0}


def test_jobs_share_the_cores_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_cores", lambda: 8)
    for jobs, cpus in ((None, 1), (1, 8), (3, 2), (8, 1), (20, 1)):
        assert cluster._cluster(FakeRay(0), Resources(jobs=jobs)).cpus == cpus
    assert cluster._cluster(FakeRay(0), Resources(jobs=2, cpus=3)).cpus == 3


def test_no_run_is_larger_than_a_machine() -> None:
    for resources in (Resources(cpus=17), Resources(gpus=3)):
        with pytest.raises(InputError, match="than any machine has"):
            cluster._cluster(FakeRay(), resources)
