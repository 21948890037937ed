"""Models without weights in memory: built for their shapes, and run with tensors that are read on demand."""

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from growlab.base.errors import UserError, first_line
from growlab.growth.outputs import arithmetic, main_output, without_side_effects
from growlab.inspect.small_models import FirstOutput

#: Yields the tensor of a name in consecutive blocks of rows.
Blocks = Callable[[str], Iterator[Tensor]]

# Names of functions that read a shape or a dtype.
_METADATA = (
    *("__get__", "is_floating_point", "is_complex", "size", "dim", "ndimension"),
    *("numel", "nelement", "stride", "is_contiguous"),
)


def skeleton(kind: Any, config: Any) -> nn.Module:
    """Build a model of transformers in eval mode whose parameters take no memory; only buffers have values."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # A parameter that is on the meta device already is tied to another one.
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(on_meta)
    config = copy.deepcopy(config)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
            warnings.simplefilter("ignore")
            torch.default_generator.manual_seed(0)
            model: nn.Module = kind._from_config(config, dtype=torch.float32).eval()
    except (ValueError, RuntimeError, IndexError, TypeError, KeyError, AssertionError, AttributeError) as error:
        raise UserError(f"transformers builds no {kind.__name__} of these sizes: {first_line(error)}") from error
    finally:
        handle.remove()
    set_precision(model, torch.float32)
    return model


def set_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Set the dtype of parameters and buffers; parameters are not written to, so that they take no memory."""
    converted: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in converted:
                    new_dtype = dtype if parameter.is_floating_point() else parameter.dtype
                    empty = torch.empty(parameter.shape, dtype=new_dtype)
                    converted[id(parameter)] = nn.Parameter(empty, requires_grad=False)
                module._parameters[name] = converted[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def output_of(
    network: FirstOutput,
    probe: Sequence[Tensor],
    names: Mapping[str, str],
    blocks: Blocks,
    watched: Collection[str] = (),
) -> tuple[Tensor, set[str]]:
    """Run a skeleton in float64, with weights that `blocks` reads when its forward needs them.

    `names` maps names of its tensors to those for `blocks`. Returns the output, and the paths in `watched` of modules
    whose outputs are added to something.
    """
    set_precision(network, torch.float64)
    tensors = network.network.state_dict(keep_vars=True)
    inputs = [x.double() if x.is_floating_point() else x for x in probe]
    mode = _OnDemand({id(tensors[own]): name for own, name in names.items()}, blocks)
    with ExitStack() as hooks:
        for path in watched:
            hooks.enter_context(network.get_submodule(path).register_forward_hook(partial(mode.watch, path)))
        # The mode is entered last, because `without_side_effects` copies tensors, which would read each of them.
        with without_side_effects(network), mode:
            return main_output(network(*inputs)), mode.summands


class _OnDemand(TorchFunctionMode):
    """Replace tensors without values by those that `blocks` yields, in every call of a function."""

    def __init__(self, names: Mapping[int, str], blocks: Blocks) -> None:
        super().__init__()
        self._names, self._read = names, blocks
        self._last: tuple[str, Tensor] | None = None
        self._watched: dict[int, tuple[str, Tensor]] = {}
        self.summands: set[str] = set()

    def watch(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self._watched[id(output)] = (path, output)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "").strip("_") in ("add", "iadd", "radd"):
            self.summands |= {self._watched[id(arg)][0] for arg in args if id(arg) in self._watched}
        if func is F.embedding and (name := self._name(args[1] if len(args) > 1 else kwargs.get("weight"))):
            return self._embedding(args[0] if args else kwargs["input"], name)
        if func is F.linear and len(args) > 1 and (name := self._name(args[1])):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            out = torch.cat([F.linear(args[0], block.double()) for block in self._blocks(name)], -1)
            return out if bias is None else out + self._value(bias)
        if getattr(func, "__name__", "") in _METADATA:
            result = func(*args, **kwargs)
            # `weight.T` is a tensor and needs values.
            if not isinstance(result, Tensor):
                return result
        args, kwargs = tree_map_only(Tensor, self._value, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def _name(self, tensor: Any) -> str | None:
        return self._names.get(id(tensor))

    def _blocks(self, name: str) -> Iterator[Tensor]:
        blocks = self._read(name)
        while True:
            # Weights are computed outside of the modes that the network runs in.
            with arithmetic():
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def _value(self, tensor: Tensor) -> Tensor:
        name = self._name(tensor)
        if name is None:
            return tensor
        if self._last is None or self._last[0] != name:
            blocks = [block.double() if block.is_floating_point() else block for block in self._blocks(name)]
            self._last = (name, blocks[0] if len(blocks) == 1 else torch.cat(blocks))
        return self._last[1]

    def _embedding(self, index: Tensor, name: str) -> Tensor:
        start, out = 0, None
        for block in self._blocks(name):
            inside = (index >= start) & (index < start + len(block))
            if out is None:
                out = torch.zeros(*index.shape, block.shape[1], dtype=torch.float64)
            out[inside] = block[index[inside] - start].double()
            start += len(block)
        assert out is not None
        return out
