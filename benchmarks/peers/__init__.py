"""Epitomes side by side with other ways to make a network small: one pipeline, one schedule, the same seeds.

    python -m benchmarks.peers run --part a --data DIR --out runs/peers --results benchmarks/peers/results --jobs 2
    python -m benchmarks.peers report

`parts` says what is compared on which network, `methods` how each method works, `runs` makes one run, `driver` all of
them, `latency` times the trained networks in turn, `report` writes docs/results/peers.md from the results.
"""
