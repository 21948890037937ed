"""Growth in depth inside a run: blocks come in, and the optimizer and the average of the weights follow."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from growlab.data import ImageData
from growlab.errors import UserError
from growlab.growth import Demand, Depth, FixedSize, GrowthMethod, WidthDecision
from growlab.ranks import agreed
from growlab.training.objective import network_inputs
from growlab.training.task import Task
from growlab.widths import WidthGraph


def choose_depth(
    blocks: str | Sequence[str] | None,
    start: str,
    network: nn.Module,
    graph: WidthGraph,
    method: GrowthMethod,
    data: ImageData,
    demand: Demand | None = None,
) -> Depth | None:
    """The blocks that a run leaves out at first; None for a run that has all from the start.

    Args:
        blocks: see `conf/config.yaml`.
        start: likewise.
        network: at full width and depth; left as it is.
        graph: its width graph.
        method: the run's; one of fixed size has all blocks.
        data: set up.
        demand: the run's.

    Raises:
        UserError: the blocks, or the other settings, do not allow it.
    """
    if blocks is None or isinstance(method, FixedSize):
        return None
    if demand is not None or isinstance(method, WidthDecision):
        raise UserError(
            "depth.blocks needs stages that a schedule gives: take schedule=exponential or linear, and a growth method "
            "that follows it."
        )
    if any(map(is_parametrized, network.modules())):
        raise UserError(
            "depth.blocks needs weights that are no functions of others: choose another growth method or model."
        )
    if not isinstance(blocks, str | Sequence):
        raise UserError(f"depth.blocks={blocks} must be auto, a list of names of modules, or null.")
    names = None if blocks == "auto" else [blocks] if isinstance(blocks, str) else list(blocks)
    return Depth(network, graph, names, start, network_inputs(data.probe_batch(2), network))


def deepen(task: Task, optimizers: Sequence[Optimizer], probe: tuple[Any, ...]) -> dict[str, Any]:
    """Put in the blocks that come with the next stage, before the network widens.

    Args:
        task: brought up to date: its network, its average, its width graph and which blocks there are.
        optimizers: they track the new parameters, in the order that they have in the network: a resumed run, which
            makes its optimizer anew, has them in the same.
        probe: inputs that parity is checked on.

    Returns:
        For the event's receipt: what came in, each with its own parity; empty where nothing did.

    Raises:
        ParityError: a block changed the outputs; it was taken out again.
        UserError: a block cannot begin as configured, or an optimizer has several groups of parameters.
    """
    if task.depth is None:
        return {}
    state, stage = task.growth_state, task.growth_state.stage + 1
    wanted = task.depth.present_at(stage, task.schedule.num_stages)
    inserted = []
    for name in wanted:
        if name in state.blocks:
            continue
        widths = (task.method, state.widths, task.seed, stage)
        inserted.append(task.depth.insert(task.network, name, *widths, probe, agreed))
        if task.average is not None:
            # The average of what has only just begun is what it begins as.
            task.depth.put_in(task.average.module, name, state.widths, task.network)
            task.average.module.requires_grad_(False)
        state.blocks[name] = stage
    if inserted:
        task.graph = task.depth.graph(state.blocks)
        for optimizer in optimizers:
            _track(optimizer, task)
    return {"inserted": inserted} if inserted else {}


def _track(optimizer: Optimizer, task: Task) -> None:
    if len(optimizer.param_groups) != 1:
        raise UserError(
            f"growth in depth needs an optimizer with one group of parameters; {type(optimizer).__name__} has "
            f"{len(optimizer.param_groups)}."
        )
    optimizer.param_groups[0]["params"][:] = list(task.network.parameters())
