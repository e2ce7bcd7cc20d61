"""`save_pretrained` and `from_pretrained`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from epitorch.checkpoint._alike import first_difference
from epitorch.checkpoint._build import Factory, load_state, rebuild
from epitorch.checkpoint._data import FACTORY, CheckpointConfig, EpitomeDtype, ModelInput
from epitorch.checkpoint._folder import check_free, named
from epitorch.checkpoint._guard import limits
from epitorch.checkpoint._hub import fetched
from epitorch.checkpoint._save import load_checkpoint, save_checkpoint
from epitorch.checkpoint._source import find_input, find_source, known_config, plan_of
from epitorch.cost import Cost, count
from epitorch.errors import CheckpointError, InputError, check_is_model, explain

_PARTS = ("params", "params_epitome", "params_routing", "madds", "madds_paper", "madds_dense")


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    backbone: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    dtype: EpitomeDtype | None = None,
    learner: bool = False,
    example_input: Tensor | tuple[Any, ...] | None = None,
    input: ModelInput | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model as `model.safetensors`, `config.json` and `README.md`: the checkpoint that `epitorch train` writes.

    Where the backbone comes from is known for models of `epitorch train`, `from_pretrained`, `build_model` and timm.
    What is written is rebuilt once: its tensors must fit, and every module must be of the same class, set up alike.
    A model whose backbone is not known is written all the same;
    loading it then takes `factory=`.

    Args:
        model: A dense or converted model; a deployed one is not a checkpoint.
        folder: Made if missing; other files in it are left alone, an older checkpoint is replaced.
        backbone: `timm:NAME`, `torchvision:NAME`, `epitorch:NAME` or `package.module:factory`.
        arguments: Keyword arguments of the backbone's factory.
        dtype: Store float32 epitomes as "float16", "bfloat16" or "int8" (one scale for each output channel); they are
            float32 again when read. None stores all as it is.
        learner: Keep the index learners, to go on training. Without them routing maps are stored as frozen.
        example_input: Counts multiply-adds for the card, as for `epitorch.count`.
        input: Preprocessing and labels; default those of the checkpoint that the model came from, or timm's.
        metrics: Numbers for the card, accuracies say.

    Returns:
        The folder.

    Raises:
        CheckpointError: If the model is not what backbone and arguments build, or its state is not only tensors.
        InputError: If there is no such backbone, the epitomes cannot be stored so, or the folder is a file or holds
            files of these names that are no checkpoint of ours.

    Example:
        >>> from epitorch.models.resolve import build_model
        >>> import tempfile
        >>> model = build_model("epitorch:digits_cnn", {"widths": [4, 8]})
        >>> folder = save_pretrained(model, tempfile.mkdtemp())
        >>> sorted(path.name for path in folder.iterdir())
        ['README.md', 'config.json', 'model.safetensors']
    """
    check_is_model(model)
    check_free(Path(folder))
    config = describe(model, backbone, arguments, input, metrics or {})
    if example_input is not None:
        config = replace(config, cost=cost_numbers(count(model, example_input)), input_shape=_shape(example_input))
    if not config.model.startswith(FACTORY):
        _check_rebuilds(model, config, Path(folder))
    return save_checkpoint(folder, model, config, learner=learner, dtype=dtype)


def describe(
    model: nn.Module,
    backbone: str | None,
    arguments: Mapping[str, Any] | None,
    given: ModelInput | None,
    metrics: Mapping[str, Any],
) -> CheckpointConfig:
    """The configuration of a model, from what is given and what the model tells."""
    if backbone is None and arguments is not None:
        raise InputError(explain("arguments without a backbone", expected="backbone= as well", got=dict(arguments)))
    source, old = find_source(model), known_config(model)
    name = backbone or source.model or f"{FACTORY}{type(model).__name__}"
    values = dict(arguments or {}) if backbone is not None else source.arguments
    return CheckpointConfig(
        name,
        values,
        plan_of(model),
        given or find_input(model),
        None if old is None else old.batch_size,
        dict(metrics),
        {} if old is None else old.recipe,
        None if old is None else old.input_shape,
    )


def cost_numbers(cost: Cost) -> dict[str, int]:
    """The totals of a cost that a checkpoint states."""
    return {name: getattr(cost, name) for name in _PARTS}


def _shape(example: Tensor | tuple[Any, ...]) -> tuple[int, ...] | None:
    return tuple(example.shape) if isinstance(example, Tensor) else None


def _check_rebuilds(model: nn.Module, config: CheckpointConfig, folder: Path) -> None:
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    size = sum(value.numel() * value.element_size() for value in state.values())
    try:
        built = rebuild(config, folder, limits(64 * size, len(state), None), allow_factory=True, factory=None)
        load_state(built, {name: value.detach().clone() for name, value in state.items()}, None, folder, config.model)
    except CheckpointError as error:
        raise _not_this_model(config, "a backbone that has the model's tensors", error) from error
    difference = first_difference(model, built)
    if difference:
        raise _not_this_model(config, "the same modules, set up alike", difference)


def _not_this_model(config: CheckpointConfig, expected: str, got: object) -> CheckpointError:
    return CheckpointError(
        explain(
            f"'{config.model}' with the arguments {config.arguments} does not build this model",
            expected=expected,
            got=got,
            fix="give backbone= and arguments= as the model was made; one that was changed by hand needs a factory",
        )
    )


def from_pretrained(
    source: str | Path,
    *,
    factory: Factory | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    token: str | None = None,
    max_bytes: int | None = None,
) -> nn.Module:
    """Rebuild a model from a folder, a run or the Hub. No pickle is read, and no code is run that the files name.

    Args:
        source: A folder with `model.safetensors` and `config.json`, the folder of a run, or `OWNER/NAME` on the
            Hugging Face Hub; a folder of that name comes first.
        factory: Build the backbone with this function of the stored arguments: for networks of your own.
        revision: Branch, tag or commit on the Hub.
        local_files_only: Take what is in the Hub's cache, fetch nothing; so does HF_HUB_OFFLINE=1.
        token: Of the Hub, for private models; default the one that `hf auth login` stored.
        max_bytes: Room for building it; see `load_checkpoint`.

    Returns:
        The model in eval mode on the CPU.

    Raises:
        CheckpointError: If files are missing or damaged, of a newer major format, or do not describe a model that
            timm, torchvision, epitorch or `factory` builds.
        HubError: If the Hub cannot be reached, or has no such model.
    """
    folder = named(source)
    if not folder.is_dir():
        folder = fetched(str(source), revision, local_files_only, token)
    return load_checkpoint(folder, factory=factory, max_bytes=max_bytes).model
