"""Change a network's widths in place: the only code that replaces parameters, buffers and plain tensors of modules.

Attributes for sizes (`in_channels`, `num_features`, ...) are updated, so that the narrowed network is an ordinary
module of its class at other widths.
"""

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from growlab.base.devices import on_cpu
from growlab.base.errors import UserError
from growlab.base.pieces import is_piece, placed
from growlab.widths.groups import Axis, WidthGraph
from growlab.widths.places import write
from growlab.widths.unchanged import TENSOR_HOOKS

# Part of an axis: start, number of runs, length of each run, number of kept positions in each run.
_Block = tuple[int, int, int, int]

# Module class, its attribute for a size, and the tensor and dimension that determine the size.
_BOOKKEEPING: tuple[tuple[type[nn.Module], str, str, int], ...] = (
    (nn.Linear, "in_features", "weight", 1),
    (nn.Linear, "out_features", "weight", 0),
    (nn.Conv1d, "out_channels", "weight", 0),
    (nn.Conv2d, "out_channels", "weight", 0),
    (nn.Conv3d, "out_channels", "weight", 0),
    (nn.PReLU, "num_parameters", "weight", 0),
    (nn.Embedding, "num_embeddings", "weight", 0),
    (nn.Embedding, "embedding_dim", "weight", 1),
    (nn.EmbeddingBag, "embedding_dim", "weight", 1),
    (nn.GroupNorm, "num_channels", "weight", 0),
    (nn.RNNBase, "input_size", "weight_ih_l0", 1),
    (nn.RNNCellBase, "input_size", "weight_ih", 1),
    (nn.RNNCellBase, "hidden_size", "weight_hh", 1),
)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# Attribute of layer and RMS normalisations, in torch and in other libraries.
_NORMALISED = "normalized_shape"
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Places:
    """Modules and attributes of a network's parameters, buffers and plain tensors; valid until one is replaced.

    `tensors` maps a name to the module, its attribute and the tensor; `owners` maps a tensor's id to all such modules
    and attributes.
    """

    def __init__(self, model: nn.Module, graph: WidthGraph) -> None:
        self.tensors = dict(_named_tensor_places(model))
        self.owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module, attribute, tensor in self.tensors.values():
            self.owners.setdefault(id(tensor), []).append((module, attribute))
        # The tensors that a parametrised tensor is computed from are in submodules of its module.
        self._bearers = {
            part: module
            for module in model.modules()
            # Checked first, because getattr of a missing attribute of a module is slow.
            if "parametrizations" in module._modules and is_parametrized(module)
            for part in module.get_submodule("parametrizations").modules()
        }
        weights = (self.tensors[layer.weight][2] for layer in graph.layers if layer.depthwise)
        self.depthwise = {self.bearer(module) for weight in weights for module, _ in self.owners[id(weight)]}

    def bearer(self, module: nn.Module) -> nn.Module:
        """Return the module whose parametrised tensor a module belongs to, else the module itself."""
        return self._bearers.get(module, module)


def replace_tensors(
    model: nn.Module,
    graph: WidthGraph,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    places: Places | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Replace parameters, buffers and plain tensors of modules by new tensors.

    Parameters become new `nn.Parameter`s (autograd keeps the old shape of an old one), with the old one's class,
    `requires_grad`, attributes, hooks, dtype, device and memory format; a tensor shared by several modules stays
    shared. An optimizer that still has an old one raises a UserError at its next step.

    Args:
        model: changed in place.
        graph: its width graph.
        tensors: new content by name, or an iterable of (name, content), which is read one by one; for a DTensor, the
            full tensor.
        places: places of the model's tensors; None: find them.

    Returns:
        Old and new tensor by name.

    Raises:
        KeyError: the model has no tensor of that name.
    """
    places = places or Places(model, graph)
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    replaced = {name: (old := places.tensors[name][2], _like(content, old)) for name, content in pairs}
    _place(model, places, graph, {name: new for name, (_, new) in replaced.items()})
    note_replaced((name, *both) for name, both in replaced.items())
    return replaced


def restore_tensors(model: nn.Module, graph: WidthGraph, replaced: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Undo `replace_tensors`: put the original parameter and buffer objects back into the network.

    Args:
        model: changed in place.
        graph: its width graph.
        replaced: the return value of `replace_tensors`.
    """
    _place(model, Places(model, graph), graph, {name: old for name, (old, _) in replaced.items()})
    note_restored(replaced.values())


@on_cpu
def resize(model: nn.Module, graph: WidthGraph, widths: Mapping[str, int], new_widths: Mapping[str, int]) -> None:
    """Give every group a new width, in place: first channels are kept, added ones are zero.

    Args:
        model: the network that `graph` was traced from, at `widths`.
        graph: its width graph.
        widths: width of each group now.
        new_widths: width of each group afterwards; may be above the full width.

    Raises:
        ValueError: a new width is below 1.
    """
    for name in graph.groups:
        if new_widths[name] < 1:
            raise ValueError(f"width {new_widths[name]} of {name} leaves no channel; take at least 1")
    tensors = {
        name: resized(tensor, graph.axes[name], widths, new_widths)
        for name, tensor in tensors_of(model, graph).items()
        if graph.changes(name, widths, new_widths)
    }
    replace_tensors(model, graph, tensors)
    avoid_unsafe_kernels(model)


def resized(tensor: Tensor, axes: tuple[Axis, ...], widths: Mapping[str, int], new_widths: Mapping[str, int]) -> Tensor:
    """Resize a tensor to new widths: entries of kept channels move to their new positions, the others are zero."""
    result = tensor.new_zeros([axis.length(new_widths) for axis in axes])
    # In blocks, which is many times faster than by indices.
    for blocks in product(*(_blocks(axis, widths, new_widths) for axis in axes)):
        _block(result, [new for _, new in blocks]).copy_(_block(tensor, [old for old, _ in blocks]))
    return result


def _blocks(axis: Axis, widths: Mapping[str, int], new_widths: Mapping[str, int]) -> list[tuple[_Block, _Block]]:
    """Return the kept block of each part of an axis, before and after."""
    blocks: list[tuple[_Block, _Block]] = []
    old = new = 0
    for part in axis.parts:
        before, after = part.length(widths), part.length(new_widths)
        kept = min(before, after) // part.outer
        blocks.append(((old, part.outer, before // part.outer, kept), (new, part.outer, after // part.outer, kept)))
        old, new = old + before, new + after
    return blocks


def _block(tensor: Tensor, blocks: Sequence[_Block]) -> Tensor:
    for dim, (start, outer, length, kept) in reversed(list(enumerate(blocks))):
        if outer == 1:
            tensor = tensor.narrow(dim, start, kept)
        else:
            runs = tensor.narrow(dim, start, outer * length).unflatten(dim, (outer, length))
            tensor = runs.narrow(dim + 1, 0, kept)
    return tensor


def grid(positions: Sequence[Tensor | slice], device: torch.device | None = None) -> tuple[Tensor | slice, ...]:
    """Return the index of the sub-tensor at the given positions of each dimension, for reading and writing.

    Runs of consecutive positions become slices, which are many times faster. The result of indexing may therefore be
    a view.
    """
    runs = [each if isinstance(each, slice) else as_run(each) for each in positions]
    if sum(isinstance(each, Tensor) for each in runs) <= 1:
        # With slices, a single index tensor keeps the order of dimensions; several may not.
        return tuple(each.to(device) if isinstance(each, Tensor) else each for each in runs)
    last = len(runs) - 1
    listed = [torch.arange(each.start, each.stop) if isinstance(each, slice) else each for each in runs]
    return tuple(each.to(device).view(-1, *[1] * (last - dim)) for dim, each in enumerate(listed))


def as_run(positions: Tensor) -> Tensor | slice:
    """Return consecutive positions as a slice, others as they are."""
    # In numpy, because small operations of torch are many times slower under the dispatch mode of an event.
    array = positions.cpu().numpy()
    if not len(array):
        return slice(0, 0)
    first, last = int(array[0]), int(array[-1])
    consecutive = last - first == len(array) - 1 and bool((array[1:] > array[:-1]).all())
    return slice(first, last + 1) if consecutive else positions


def tensors_of(model: nn.Module, graph: WidthGraph) -> dict[str, Tensor]:
    """Return the parameters, buffers and plain tensors of modules in `graph.axes`, detached, by name.

    Raises:
        UserError: the model has lost one since it was traced.
    """
    places = dict(_named_tensor_places(model))
    # Pruning and the old weight_norm leave a plain tensor of the weight's name.
    plain = {name for name, (module, attribute, _) in places.items() if attribute in vars(module)}
    plain = {name for name in plain - graph.constants.keys() if graph.grows(name)}
    if lost := [name for name in graph.axes if name not in places or name in plain]:
        raise UserError(
            f"{lost[0]}, which grows, is no parameter or buffer of the network any more; prune, parametrise or replace "
            "modules before growlab traces the network, or after growth has ended."
        )
    return {name: places[name][2].detach() for name in graph.axes}


def _like(content: Tensor, old: Tensor) -> Tensor:
    new = placed(content, old)
    if (last := _CHANNELS_LAST.get(old.dim())) is not None and not old.is_contiguous():
        new = new.contiguous(memory_format=last)
    if not is_piece(new) and new.data_ptr() == content.data_ptr():
        new = new.clone()
    if not isinstance(old, nn.Parameter):
        vars(new).update(vars(old))
        return new
    parameter = nn.Parameter(new, requires_grad=old.requires_grad)
    if type(old) is not nn.Parameter and issubclass(type(old), nn.Parameter):
        # A user's subclass, without calling its constructor.
        subclassed: Any = parameter.detach().as_subclass(type(old))
        parameter = subclassed.requires_grad_(old.requires_grad)
    parameter.__dict__.update(old.__dict__)
    for hooks in TENSOR_HOOKS:
        # The same dictionary, so that the handles of the user's hooks still remove them.
        if registered := getattr(old, hooks):
            setattr(parameter, hooks, registered)
    return parameter


def _place(model: nn.Module, places: Places, graph: WidthGraph, tensors: Mapping[str, Tensor]) -> None:
    owners = [(places.owners[id(places.tensors[name][2])], new) for name, new in tensors.items()]
    for attributes, new in owners:
        for module, attribute in attributes:
            setattr(module, attribute, new)
    for module in {places.bearer(module) for attributes, _ in owners for module, _ in attributes}:
        with torch.no_grad():
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, WeightNorm):
                    # The weight is a plain attribute, which the hook computes before each forward.
                    setattr(module, hook.name, hook.compute_weight(module))
            _update_bookkeeping(module, depthwise=module in places.depthwise)
    if graph.written:
        shapes = {name: tuple(tensors.get(name, places.tensors[name][2]).shape) for name in graph.axes}
        widths, modules = graph.widths_of(shapes), dict(model.named_modules())
        for place, axis in graph.written.items():
            write(modules[place.module], place, axis.length(widths))


def _named_tensor_places(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str, Tensor]]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        plain = [(name, content) for name, content in vars(module).items() if isinstance(content, Tensor)]
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items(), *plain):
            if tensor is not None:
                yield (f"{prefix}.{attribute}" if prefix else attribute), (module, attribute, tensor)


def _update_bookkeeping(module: nn.Module, depthwise: bool) -> None:
    # At width 1 only the graph can tell that a convolution is depthwise.
    filters = module.out_channels // module.groups if isinstance(module, nn.modules.conv._ConvNd) else 1
    for kind, attribute, tensor, dim in _BOOKKEEPING:
        if isinstance(module, kind) and getattr(module, tensor) is not None:
            setattr(module, attribute, getattr(module, tensor).shape[dim])
    weight = getattr(module, "weight", None)
    if isinstance(getattr(module, _NORMALISED, None), tuple) and isinstance(weight, Tensor):
        setattr(module, _NORMALISED, tuple(weight.shape))
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        if depthwise:
            module.groups = module.out_channels // filters
        module.in_channels = module.weight.shape[1] * module.groups
    if isinstance(module, _TRANSPOSED):
        module.in_channels = module.weight.shape[0]
        if depthwise:
            module.groups = module.in_channels
        module.out_channels = module.weight.shape[1] * module.groups
    if isinstance(module, nn.RNNBase) and not module.proj_size:
        module.hidden_size = module.all_weights[0][1].shape[1]
        # Otherwise cuDNN warns and copies the weights in each call.
        module.flatten_parameters()
    if isinstance(module, nn.modules.batchnorm._NormBase):
        per_channel = module.running_mean if module.weight is None else module.weight
        if per_channel is not None:
            module.num_features = per_channel.shape[0]


_Named = dict[int, tuple["weakref.ref[Tensor]", str]]

# Parameters that are no longer in their network, and their successors that no optimizer has stepped yet.
_replaced: _Named = {}
_awaited: _Named = {}
_checked: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
_hook: Any = None
_NOT_FOLLOWED = (
    "the network does not train: call Grower.follow(optimizer) once; without a Grower make the optimizer after "
    "make_seed() and call growlab.optim.follow(optimizer, event.replaced, graph, event.widths_before, "
    "event.widths_after, carry=event.carry) after each growth event"
)
_NO_REGIONS = (
    "has regions of",
    "their rates are lost: call optimizer.set_regions with weight_regions(graph, state.births) after follow()",
)


def note_replaced(tensors: Iterable[tuple[str, Tensor, Tensor]]) -> None:
    """Watch for optimizers that step the old tensors of replaced parameters: the network would not train.

    Each optimizer is checked once, in its next step. When every new parameter has been seen in an optimizer, or no
    longer exists, the global hook on optimizer steps is removed.

    Args:
        tensors: name, old and new tensor. Buffers and frozen parameters are ignored.
    """
    trained = [entry for entry in tensors if isinstance(entry[1], nn.Parameter) and entry[1].requires_grad]
    for name, old, new in trained:
        # The old parameter may itself be the successor of an earlier one.
        _awaited.pop(id(old), None)
        _remember(_replaced, name, old)
        _remember(_awaited, name, new)
    if trained:
        _checked.clear()
        global _hook
        _hook = _hook or register_optimizer_step_pre_hook(_check)


def note_restored(tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Stop watching pairs of old and new tensors whose old tensor is in the network again."""
    for old, new in tensors:
        _replaced.pop(id(old), None)
        _awaited.pop(id(new), None)
    if not _awaited:
        _stop_listening()


def _check(optimizer: Optimizer, arguments: Any, named: Any) -> None:
    if optimizer in _checked:
        return
    stepped = [param for group in optimizer.param_groups for param in group["params"]]
    for params, verb, remedy in ((stepped, "steps", _NOT_FOLLOWED), (getattr(optimizer, "_regions", {}), *_NO_REGIONS)):
        entries = ((param, *_replaced.get(id(param), (lambda: None, ""))) for param in params)
        if names := [name for param, reference, name in entries if reference() is param]:
            what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other parameters"
            raise UserError(f"{type(optimizer).__name__} {verb} {what} that growing has replaced, so {remedy}.")
    _checked.add(optimizer)
    for param in stepped:
        _awaited.pop(id(param), None)
    if not _awaited:
        _stop_listening()


def _remember(where: _Named, name: str, tensor: Tensor) -> None:
    key = id(tensor)

    def forget(reference: "weakref.ref[Tensor]") -> None:
        # A later tensor may have the same id.
        if where.get(key, (None,))[0] is reference:
            del where[key]

    where[key] = weakref.ref(tensor, forget), name


def _stop_listening() -> None:
    global _hook
    if _hook is not None:
        _hook.remove()
        _hook = None


# Number of float32 in an AVX2 register.
_VECTOR = 8


def avoid_unsafe_kernels(model: nn.Module) -> None:
    """Make narrow strided 1x1 convolutions on CPUs without AVX-512 use torch's default memory layout.

    oneDNN 3.13.3 (torch 2.15) has a 1x1 convolution for CPUs with AVX2 but no AVX-512 whose weight gradient, in float32
    and channels_last, overruns its buffer: at a stride above 1 that divides the image and up to 7 input channels (fewer
    than fit a vector register). The process then dies of a segmentation fault or `double free`. A network that starts
    narrow has such convolutions on its shortcuts. Found by a scan with a guard page on each side of every buffer over 1
    to 40 input and 1 to 16 output channels, kernels of 1, 3 and 5, strides of 1 to 4, groups, depthwise, padding, one
    to three dimensions, transposed convolutions, float32, bfloat16 and float16, with SSE4.1, AVX2, AVX-VNNI, AVX-512
    and AMX: nothing else overruns, and nothing at all in torch's default layout.

    Everything else keeps its layout, and results stay the same. `resize` and `growlab.growth.make_seed` call it. It is
    idempotent, and does nothing if the CPU has AVX-512.

    Args:
        model: gets a forward pre-hook on its strided 1x1 convolutions; parameters, buffers and classes do not change.
    """
    if not _affected():
        return
    for module in model.modules():
        if not isinstance(module, nn.Conv2d) or module.kernel_size != (1, 1) or max(module.stride) == 1:
            continue
        if _in_default_layout not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_in_default_layout, with_kwargs=True)


def _affected() -> bool:
    limited = any(os.environ.get(f"{prefix}_MAX_CPU_ISA") for prefix in ("ONEDNN", "DNNL"))
    return limited or torch.backends.cpu.get_cpu_capability() != "AVX512"


def _in_default_layout(
    module: nn.Conv2d, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if module.in_channels >= _VECTOR:
        return inputs, named
    # torch chooses the layout by the strides of weight and input.
    if module.weight.device.type == "cpu" and module.weight.stride() != _default(module.weight).stride():
        module.weight.data = _default(module.weight.data)
    return tuple(map(_default, inputs)), {name: _default(value) for name, value in named.items()}


def _default(x: Any) -> Any:
    # `contiguous` alone keeps strides of channels_last where a dimension has size 1.
    return x.contiguous().flatten().view(x.shape) if isinstance(x, Tensor) and x.device.type == "cpu" else x
