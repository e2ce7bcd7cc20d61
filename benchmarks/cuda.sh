#!/usr/bin/env bash
# What needs a CUDA GPU: the device tests, then the short CIFAR-10 recipes at as many seeds as fit.
#   bash benchmarks/cuda.sh DATA OUT [MINUTES] [SEEDS]
# FUSED=1 measures the fused inverted residuals instead of training: 7 minutes, no data.
# DATA is a folder with CIFAR-10; nothing is installed, the package is taken from src/.
set -uo pipefail
cd "$(dirname "$0")/.."
data=$1 out=$2 minutes=${3:-5} seeds=${4:-0 1 2}
export PYTHONPATH=src PYTHONUNBUFFERED=1 EPITORCH_CACHE=${EPITORCH_CACHE:-/tmp/epitorch-cache}
mkdir -p "$out"
python3 -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
python3 -m pytest -q -o filterwarnings=default -p no:cacheprovider tests/nn/test_cuda.py \
    tests/deploy/test_fused_triton.py -k 'cuda or on_a_gpu' 2>&1 | tee "$out/tests.log" | tail -n 15
if [ -n "${FUSED:-}" ]; then
    exec python3 benchmarks/fused_cuda.py --out "$out/fused_cuda.json"
fi
python3 -c 'import sys; from epitorch.training.data import load_images; [load_images(sys.argv[1], s) for s in ("train", "test")]' "$data"
# shellcheck disable=SC2086
python3 benchmarks/run_recipes.py recipes/cifar10-short --data "$data" --out "$out/cifar10-short" \
    --jobs 8 --threads 2 --minutes "$minutes" --seeds $seeds
cat "$out/cifar10-short/summary.md"
