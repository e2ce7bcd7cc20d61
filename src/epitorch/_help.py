"""Help texts of the command line."""

MAIN = """
    Compress convolutional networks by generating their weights from small learned epitomes.

    examples:
      epitorch demo                                        train on handwritten digits, no data needed
      epitorch train cifar10-short/dense --data DIR        train a recipe on CIFAR-10
      epitorch count epitorch:mobilenetv2                  parameters and multiply-adds
      epitorch plan timm:resnet50 --ratio 2 --out p.yaml   a smaller epitome for every layer, within a budget
      epitorch bench timm:resnet50 --plan p.yaml           time both, side by side, in every runtime
      epitorch report runs/demo --out report.html          one page: accuracy, cost, layers, routing maps

    exit codes: 0 done, 1 failed, 2 wrong input, 130 stopped by Ctrl-C.
    EPITORCH_DEBUG=1 shows where an error came from.
"""
DEMO = """
    Train one small network on scikit-learn's handwritten digits (they come with scikit-learn: no network access) in
    four forms, dense, narrowed, and twice as epitomes of the narrowed one's size, and print what each reached.
    Takes about a minute on two cores.

    writes to --out (default runs/demo): results.json, and a folder for each run with its checkpoint, metrics and log.

    examples:
      epitorch demo
      epitorch demo --out /tmp/demo --seed 1
"""
TRAIN = """
    Train what a recipe says and measure it: accuracy on the test images (read once, at the end) with the routing map
    and with the index learner, parameters, multiply-adds, time, memory.

    RECIPE is a YAML file, or a name under recipes/ such as cifar10-short/dense. --data is a folder of parquet files
    (train.parquet and test.parquet, or Hugging Face shards), the folder that torchvision's CIFAR10 writes, or the word
    `digits`; for recipes on sounds a folder in the layout of ESC-50, of which --fold is tested on. Recipes on large
    images (a section `images`) read class folders (train/CLASS/*, val/CLASS/*), parquet files (train-*, validation-*)
    or WebDataset shards (train-*.tar or train/*.tar, and val likewise), with --workers processes.

    writes to --out (default runs/RECIPE/seedN; for sounds runs/RECIPE/foldN-seedN): results.json, checkpoint/
    (model.safetensors and config.json, what `epitorch eval` reads), lightning/last.ckpt (the state of training), logs/
    (metrics.csv, TensorBoard events), train.log, run.json, starts.json. After Ctrl-C the checkpoint is there too, and
    no results.json: the same command goes on with the run, as it does after a crash. With --devices N, or under
    torchrun, N processes share every batch. Decoded
    images are cached under $EPITORCH_CACHE (default ~/.cache/epitorch; about 180 MB for CIFAR-10).

    CIFAR-10 itself: python -c "import torchvision; torchvision.datasets.CIFAR10('DIR', download=True)". The recipes
    under cifar10-short take half an hour to an hour each on one CPU core.

    examples:
      epitorch train digits/epitome --data digits
      epitorch train cifar10-short/epitome-0.18-learner --data DIR --seed 1 --out runs/epitome-1
"""
PUSH = """
    Check a run's checkpoint by loading it, and publish it on the Hugging Face Hub: model.safetensors, config.json and
    README.md (the model card, with cost and results) in one commit, without the index learner. The repository is made
    if missing. Needs `pip install 'epitorch[hub]'` and a login (`hf auth login`, or HF_TOKEN). Anyone opens it with
    epitorch.from_pretrained("OWNER/NAME"). Writes nothing on this machine.

    RUN is a run's folder, or one with config.json and model.safetensors.

    examples (after the ones of `epitorch train` and `epitorch demo`):
      epitorch push runs/demo/epitome OWNER/NAME
      epitorch push runs/digits/epitome/seed0 OWNER/NAME --private --dtype int8
"""
EVAL = """
    Measure a checkpoint on the test images: accuracy with the routing map and, where the model has index learners in
    use, with the learner on the same batches. Writes nothing. Of large images, --split is test (the validation split),
    heldout or train.

    CHECKPOINT is a folder with config.json and model.safetensors, or a run's folder.

    examples (after the ones of `epitorch train` and `epitorch demo`):
      epitorch eval runs/demo/epitome --data digits
      epitorch eval runs/digits/epitome/seed0/checkpoint --data digits --json
"""
COUNT = """
    Count a model's parameters (epitomes, routing maps, all others) and multiply-adds, layer by layer and in total.
    Writes nothing.

    MODEL is epitorch:NAME, timm:NAME, torchvision:NAME or package.module:factory (which is called without arguments).
    Or give a checkpoint's folder: then the trained network is counted.

    examples:
      epitorch count torchvision:mobilenet_v2
      epitorch count epitorch:digits_cnn --input 1,1,8,8 --json
"""
PLAN = """
    Choose an epitome for every convolution and linear layer of a model so that it meets a budget, and print the choice:
    weight and epitome, share, largest rank before and after, parameters and multiply-adds, and what is left and why.

    MODEL is as for `epitorch count`. Give one budget: --params (epitomes, routing maps and all that stays), --madds
    (multiply-adds per sample that the deployed model executes) or --ratio (of parameters); numbers may end in k, M or
    G. The total stays within the budget and misses it by less than the smallest next step of any layer.

    writes to --out: the plan, YAML or JSON by its suffix, which you may edit by hand. Without --out it only prints.

    examples:
      epitorch plan torchvision:resnet18 --params 5.8M --out plan.yaml
      epitorch plan timm:mobilenetv2_100 --madds 150M --skip classifier --align 8
      epitorch plan epitorch:digits_cnn --ratio 2 --input 1,1,8,8 --policy front_heavy
"""
CONVERT = """
    Build a model, replace its layers by epitome layers as a plan says, and write it as a checkpoint. The epitomes are
    drawn anew (train the result), or with --init least_squares those nearest to the model's weights.

    MODEL is as for `epitorch plan`: a name, or the folder of a dense model's checkpoint. A plan for another model is
    refused, with the first layer that differs.

    writes to --out: model.safetensors and config.json, what `epitorch count` and `epitorch.checkpoint.load_checkpoint`
    read.

    examples:
      epitorch plan torchvision:resnet18 --ratio 2 --out plan.yaml
      epitorch convert torchvision:resnet18 --plan plan.yaml --out converted
      epitorch convert runs/dense --plan plan.yaml --out warm --init least_squares
      epitorch count converted
"""
EXPORT = """
    Write a checkpoint's network for another runtime: deployed (no index learners), run there once, and compared with
    torch. A file that does not compute the same is not left.

    CHECKPOINT is a folder with config.json and model.safetensors, or a run's folder. --to onnx (ONNX Runtime and
    others), openvino (.xml and .bin), pt2 (torch.export; --compiled: an AOTInductor package for this machine) or
    executorch (.pte, XNNPACK).

    --strategy size stores each epitome once and nothing made from it; reuse (default) stores the dense weight of a
    layer where no reuse applies; dense stores all weights. The comparison uses images of --data if given, else noise.

    --int8 quantises weights and activations to 8 bits (onnx: ONNX Runtime's static quantisation; openvino: NNCF, which
    needs `pip install 'epitorch[int8]'`). --calibration is the data that the network was trained on: the ranges of
    activations come from training images that were held out. The report says how far the outputs are from torch's.

    writes to --out: the file. Its folder must exist; an older file is replaced when the new one is checked.

    examples (after the one of `epitorch demo`):
      epitorch export runs/demo/epitome --to onnx --out digits.onnx --data digits
      epitorch export runs/demo/epitome --to openvino --out digits.xml --strategy size --json
      epitorch export runs/demo/epitome --to onnx --out digits-int8.onnx --int8 --calibration digits
"""
DEPLOY = """
    Find the fastest way to run a trained network on this machine, in one runtime: every strategy that applies is timed
    for each layer, then whole networks against each other (docs/deployment.md). No layer is chosen that is slower than
    a plain one. Prints how each layer runs, why, and every time that was measured; what it times it says on standard
    error.

    CHECKPOINT is a folder with config.json and model.safetensors, or a run's folder.

    writes to --out: the network as a file for the runtime, checked against torch; to --report: the numbers as JSON.
    Without the two it only prints. Times are kept in $EPITORCH_CACHE/timings.json.

    examples (after the one of `epitorch demo`):
      epitorch deploy runs/demo/epitome
      epitorch deploy runs/demo/epitome --runtime onnxruntime --out digits.onnx --data digits --report digits.json
"""
DOCTOR = """
    Print what is installed and what this machine can do: versions, extras and what is missing of them, runtimes and
    their devices, threads, GPUs, the native kernel, the cache. Writes nothing. Send it along with a bug report.

    examples:
      epitorch doctor
      epitorch doctor --json
"""
COMPLETION = """
    Print a completion script for a shell. Writes nothing.

    examples:
      epitorch completion bash > ~/.local/share/bash-completion/completions/epitorch
      epitorch completion zsh > ~/.zfunc/_epitorch
"""
BENCH = """
    Time networks side by side in torch, ONNX Runtime and OpenVINO: each round runs all of them once, one after the
    other, so that what else the machine does meets all alike. Latency with its spread, speed-up over the first
    network, throughput, bytes, peak memory, parameters and multiply-adds.

    MODEL is a model's name (fresh weights: times do not depend on them), a checkpoint's folder, or recipe:NAME, the
    network of a recipe before training. Networks with epitomes are deployed for each runtime (--strategy auto: by
    measurement). --plan FILE adds the first network, converted by that plan.

    writes to --out: the report as JSON. Without --out it only prints.

    examples:
      epitorch bench epitorch:digits_cnn --input 1,1,8,8 --runtime torch --rounds 5
      epitorch bench recipe:cifar10-short/dense recipe:cifar10-short/narrow-0.18 \\
          recipe:cifar10-short/epitome-0.18-learner --input 1,3,32,32 --batch 1 32 --out bench.json
      epitorch bench torchvision:resnet18 --plan plan.yaml --runtime onnxruntime openvino
"""
SWEEP = """
    Run what a sweep file says, several runs at a time on Ray, and sum it up: for each method mean, standard deviation,
    n, parameters and multiply-adds; for each pair with a reference the mean difference and its standard error, paired
    by seed (and fold).

    SWEEP is a YAML file, or a name under sweeps/ such as digits. It has `recipes` (names, paths, patterns such as
    esc10/*) or `recipe`; `set` and `grid` (values that replace a recipe's, by dotted key: training.epochs), `seeds`,
    `folds`, `reference`. docs/sweeps.md tells the rest.

    Kill it whenever you like: the same command keeps what is finished and goes on with the rest. A run that fails does
    not stop the others; the exit code is then 1.

    writes to --out: METHOD-seedN/ (METHOD-foldN-seedN/ for sounds; what `epitorch train` writes) and METHOD-seedN.log
    for each run, recipes/ with the replaced values; summary.json, summary.md, runs.json, and the accuracy against
    multiply-adds and against parameters as SVG and PNG.

    examples:
      epitorch sweep digits --data digits --jobs 2
      epitorch sweep esc10 --data DIR --out runs/esc10 --results results/esc10
      epitorch sweep digits --data digits --seeds 0 --max-steps 5 --out /tmp/trial
"""
REPRODUCE = """
    Run the rows of a table and print what they reach beside the paper's numbers: accuracy (mean, standard deviation,
    n), parameters, multiply-adds, and the differences.

    TABLE is a YAML file, or a name under tables/ such as cifar10; a name that is not there prints the list. --data is
    what the table asks for. --budget smoke (default) runs a few steps of every row's recipe, small enough for a CPU,
    and prints no accuracies; short runs the short recipes; full the paper's schedules (days, on GPUs).

    Kill it whenever you like: the same command keeps what is finished and goes on with the rest.

    writes to --out: table.md, table.json, and ROW-seedN/ (ROW-foldN-seedN/ for sounds) with a log for each run.

    examples:
      epitorch reproduce cifar10 --data DIR
      epitorch reproduce imagenet-ablation --data DIR --budget full --rows narrow-0.18,epitome-0.18 --seeds 3
"""
REPORT = """
    Write one self-contained page on runs: what each method reaches and costs against the dense and the narrow network,
    training curves, parameters of each layer, which part of the epitome each block takes and how the starts moved.
    Opening it fetches nothing; it is below 6 MB, works without scripts, and has every figure as a table too.

    RUN is the folder of a run, finished or not, or of a checkpoint; a folder that holds such (of `epitorch demo`,
    `epitorch sweep`); or a results.json. A run's layers are read from its checkpoint. Of several plain networks on the
    same data the largest counts as dense, smaller ones as narrow.

    --bench adds times: a network is a run's if `epitorch bench` was given the run's folder, or recipe:NAME.
    --deployment adds the strategy and the time of each layer, --dense the distance of each generated weight to that of
    a plain network (of which the run is a conversion).

    writes --out (default report.html), and to --figures and --tables a file for each figure and table.

    examples:
      epitorch report runs/demo
      epitorch report runs/dense runs/epitome --out report.html --figures figures --tables tables
      epitorch report runs/demo --bench bench.json --static --json
"""
