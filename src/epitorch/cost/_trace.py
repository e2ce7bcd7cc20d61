"""Run a model once and watch: positions of each counted layer, and multiply-adds that none of them owns."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from epitorch.cost.formulas import Kind
from epitorch.errors import InputError, explain
from epitorch.nn import EpitomeLayer, EpitomeLinear

_VECTOR_PRODUCTS = {
    "aten.mv": 0,
    "aten.addmv": 1,
    "aten.dot": 0,
    "aten.vdot": 0,
}  # argument with one MAdd an element
_ATTENTION = ("aten._scaled_dot_product_flash_attention_for_cpu",)  # torch has formulas for the CUDA ones only
_MIXING = {  # of a deployed layer, per element of the result
    "aten.lerp.Scalar": 2,
    "aten.lerp.Tensor": 2,
    "aten.add_.Tensor": 1,
    "aten.sub_.Tensor": 1,
}
_TORCHS_OWN = (
    "aten",
    "prim",
    "prims",
    "profiler",
    "inductor",
    "higher_order",
)  # other libraries' operators are unknown
_OPAQUE = (
    "_native_multi_head_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_transformer_encoder_layer_fwd",
    "_trilinear",
    "mkldnn_rnn_layer",
    "_cudnn_rnn",
    "miopen_rnn",
    "_cdist_forward",
    "_fft_r2c",
    "_fft_c2c",
    "_fft_c2r",
    "_addmm_activation",
    "_grouped_mm",
    "_int_mm",
    "addbmm",
    "ormqr",
)  # these multiply and add, but torch has no formula for them


@dataclass
class Calls:
    """What one counted module did, summed over its calls and the batch."""

    module: nn.Module
    count: int = 0
    in_positions: int = 0
    out_positions: int = 0
    read_positions: int = 0  # of the padded input, from the first to the last that the outputs read
    observed: int = 0  # multiply-adds that torch's operators did inside


@dataclass
class Trace:
    """Record of one forward pass.

    Args:
        batch: Samples in the example.
        calls: By qualified name, every counted module, called or not.
        foreign: Operations outside of counted modules, by (module, operator); None where unknown.
        output: What the model returned.
    """

    batch: int
    calls: dict[str, Calls]
    foreign: dict[tuple[str, str], int | None] = field(default_factory=dict)
    output: Any = None

    def per_sample(self, amount: int) -> int:
        """Divide the batch out, rounded up where work does not grow with the batch."""
        return -(-amount // max(self.batch, 1))


def as_arguments(example_input: Any) -> tuple[Any, ...]:
    """The model's positional arguments, copied: a model may write into its input."""
    arguments = example_input if isinstance(example_input, tuple) else (example_input,)
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), arguments)


def sample_shapes(arguments: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    """Of all tensors among a model's arguments, without the axis of the batch."""
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    batch = shapes[0][:1] if shapes else ()
    return tuple(shape[1:] if shape[:1] == batch else shape for shape in shapes)


def eval_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode. Old weight normalisation and pruning keep a tensor with a history, which is cut off."""
    attributes = [value for module in model.modules() for value in vars(module).values()]
    derived = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
    with quiet(model):
        return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in derived}).eval()


def trace(model: nn.Module, arguments: tuple[Any, ...]) -> Trace:
    """Run `model` (already a copy in eval mode) on the arguments and record.

    Raises:
        InputError: If the arguments hold no tensor.
    """
    record = Trace(_batch(arguments), {name: Calls(module) for name, module in counted_modules(model)})
    watch = _Watch(record, next(tensors(arguments)).shape)
    with quiet(model), watch.hooks(model), watch:
        record.output = model(*arguments)
    if watch.unbatched:
        record.batch = 1
    return record


def counted_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each convolution, linear and epitome layer; index learners are left out."""
    hidden = {id(part) for module in epitome_layers(model) for part in module.modules() if part is not module}
    for name, module in model.named_modules():
        if isinstance(module, EpitomeLayer | _ConvNd | nn.Linear) and id(module) not in hidden:
            yield name, module


def deployed_layers(model: nn.Module) -> list[Any]:
    """Layers that `deploy` made to run on their epitome, once each: they have an epitome but no learner to train."""
    return [module for module in model.modules() if _is_deployed(module)]


def _is_deployed(module: nn.Module) -> bool:
    """By what it has: the deployed classes are built on top of this package."""
    return isinstance(getattr(module, "epitome", None), nn.Parameter) and not isinstance(module, EpitomeLayer)


def epitome_layers(model: nn.Module) -> list[EpitomeLayer]:
    """Every epitome layer once."""
    return [module for module in model.modules() if isinstance(module, EpitomeLayer)]


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """No gradients, no inference tensors, attention in separate operators; random generators as they were."""
    devices = {t.device.index or 0 for t in model.parameters() if t.device.type == "cuda"}
    fused = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=sorted(devices)))
        stack.callback(torch.backends.mha.set_fastpath_enabled, fused)
        torch.backends.mha.set_fastpath_enabled(False)
        yield


class _Watch(TorchDispatchMode):
    """Attributes every operator to the innermost counted module that is running."""

    def __init__(self, record: Trace, example: torch.Size) -> None:
        super().__init__()
        self.record = record
        self.stack: list[tuple[str, Calls | None]] = []
        self.deployed: set[str] = set()
        self.unbatched: bool | None = None  # not known before the first convolution
        self.example = example

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Follow which module runs; the hooks go away again."""
        handles = []
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks; its operators count for the module around it
            calls = self.record.calls.get(name)
            if _is_deployed(module):
                self.deployed.add(name)
            handles.append(module.register_forward_pre_hook(partial(self._enter, name, calls), prepend=True))
            handles.append(module.register_forward_hook(partial(self._leave, calls), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, calls: Calls | None, module: nn.Module, args: Any) -> None:
        self.stack.append((name, calls))

    def _leave(self, calls: Calls | None, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        name, _ = self.stack.pop()
        source = args[0] if args else kwargs.get("input")
        if not isinstance(source, Tensor) or not isinstance(output, Tensor):
            return
        if self.unbatched is None and (calls is not None or name in self.deployed):
            self.unbatched = self._is_unbatched(module, source)
        if calls is None:
            return
        sizes = channel_sizes(module)
        calls.count += 1
        calls.in_positions += source.numel() // sizes[0]
        calls.out_positions += output.numel() // sizes[1]
        calls.read_positions += _read_positions(module, output)

    def _is_unbatched(self, module: Any, source: Tensor) -> bool | None:
        """Whether a convolution was given the example as one sample; None if the module is no convolution.

        A loop over the batch gives it single samples too, but of fewer axes, or with a channel axis of their own.
        """
        kernel = getattr(module, "kernel_size", None)
        if is_linear(module) or not isinstance(kernel, tuple):
            return None
        if source.dim() == len(kernel) + 1:
            return len(source.shape) == len(self.example) and source.shape[0] == self.example[0]
        return source.shape == (1, *self.example)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        madds = _madds(func, args, kwargs or {}, output)
        if str(func) in _MIXING and self.stack and self.stack[-1][0] in self.deployed:
            madds = _MIXING[str(func)] * output.numel()
        if madds != 0:
            self._attribute(func, madds)
        return output

    def _attribute(self, func: Any, madds: int | None) -> None:
        owner = next((calls for _, calls in reversed(self.stack) if calls is not None), None)
        if owner is not None and madds is not None:
            owner.observed += madds
            return
        key = (self.stack[-1][0] if self.stack else "", str(func._overloadpacket).removeprefix("aten."))
        before = self.record.foreign.get(key, 0)
        self.record.foreign[key] = None if madds is None or before is None else before + madds


def is_linear(module: nn.Module) -> bool:
    """Dense or epitome linear layer."""
    return isinstance(module, nn.Linear | EpitomeLinear)


def _read_positions(module: Any, output: Tensor) -> int:
    """Samples times positions of the padded input that the outputs span, at stride 1."""
    if is_linear(module):
        return output.numel() // module.out_features
    stride = (1,) * len(module.kernel_size) if module.transposed else module.stride
    axes = zip(output.shape[-len(stride) :], stride, module.dilation, module.kernel_size, strict=True)
    space = prod(max(0, (n - 1) * s + d * (k - 1) + 1) for n, s, d, k in axes)
    return space * prod(output.shape[: -1 - len(stride)])


def channel_sizes(module: Any) -> tuple[int, int]:
    """Input and output channels of a counted module."""
    if is_linear(module):
        return module.in_features, module.out_features
    return module.in_channels, module.out_channels


def _madds(func: Any, args: Any, kwargs: Any, output: Any) -> int | None:
    """Multiply-adds of one operator, 0 for the many that have none, None where they are unknown."""
    from torch.utils.flop_counter import flop_registry  # here: it imports triton, a tenth of a second

    packet = func._overloadpacket
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=output) // 2
    name = str(packet)
    if name in _ATTENTION:
        query, key, value = (argument.shape for argument in args[:3])
        return query.numel() * key[-2] + query[:-1].numel() * key[-2] * value[-1]
    if name in _VECTOR_PRODUCTS:
        return args[_VECTOR_PRODUCTS[name]].numel()
    return None if name.rpartition(".")[2] in _OPAQUE or func.namespace not in _TORCHS_OWN else 0


def operator_kind(operator: str) -> Kind:
    """Kind of a counted operator by torch's name, as `Trace.foreign` has it."""
    if operator in {name.removeprefix("aten.").partition(".")[0] for name in _MIXING}:
        return "interpolation"
    if "attention" in operator:
        return "attention"
    return "convolution" if "conv" in operator else "matrix product"


def _batch(arguments: tuple[Any, ...]) -> int:
    tensor = next(tensors(arguments), None)
    if tensor is None:
        raise InputError(
            explain(
                "the example input holds no tensor",
                expected="a tensor, or a tuple of the model's arguments with a tensor among them",
                got=", ".join(type(argument).__name__ for argument in arguments) or "nothing",
            )
        )
    indices = tensor.dim() == 1 and not tensor.is_floating_point()
    return tensor.shape[0] if tensor.dim() > 1 or indices else 1


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors(vars(value))
