"""Dynamic orthogonalised SGD (Yuan et al. 2023, App. H, Eq. 21), for any optimizer."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError, as_user_errors
from growlab.base.ranks import sum_over_ranks
from growlab.base.settings import one_of
from growlab.grower.cost import forward_flops
from growlab.grower.part import Part
from growlab.grower.triggers import GrowingNetwork, Widths
from growlab.growth import GrowthEvent
from growlab.growth.outputs import network_inputs
from growlab.widths import Carry, WidthGraph
from growlab.widths.inputs import call_on, changed
from growlab.widths.unchanged import unchanged


class Orthogonalised:
    """Remove from each gradient the component along the mean gradient on previous data.

    Before a network grows, the mean gradient G of its loss on the data that it was trained on is stored. Then the
    gradient g of every step, with all parameters as one vector, becomes

        g* = g - strength * (<g, G_pad> / <G_pad, G_pad>) G_pad                  (Eq. 21; strength is its lambda)

    where G_pad is G at old entries and zero at new ones. At strength 1 the gradient is orthogonal to G; as the strength
    falls to 0, it becomes the plain gradient.

    Call `project` between the backward pass and the step of any optimizer, and `follow` together with
    `growlab.optim.follow` at a growth event.

    Args:
        network: the network; its parameters are found by name, also after they were replaced.

    Examples:
        >>> weight = nn.Linear(2, 1, bias=False)
        >>> orthogonalised = Orthogonalised(weight)
        >>> orthogonalised.remember({"weight": torch.tensor([[3.0, 0.0]])})
        >>> weight.weight.grad = torch.tensor([[1.0, 1.0]])
        >>> orthogonalised.project(1.0)
        >>> weight.weight.grad
        tensor([[0., 1.]])
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self.gradients: dict[str, Tensor] = {}
        self._square: Tensor | None = None

    def remember(self, gradients: Mapping[str, Tensor]) -> None:
        """Store the mean gradient G by parameter name; missing ones count as zero."""
        self.gradients, self._square = {name: g.detach().clone() for name, g in gradients.items()}, None

    def follow(
        self,
        graph: WidthGraph,
        widths_before: Mapping[str, int],
        widths_after: Mapping[str, int],
        carry: Carry | None = None,
    ) -> None:
        """Carry G through a growth event: zero at new entries, and rotated with the basis of channels.

        Of the event's rule for gradients only rotations of bases are used.
        """
        rule = carry if carry is not None and carry.bases else Carry()
        for name, gradient in self.gradients.items():
            if name in graph.axes:
                # Rows of tokens that were added are not channels of a group.
                padded = gradient.new_zeros(graph.shape(name, widths_before))
                padded[tuple(map(slice, gradient.shape))] = gradient
                self.gradients[name] = rule.carried(padded, name, graph, widths_before, widths_after)
        self._square = None

    def project(self, strength: float) -> None:
        """Subtract `strength` (lambda) times the component along G from the gradients, in place."""
        if strength == 0 or not self.gradients:
            return
        pairs = []
        for name, parameter in self._network.named_parameters():
            if parameter.grad is not None and name in self.gradients:
                old = self.gradients[name] = self.gradients[name].to(parameter.device)
                pairs.append((parameter.grad, old))
        if not pairs:
            return
        if self._square is None:
            self._square = _inner([(g, g) for g in self.gradients.values()])
        # Clamped for G = 0, without reading a number back, which would synchronise with the GPU.
        square = self._square.to(pairs[0][1].device).clamp(min=torch.finfo(self._square.dtype).tiny)
        along = strength * _inner(pairs) / square
        with torch.no_grad():
            for gradient, old in pairs:
                gradient.sub_(old.to(gradient.dtype) * along.to(gradient.dtype))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the gradients on the CPU."""
        return {"gradients": {name: g.cpu() for name, g in self.gradients.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.remember(state["gradients"])


def _inner(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Inner product over all pairs, in double precision if the device supports it."""
    device = pairs[0][1].device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    products = [(left.detach().to(dtype) * right.to(dtype)).sum() for left, right in pairs]
    return torch.stack([product.to(device) for product in products]).sum()


class OldGradient(Part):
    """Measures the mean gradient on the ending stage's data before each event, and makes steps orthogonal to it.

    Args:
        anneal: "stage": the strength falls linearly from 1 at the first step after an event to 0 at the last one before
            the next; "run": from 1 after the first event to 0 at the end of the run.

    Raises:
        UserError: `anneal` is unknown.
    """

    name = "osgd"

    def __init__(self, anneal: Literal["stage", "run"] = "stage") -> None:
        with as_user_errors():
            one_of(("stage", "run"), anneal=anneal)
        self._anneal: str = str(anneal)
        self._known: Orthogonalised

    def check(self, grower: GrowingNetwork) -> None:
        """Check that stages' ends are known, for annealing, and that previous data can be iterated again."""
        steps, batches = grower.training.steps, grower.training.epoch_batches
        if self._anneal == "stage" and steps and grower.trigger.stage_end(grower) is None:
            raise UserError(
                "anneal='stage' needs stages whose ends, or the latest ones, are known before; set anneal='run'."
            )
        if batches is not None and not steps:
            raise UserError(
                "old gradients need the number of steps in every epoch, to fall to 0 by their end: give provide "
                "steps=[...]."
            )
        if steps and batches is None:
            raise UserError("old gradients need data whose epochs can be iterated again; leave OldGradient out.")

    def begin(self, grower: GrowingNetwork) -> None:
        """Start without a stored gradient."""
        self._known = Orthogonalised(grower.network)

    def before_growth(self, grower: GrowingNetwork, widths: Widths) -> Mapping[str, Any]:
        """Measure and store the gradient on the data of the stage that ends; its passes count as cost."""
        if grower.training.epoch_batches is None:
            raise UserError("osgd measures on the data of the stage that ends: give epoch_batches to Grower.provide.")
        stage = grower.state.stage + 1
        # An order and augmentation that differ from every training epoch's.
        batches = grower.training.epoch_batches(max(0, grower.clock.epoch - 1), len(grower.training.steps) + stage)
        gradients, samples = mean_gradients(grower, batches, stage)
        self._known.remember(gradients)
        sample = changed(lambda value: value[:1] if isinstance(value, Tensor) else value, grower.probe())
        return {"auxiliary_flops": forward_flops(grower.network, sample) * samples, "auxiliary_samples": samples}

    def after_growth(self, grower: GrowingNetwork, event: GrowthEvent) -> Mapping[str, Any]:
        """Carry the stored gradient through the event."""
        self._known.follow(grower.graph, event.widths_before, event.widths_after, event.carry)
        return {}

    def before_step(self, grower: GrowingNetwork) -> None:
        """Project the gradients before the optimizer's step."""
        self._known.project(strength(grower, self._anneal))

    def state_dict(self) -> dict[str, Any]:
        """Return the stored gradient."""
        return self._known.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._known.load_state_dict(state)


def strength(grower: GrowingNetwork, anneal: str) -> float:
    """Return the strength of the projection at the next step: lambda of Eq. 21; see `OldGradient`."""
    if not grower.events:
        return 0.0
    ends = list(accumulate(grower.training.steps))
    begin, last = grower.events[0].step, ends[-1] - 1
    if anneal == "stage":
        begin, end = grower.events[-1].step, grower.trigger.stage_end(grower)
        assert end is not None
        last = ends[end - 1] - 1
    return 1.0 - (grower.clock.step - begin) / max(1, last - begin)


def mean_gradients(
    grower: GrowingNetwork, batches: Iterable[tuple[Tensor, ...]], pass_number: int = 0
) -> tuple[dict[str, Tensor], int]:
    """Compute the gradient of the mean loss over this process's batches and all processes, by parameter name.

    The network runs in train mode and in its parameters' precision; statistics of normalisations are restored, and no
    optimizer steps. `pass_number`, the batch's number and the rank seed dropout. Also return the number of samples over
    all processes.
    """
    network, training, loss_of = grower.network, grower.training, grower.training.loss
    assert loss_of is not None
    parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    example = next(iter(parameters.values()))
    # A float, since classes may have weights.
    precise = torch.float32 if example.device.type == "mps" else torch.float64
    count = torch.zeros((), dtype=precise, device=example.device)
    samples = torch.zeros((), dtype=torch.long, device=example.device)
    with torch.enable_grad(), torch.compiler.set_stance("force_eager"), unchanged(network):
        network.train()
        for index, batch in enumerate(batches):
            if training.seed_draws is not None:
                training.seed_draws(-1 - pass_number, index)
            *inputs, target = network_inputs(batch, network)
            output = call_on(network, inputs)
            weight = len(target) if training.weight is None else training.weight(output, target)
            loss = loss_of(output, target) * weight
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for total, gradient in zip(sums.values(), gradients, strict=True):
                if gradient is not None:
                    total += gradient
            count += weight
            samples += len(target)
    count = sum_over_ranks(count)
    return {name: sum_over_ranks(total) / count for name, total in sums.items()}, int(sum_over_ranks(samples))
