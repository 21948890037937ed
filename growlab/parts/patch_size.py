"""Growth in the number of tokens of a Vision Transformer: large patches first, its original patches at the end."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base import ranks
from growlab.base.errors import UserError, first_line
from growlab.grower.part import BlockPart, check_fraction_known, value_at
from growlab.grower.triggers import GrowingNetwork, Trigger
from growlab.grower.triggers.at import Never
from growlab.growth import GrowthEvent, GrowthState
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.optim.carry import reset_replaced
from growlab.widths import Axis, WidthGraph, replace_tensors
from growlab.widths.groups import Part as Run
from growlab.widths.meta import copied, named_tensors

# Maximum number of tokens before the patches, such as class tokens and registers.
_MOST_PREFIXES = 8
# Attributes of modules that count patches.
_COUNTS = ("num_patches", "num_positions", "seq_length")


class PatchSize(BlockPart):
    """Trains a Vision Transformer on larger patches, and so on fewer tokens, in its first stages.

    The weight of the convolution that embeds patches is resampled by the pseudo-inverse of resizing,

        w' = (B^T)^+ w,

    where the matrix B resizes an image of the old patch size to the new one, bilinear with antialiasing. Position
    embeddings are interpolated, bicubic. The patch size applies in training and evaluation. Optimizers drop their state
    for both tensors at an event. Images keep their size: large patches read all of their pixels.

    Source: Beyer et al. 2023 (FlexiViT, arXiv 2212.08013), Section 3.4; Anagnostidis et al. 2024 (arXiv 2311.03233)
    for patches that shrink in training.

    **Preserves** the embedding of a patch that is enlarged by B, exactly; outputs change with the number of tokens. The
    event's receipt has the new `patch_size`, and `patch_size_output_change`, the largest change of an output on the
    probe batch relative to the largest output, unless the network outputs one vector per token.

    **Departs from the paper** in antialiasing, which averages over a patch that becomes smaller instead of reading a
    few of its weights.

    Args:
        sizes: patch sizes in pixels, descending, the network's own last: one per stage if there are as many as stages,
            else reached evenly as growth proceeds. They must divide the images.

    Raises:
        UserError: they are not at least two whole numbers in descending order.
    """

    name = "patch_size"
    grows = True

    def __init__(self, sizes: Sequence[int]) -> None:
        numbers = isinstance(sizes, Sequence) and all(type(size) is int and size > 0 for size in sizes)
        if not numbers or len(sizes) < 2 or list(sizes) != sorted(sizes, reverse=True):
            raise UserError(f"sizes must be pixels of a patch in descending order, such as [8,4], not {sizes!r}.")
        self._sizes = tuple(sizes)
        self._stem: _Stem
        self._full: WidthGraph
        self._trigger: Trigger

    def applies(self, trigger: Trigger) -> bool:
        """Return True if the network grows: others keep their own patches."""
        return not isinstance(trigger, Never)

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]) -> WidthGraph:
        """Find the patch embedding, and run a copy of the network at every size.

        Raises:
            UserError: there is no patch embedding, its patches are not of the last size, or the network fails at a
                size.
        """
        self._stem, self._full = _find(network, example), graph
        if self._stem.size != self._sizes[-1]:
            raise UserError(
                f"sizes={list(self._sizes)} must end with the network's own patches of {self._stem.size} pixels."
            )
        for size in self._sizes:
            copy = copied(network)
            try:
                if any(length % size for length in self._stem.image):
                    raise UserError(f"images of {list(self._stem.image)} pixels are no multiples of it")
                self._stem.resample(copy, graph, size)
                evaluate(copy, example)
            except Exception as error:
                reason = first_line(error).rstrip(".")
                raise UserError(
                    f"the network does not take patches of size {size} ({reason}), one of sizes={list(self._sizes)}."
                ) from error
        return graph

    def shrink_to(self, network: nn.Module, graph: WidthGraph, fraction_grown: float) -> WidthGraph:
        """Resample the network's weights to the patches at a fraction of growth."""
        size = value_at(self._sizes, fraction_grown)
        graph = self._stem.graph(graph, size)
        self._stem.resample(network, graph, size)
        return graph

    def check(self, grower: GrowingNetwork) -> None:
        """Check that the trigger knows the fraction of growth."""
        check_fraction_known(grower, "patch sizes of several stages")
        self._trigger = grower.trigger

    def after_growth(self, grower: GrowingNetwork, event: GrowthEvent) -> Mapping[str, Any]:
        """Resample the weights to the new stage's patches."""
        size, past = self._size_at(grower.state), dict(grower.network.named_parameters())
        before = evaluate(grower.network, grower.probe())
        grower.graph = grower.graph_at(grower.state)
        for network in (grower.network, *grower.copies().values()):
            self._stem.resample(network, grower.graph, size)
        pairs = {name: (past[name], parameter) for name, parameter in grower.network.named_parameters()}
        replaced = {name: (old, new) for name, (old, new) in pairs.items() if new is not old}
        for optimizer in grower.optimizers:
            reset_replaced(optimizer, replaced)
        grower.followers.exchange(past)
        after = evaluate(grower.network, grower.probe())
        if before.shape != after.shape:
            return {"patch_size": size}
        return {"patch_size": size, "patch_size_output_change": ranks.agreed([relative_error(before, after)])[0]}

    def graph_at(self, graph: WidthGraph, state: GrowthState) -> WidthGraph:
        """Return the width graph with the patches of a growth state."""
        return self._stem.graph(graph, self._size_at(state))

    def restore(self, network: nn.Module, state: GrowthState) -> None:
        """Resample a network's weights to the patches of a growth state."""
        self._stem.resample(network, self._full, self._size_at(state))

    def _size_at(self, state: GrowthState) -> int:
        fraction = self._trigger.fraction_grown(state.scheduled_stage, state.widths)
        assert fraction is not None
        return value_at(self._sizes, fraction)


@dataclass(frozen=True)
class _Stem:
    """Patch embedding of the original network.

    Attributes:
        name: path of the convolution.
        size: patch size in pixels.
        image: height and width of the images.
        tables: by name of a position embedding, the number of tokens before the patches; None for [1, D, h, w].
        indices: likewise for buffers [..., tokens] of the indices 0, 1, ... of position embeddings.
    """

    name: str
    size: int
    image: tuple[int, int]
    tables: Mapping[str, int | None]
    indices: Mapping[str, int]

    def graph(self, graph: WidthGraph, size: int) -> WidthGraph:
        rows, columns = self._grid(size)
        lengths = {f"{self.name}.weight": {2: size, 3: size}}
        for name, prefix in self.tables.items():
            lengths[name] = {2: rows, 3: columns} if prefix is None else {-2: prefix + rows * columns}
        lengths |= {name: {-1: prefix + rows * columns} for name, prefix in self.indices.items()}
        axes = dict(graph.axes)
        for name in lengths.keys() & axes.keys():
            changed = list(axes[name])
            for dim, length in lengths[name].items():
                changed[dim] = Axis((Run(None, length),), "fixed")
            axes[name] = tuple(changed)
        return replace(graph, axes=axes)

    def resample(self, network: nn.Module, graph: WidthGraph, size: int) -> None:
        conv = network.get_submodule(self.name)
        assert isinstance(conv, nn.Conv2d)
        before, old, new = conv.kernel_size[0], self._grid(conv.kernel_size[0]), self._grid(size)
        if before == size:
            return
        tensors = named_tensors(network)
        changed = {f"{self.name}.weight": resample_patches(conv.weight.detach(), size)}
        for name, prefix in self.tables.items():
            changed[name] = resize_positions(tensors[name].detach(), prefix, old, new)
        for name, prefix in self.indices.items():
            changed[name] = torch.arange(prefix + prod(new)).expand(*tensors[name].shape[:-1], -1)
        replace_tensors(network, graph, changed)
        conv.kernel_size = conv.stride = (size, size)
        configs = (getattr(module, "config", None) for module in network.modules())
        for holder in {id(x): x for x in (*network.modules(), *configs) if hasattr(x, "__dict__")}.values():
            for name, value in list(vars(holder).items()):
                if name in _COUNTS and isinstance(value, int):
                    setattr(holder, name, value + prod(new) - prod(old))
                elif name in ("patch_size", "grid_size") and isinstance(value, (int, tuple, list)):
                    pair = new if name == "grid_size" else (size, size)
                    setattr(holder, name, size if isinstance(value, int) else type(value)(pair))

    def _grid(self, size: int) -> tuple[int, int]:
        return self.image[0] // size, self.image[1] // size


def resample_patches(weight: Tensor, size: int) -> Tensor:
    """Resample the weight [O, I, p, p] of a patch embedding to another size by the pseudo-inverse of resizing."""
    old = weight.shape[-1]
    # Rows are resized basis vectors: the transpose of the resizing matrix.
    basis = torch.eye(old**2, dtype=torch.float64).view(-1, 1, old, old)
    resized = F.interpolate(basis, (size, size), mode="bilinear", antialias=True).flatten(1)
    flat = weight.to("cpu", torch.float64).flatten(2) @ torch.linalg.pinv(resized).T
    return flat.unflatten(2, (size, size)).to(weight)


def resize_positions(table: Tensor, prefix: int | None, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Interpolate position embeddings [..., prefix + h w, D], or [B, D, h, w] if the prefix is None, bicubic."""
    # CPUs do not interpolate in half precision.
    precise = table.to(torch.promote_types(table.dtype, torch.float32))
    if prefix is None:
        return F.interpolate(precise, new, mode="bicubic", antialias=True).to(table)
    first, rest = precise.tensor_split([prefix], dim=-2)
    grid = rest.reshape(-1, *old, rest.shape[-1]).movedim(-1, 1)
    resized = F.interpolate(grid, new, mode="bicubic", antialias=True).movedim(1, -1)
    return torch.cat([first, resized.reshape(*rest.shape[:-2], prod(new), rest.shape[-1])], dim=-2).to(table)


def _find(network: nn.Module, example: tuple[Any, ...]) -> _Stem:
    """Find the patch embedding, the first convolution that runs, and position embeddings; else raise a UserError."""
    names = {module: name for name, module in network.named_modules() if isinstance(module, nn.Conv2d)}
    calls: list[tuple[nn.Conv2d, tuple[int, ...]]] = []

    def note(module: Any, inputs: tuple[Tensor, ...]) -> None:
        calls.append((module, tuple(inputs[0].shape[-2:])))

    with ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_pre_hook(note))
        evaluate(network, example)
    conv, image = calls[0] if calls else (None, (0, 0))
    padded = conv is not None and conv.padding not in ("valid", (0, 0))
    if conv is None or len({*conv.kernel_size, *conv.stride}) > 1 or padded or conv.stride[0] < 2:
        raise UserError(
            "patch sizes are of Vision Transformers, whose first convolution cuts images into square patches; this "
            "network has none."
        )
    size = conv.kernel_size[0]
    grid = (image[0] // size, image[1] // size)
    tables, indices = dict[str, int | None](), dict[str, int]()
    for name, tensor in named_tensors(network).items():
        if "pos" not in name:
            continue
        if not tensor.is_floating_point():
            last = tensor.shape[-1] if tensor.dim() else 0
            if 0 <= last - prod(grid) <= _MOST_PREFIXES and bool((tensor == torch.arange(last).to(tensor)).all()):
                indices[name] = last - prod(grid)
        elif tensor.dim() == 4 and tuple(tensor.shape[-2:]) == grid:
            tables[name] = None
        elif tensor.dim() in (2, 3) and 0 <= tensor.shape[-2] - prod(grid) <= _MOST_PREFIXES:
            tables[name] = tensor.shape[-2] - prod(grid)
    return _Stem(names[conv], size, (image[0], image[1]), tables, indices)
