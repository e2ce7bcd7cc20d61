"""Models by name: `epitorch:NAME`, `timm:NAME`, `torchvision:NAME` or `package.module:factory`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from epitorch.errors import EpitorchError, InputError, explain, require, suggest

OWN_MODELS = {
    "efficientnet": "epitorch.models.efficientnet:efficientnet",
    "mobilenetv2": "epitorch.models.mobilenetv2:mobilenetv2",
    "digits_cnn": "epitorch.models.small:digits_cnn",
    "resnet20": "epitorch.models.resnet:resnet20",
    "soundnet8": "epitorch.models.audio:soundnet8",
}
FORMS = "epitorch:NAME, timm:NAME, torchvision:NAME or package.module:factory"

_ORIGIN = "_epitorch_origin"

Factory = Callable[..., Any]


@dataclass(frozen=True)
class Origin:
    """How a model was built: its name and the arguments of its factory."""

    name: str
    arguments: Mapping[str, Any]


def origin_of(model: nn.Module) -> Origin | None:
    """Return what `build_model` built the model from; None for another model."""
    return model.__dict__.get(_ORIGIN)


def build_model(name: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a model from its name.

    Args:
        name: `epitorch:mobilenetv2`, `timm:mobilenetv2_100`, `torchvision:resnet18`, `package.module:factory`.
        arguments: Keyword arguments of the factory, `num_classes` for example.

    Returns:
        The model in training mode, as its factory leaves it.

    Raises:
        InputError: If there is no such model, or it does not take these arguments.
        MissingExtraError: If timm or torchvision is not installed.

    Example:
        >>> model = build_model("epitorch:mobilenetv2", {"num_classes": 10, "cifar": True})
    """
    factory = find_factory(name)
    given = dict(arguments or {})
    _check_arguments(name, factory, given)
    try:
        model = factory(**given)
    except EpitorchError:
        raise
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError) as error:
        raise _wrong_arguments(name, given, error) from error
    if not isinstance(model, nn.Module):
        raise InputError(
            explain(
                "the factory did not return a model",
                expected="a torch.nn.Module",
                got=type(model).__name__,
                where=name,
            )
        )
    model.__dict__[_ORIGIN] = Origin(name, given)
    return model


def is_library_name(name: str) -> bool:
    """Say whether the name belongs to epitorch, timm or torchvision, so that building it runs no foreign code."""
    return name.partition(":")[0] in ("epitorch", "timm", "torchvision")


def find_factory(name: str) -> Factory:
    """Return the function that builds the model.

    Raises:
        InputError: If the name has no known form or nothing of that name exists.
    """
    library, colon, rest = name.partition(":")
    if not colon or not library or not rest:
        raise InputError(
            explain("the model's name has no known form", expected=FORMS, got=repr(name), fix=_form_hint(name))
        )
    if library == "timm":
        return _timm_factory(rest)
    if library == "torchvision":
        return _torchvision_factory(rest)
    if library == "epitorch":
        if rest not in OWN_MODELS:
            raise _unknown("epitorch", rest, list(OWN_MODELS))
        library, _, rest = OWN_MODELS[rest].partition(":")
    return _imported_factory(library, rest, name)


def _form_hint(name: str) -> str | None:
    return f"perhaps epitorch:{name}" if name in OWN_MODELS else None


def _timm_factory(name: str) -> Factory:
    timm = require("timm", "models")
    # timm's own look-up would also fetch a name such as `hf-hub:...` from the network.
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    return _Named(timm.create_model, name)


def _torchvision_factory(name: str) -> Factory:
    models = require("torchvision", "models").models
    known = models.list_models()
    if name not in known:
        raise _unknown("torchvision", name, known)
    return _Named(models.get_model, name)


class _Named:
    """A library's general factory with the model's name filled in."""

    def __init__(self, create: Factory, name: str) -> None:
        self.create, self.name = create, name

    def __call__(self, **arguments: Any) -> Any:
        return self.create(self.name, **arguments)


def _imported_factory(module_name: str, attribute: str, name: str) -> Factory:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it needs is not
        raise InputError(
            explain(
                f"there is no module '{module_name}'",
                expected=FORMS,
                got=repr(name),
                fix="install the package, or set PYTHONPATH to the folder that holds it",
            )
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise _unknown(module_name, attribute, known)
    return factory


def _unknown(library: str, name: str, known: list[str]) -> InputError:
    shown = ", ".join(known) if len(known) <= 8 else f"one of its {len(known)} models"
    return InputError(
        explain(f"'{library}' has no model '{name}'{suggest(name, known)}", expected=shown, got=repr(name))
    )


def _check_arguments(name: str, factory: Factory, given: dict[str, Any]) -> None:
    try:
        inspect.signature(factory).bind(**given)
    except TypeError as error:
        raise _wrong_arguments(name, given, error) from error
    except ValueError:  # a built-in without a signature: the call itself will tell
        return


def _wrong_arguments(name: str, given: dict[str, Any], error: Exception) -> InputError:
    return InputError(
        explain(
            f"the model cannot be built with these arguments ({error})",
            expected="arguments that its factory takes",
            got=repr(given),
            where=name,
        )
    )
