"""Enlarge a trained network in memory, with its optimizer, in one call."""

import re
from copy import copy
from typing import Any

from torch import nn
from torch.optim import Optimizer

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.grower.trained import is_adapted
from growlab.grower.transaction import unchanged_by_errors
from growlab.inspect.small_models import inputs_of
from growlab.widen.sizes import deepened, widened
from growlab.widths import Example


def enlarge(
    small: nn.Module,
    width: float = 1.0,
    depth: float = 1.0,
    optimizer: Optimizer | None = None,
    *,
    wide: nn.Module | None = None,
    example: Example | None = None,
    **settings: Any,
) -> tuple[nn.Module, Optimizer | None]:
    """Return a wider and deeper network with the same outputs as a trained one, and its optimizer.

    Args:
        small: the trained network, which is not changed: a transformers model, possibly with peft adapters, or any
            network if `wide` is given.
        width: factor on the residual stream, heads and hidden layers of a transformers model; a whole number if
            normalisations run over the stream.
        depth: factor on its number of layers.
        optimizer: the small network's optimizer; the same object continues with the large network's parameters and the
            carried state.
        wide: the large network of the same kind, instead of `width` and `depth`; it becomes the result.
        example: an input; None: random tokens or images for a transformers model.
        settings: arguments of `growlab.Grower.from_trained`, such as `method` and `layers`.

    Returns:
        The large network, an ordinary one, and `optimizer`.

    Raises:
        UserError: sizes would not be whole, or the large network would compute something else. The optimizer is then
            unchanged.
    """
    config = getattr(small, "config", None)
    trains = {_kind(name) for name, parameter in small.named_parameters() if parameter.requires_grad}
    built = wide is None
    if wide is None:
        if not hasattr(config, "to_dict"):
            raise UserError(f"{type(small).__name__} is no transformers model: give the large network as wide=.")
        larger = deepened(widened(config, width, ("stream", "heads", "mlp")), depth)
        first = next(small.parameters())
        adapted: Any = small if is_adapted(small) else None
        base = small if adapted is None else adapted.get_base_model()
        wide = type(base)(larger).to(first.device, first.dtype)
        if adapted is not None:
            wide = _adapted(wide, adapted, depth)
        if width != 1 and {p.shape for p in small.parameters()} == {p.shape for p in wide.parameters()}:
            raise UserError(
                f"{type(base).__name__} does not become wider with its configuration's sizes: give the large network "
                "as wide=."
            )
        wide.train(small.training)
    if example is None:
        if not hasattr(config, "to_dict"):
            raise UserError(f"{type(small).__name__} is no transformers model: give an example of its input.")
        example = inputs_of(small)
    optimizers = [] if optimizer is None else [optimizer]
    with unchanged_by_errors(optimizers):
        grower = Grower.from_trained(small, wide, example, optimizer=optimizers, verbose=False, **settings)
        grower.step()
        for name, parameter in wide.named_parameters() if built else ():
            parameter.requires_grad_(_kind(name) in trains)
        return grower.finish(), optimizer


def _adapted(wide: nn.Module, small: Any, depth: float) -> nn.Module:
    """Give a network the adapters of a small one, with the same ones active."""
    result: Any = None
    for name, old_config in small.peft_config.items():
        config = copy(old_config)
        if depth != 1 and not isinstance(config.target_modules, str):
            # peft has expanded "all-linear" to the small network's layer names; use those of all layers.
            config.target_modules = {re.split(r"\.\d+\.", target)[-1] for target in config.target_modules}
        if result is None:
            result = type(small)(wide, config, name)
        else:
            result.add_adapter(name, config)
    active = small.active_adapters
    if idle := next((name for name in small.peft_config if name not in active), None):
        raise UserError(
            f"the adapter {idle} is not active, so the forward does not run it: activate all while the model grows, "
            f"model.base_model.set_adapter({[*small.peft_config]})."
        )
    result.base_model.set_adapter(active)
    grown: nn.Module = result
    return grown


def _kind(name: str) -> str:
    """Name of a parameter with layer indices replaced by `*`."""
    return re.sub(r"\d+", "*", name)
