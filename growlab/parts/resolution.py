"""Progressive resizing: train on small images or short sequences first.

Small inputs cost less (a convolution's cost is proportional to the image's area, that of attention to the square of the
sequence's length), and large ones are only needed for the last details (Tan and Le 2021, EfficientNetV2, progressive
learning; Li et al. 2022, sequence length warm-up).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.errors import UserError, first_line
from growlab.grower.part import Part, check_fraction_known, remove_pre_hooks, value_at
from growlab.grower.triggers import GrowingNetwork, Never, Trigger
from growlab.growth import GrowthEvent
from growlab.growth.outputs import evaluate
from growlab.widths import WidthGraph
from growlab.widths.inputs import Inputs, named_in, values_of


class Resolution(Part):
    """Resizes images, or truncates sequences, in the forward pass of training steps; evaluation uses full inputs.

    Images [B, C, H, W] are scaled to the given size of their shorter side, bilinear with antialiasing, on their device.
    Sequences [B, T] of tokens are truncated, with masks and labels of the same length. A network with position
    embeddings uses the first ones.

    Targets of a resized batch (labels of tokens [B, T], maps of classes [B, H, W]) are resized by `Grower.targets`,
    which growlab's runner calls; models of transformers get them with the inputs.

    Args:
        sizes: pixels of the shorter side, or tokens, in ascending order, reached evenly as growth proceeds: one per
            stage if there are as many as stages. Or fractions of the data's size, above 0 and at most 1.0, rounded to a
            multiple of 8. If the last is below the data's size, training never uses full inputs. A network that does
            not grow trains at the last size.

    Attributes:
        resizer: the forward pre-hook, with the `cut` of the last training step.

    Raises:
        UserError: the sizes are not ascending positive numbers.
    """

    name = "resolution"
    grows = True

    def __init__(self, sizes: int | float | Sequence[int] | Sequence[float]) -> None:
        listed = [sizes] if isinstance(sizes, int | float) else sizes
        numbers = isinstance(listed, Sequence) and all(type(size) in (int, float) and size > 0 for size in listed)
        relative = numbers and any(type(size) is float for size in listed)
        if not numbers or not listed or list(listed) != sorted(listed) or (relative and listed[-1] > 1):
            raise UserError(
                "sizes must be whole numbers of pixels or tokens in ascending order, such as [16,24,32], or parts of "
                f"the data's own such as [0.5,1.0], not {sizes!r}."
            )
        self._given, self._relative = tuple(listed), relative
        self._sizes = () if relative else tuple(int(size) for size in listed)
        self.resizer = Resizer(0 if relative else self._sizes[-1])
        self._network: nn.Module | None = None

    @property
    def size(self) -> int:
        """Current size of training inputs: pixels of an image's shorter side, or tokens."""
        return self.resizer.size

    def size_at(self, fraction_grown: float) -> int:
        """Return the size of training inputs at a fraction of growth."""
        return value_at(self._sizes, fraction_grown)

    def applies(self, trigger: Trigger) -> bool:
        """Return True if the network grows, or a single size is given."""
        return not isinstance(trigger, Never) or len(self._given) == 1

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]) -> WidthGraph:
        """Run the network at every size, to check that it accepts them.

        Raises:
            UserError: the network does not accept a size, no size is smaller than the inputs, or these are neither
                images nor sequences.
        """
        if self._relative:
            full_size = size_of(values_of(example))
            self._sizes = tuple(_fraction_of(full_size, fraction) for fraction in self._given)
            self.resizer.size = self._sizes[-1]
        if resized(tuple(example), named_in(example), self._sizes[0])[2] is None:
            raise UserError(
                f"sizes={list(self._given)} changes nothing: the inputs are no larger. Sizes are pixels of "
                "an image's shorter side, or tokens."
            )
        for size in self._sizes:
            inputs = resized_inputs(example, size)
            try:
                evaluate(network, inputs)
            except Exception as error:
                reason = first_line(error).rstrip(".")
                raise UserError(
                    f"the network does not take inputs of size {size} ({reason}), one of sizes={list(self._sizes)}. "
                    "It has to interpolate positions that it keeps for one size (dynamic_img_size=True of timm's "
                    "models), and sizes have to be multiples of its patches."
                ) from error
        return graph

    def shrink_to(self, network: nn.Module, graph: WidthGraph, fraction_grown: float) -> WidthGraph:
        """Add the hook that resizes inputs, at the size for a fraction of growth."""
        self.detach(network)
        network.register_forward_pre_hook(Resizer(self.size_at(fraction_grown)), with_kwargs=True)
        return graph

    def attach(self, network: nn.Module) -> None:
        """Add the hook that resizes inputs, at the current size; averages get full inputs."""
        self.detach(network)
        if network is self._network:
            network.register_forward_pre_hook(self.resizer, with_kwargs=True)

    def detach(self, network: nn.Module) -> None:
        """Remove the hook that resizes inputs."""
        remove_pre_hooks(network, Resizer)

    def inputs_at(self, inputs: tuple[Any, ...], fraction_grown: float) -> tuple[Any, ...]:
        """Return training inputs at a fraction of growth, resized."""
        return resized_inputs(inputs, self.size_at(fraction_grown))

    def check(self, grower: GrowingNetwork) -> None:
        """Check that the trigger knows the fraction of growth, if there are several sizes."""
        if len(self._given) > 1:
            check_fraction_known(grower, "sizes of several stages")

    def begin(self, grower: GrowingNetwork) -> None:
        """Start at the first size; a network that does not grow trains at the last."""
        self._network = grower.network
        fraction = None if isinstance(grower.trigger, Never) else grower.trigger.fraction_grown(0, grower.seed_widths)
        self.resizer.size = self._sizes[-1] if fraction is None else self.size_at(fraction)

    def targets(self, y: Tensor) -> Tensor:
        """Resize targets as the last training batch was resized."""
        return self.resizer.targets(y) if self._network is not None and acts_on(self._network) else y

    def after_growth(self, grower: GrowingNetwork, event: GrowthEvent) -> Mapping[str, Any]:
        """Set the size of the new stage."""
        fraction = grower.trigger.fraction_grown(grower.state.scheduled_stage, event.widths_after)
        if fraction is not None:
            self.resizer.size = self.size_at(fraction)
        return {"input_size": self.size}

    def state_dict(self) -> dict[str, Any]:
        """Return the current size."""
        return {"size": self.size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.resizer.size = state["size"]


@dataclass(frozen=True)
class Cut:
    """Sizes of a batch before and after resizing: (H, W) of images or (T,) of sequences."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def apply(self, x: Tensor) -> Tensor:
        """Resize a tensor that has the original size; others are returned unchanged."""
        if len(self.before) == 1:
            # [B, T, ...], and masks [B, 1, T, T].
            axes = [axis for axis in ((1,) if x.dim() < 4 else (2, 3)) if x.dim() > axis]
            for axis in axes if all(x.shape[axis] == self.before[0] for axis in axes) else ():
                x = x.narrow(axis, 0, self.after[0])
            return x
        if x.dim() < 3 or tuple(x.shape[-2:]) != self.before:
            return x
        # CPUs do not interpolate in half precision. Class indices take their neighbour's: float32 has all below 2^24.
        x_BCHW = (x if x.dim() == 4 else x.unsqueeze(1)).to(torch.promote_types(x.dtype, torch.float32))
        if x.is_floating_point():
            small = F.interpolate(x_BCHW, self.after, mode="bilinear", antialias=True).to(x.dtype)
        else:
            small = F.interpolate(x_BCHW, self.after, mode="nearest-exact").to(x.dtype)
        return small if x.dim() == 4 else small.squeeze(1)


class Resizer:
    """A forward pre-hook that resizes a network's inputs in training mode while gradients are recorded.

    Passes without gradients (evaluation, probes, statistics of batch normalisation) use full inputs. `size` is in
    pixels of the shorter side, or tokens. `cut` is the resizing of the last pass, or None.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.cut: Cut | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Resize the inputs of a training step."""
        self.cut = None
        if acts_on(module):
            inputs, named, self.cut = resized(inputs, named, self.size)
        return inputs, named

    def targets(self, y: Tensor) -> Tensor:
        """Resize targets as the last batch was resized."""
        return y if self.cut is None else self.cut.apply(y)


def resized(
    inputs: tuple[Any, ...], named: dict[str, Any], size: int
) -> tuple[tuple[Any, ...], dict[str, Any], Cut | None]:
    """Resize the images or sequences among a forward's inputs; also return the `Cut`, or None if not larger."""
    cut = _cut_of([value for value in (*inputs, *named.values()) if isinstance(value, Tensor)], size)
    if cut is None:
        return inputs, named, None
    small = tuple(cut.apply(value) if isinstance(value, Tensor) else value for value in inputs)
    by_name = {name: cut.apply(v) if isinstance(v, Tensor) else v for name, v in named.items()}
    return small, by_name, cut


def resized_inputs(inputs: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """Resize the images or sequences among a network's inputs, including those by name; see `resized`."""
    positional, named, _ = resized(tuple(inputs), named_in(inputs), size)
    return Inputs(positional, named) if named else positional


def size_of(inputs: Iterable[Any]) -> int:
    """Return the size of a network's inputs: pixels of the shorter side of images, or tokens of sequences."""
    # Any input larger than 1 gives a cut to size 1.
    cut = _cut_of([x for x in inputs if isinstance(x, Tensor)], 1)
    return 1 if cut is None else min(cut.before)


def _fraction_of(size: int, fraction: float) -> int:
    """Return a fraction of a size, rounded to a multiple of 8 if the size is at least 16."""
    unit = 8 if size >= 16 else 1
    return size if fraction == 1 else min(size, max(unit, unit * round(fraction * size / unit)))


def _cut_of(tensors: Sequence[Tensor], size: int) -> Cut | None:
    images = [x for x in tensors if x.dim() == 4 and x.is_floating_point()]
    sequences = [x for x in tensors if x.dim() == 2 and not x.is_floating_point()]
    if images:
        height, width = images[0].shape[-2:]
        short = min(height, width)
        after = (round(height * size / short), round(width * size / short))
        return None if size >= short else Cut((height, width), after)
    if sequences:
        length = sequences[0].shape[1]
        return None if size >= length else Cut((length,), (size,))
    shapes = ", ".join(str(list(x.shape)) for x in tensors) or "no tensors"
    raise UserError(
        f"sizes are of images [B, C, H, W] and sequences [B, T] of tokens; the network's inputs are {shapes}."
    )


def acts_on(network: nn.Module) -> bool:
    """Return True if a forward pass of the network now would be a training step's."""
    return network.training and torch.is_grad_enabled()
