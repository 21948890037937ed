"""Read a checkpoint of `torch.distributed.checkpoint` (DCP) as that of a wider network, one tensor at a time."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from growlab.base.errors import UserError
from growlab.base.pieces import OneByOne
from growlab.growth import GrowthContext, GrowthMethod
from growlab.growth.constants import as_applied, as_stored
from growlab.growth.event import gradients_follow, grown
from growlab.growth.multipliers import is_multipliers
from growlab.growth.weighted_norms import carried_weights
from growlab.inspect.small_models import inputs_of
from growlab.optim.carry import POWERS
from growlab.widen.checkpoint import first_names
from growlab.widen.folder import check_out, load
from growlab.widen.sizes import PARTS, widened
from growlab.widen.skeletons import skeleton
from growlab.widths import Carry, WidthGraph, trace

# Key of an entry of an optimizer's state, as `get_state_dict` names it.
_MOMENT = re.compile(r"(?:.*?\.)?state\.(?P<name>.+)\.(?P<entry>\w+)")


class WidenedReader(dcp.FileSystemReader):
    """Reads a DCP folder as if a growth event had widened its network, with the moments of its optimizer.

    Pass it to `torch.distributed.checkpoint.load` as `storage_reader`, which loads each tensor into a network at the
    new widths, however that is sharded. Every process computes one full tensor at a time.

    Args:
        folder: folder of `torch.distributed.checkpoint.save`, of a network without unfinished growth.
        network: the wide network; only the names of its tensors are used.
        graph: its width graph.
        widths: width of each group in it.
        method: growth method. It must preserve the outputs without changes that a Grower makes in the forward, as
            HyperCloning with whole factors does.
        seed: seed of all random draws.

    Raises:
        UserError: the folder is no checkpoint of a narrower network, or the method needs a Grower to preserve outputs.
    """

    def __init__(
        self,
        folder: str | Path,
        network: nn.Module,
        graph: WidthGraph,
        widths: Mapping[str, int],
        method: GrowthMethod,
        seed: int = 0,
    ) -> None:
        super().__init__(folder)
        self._folder = Path(folder)
        try:
            self._saved = super().read_metadata()
        except (OSError, EOFError) as error:
            raise UserError(f"{folder} is no folder of torch.distributed.checkpoint.") from error
        metadata = self._saved.state_dict_metadata
        saved = {key: tensor for key, tensor in metadata.items() if isinstance(tensor, TensorStorageMetadata)}
        if unfinished := next(filter(is_multipliers, saved), None):
            raise UserError(f"{unfinished} belongs to unfinished growth: save the network after Grower.finish.")
        first = {alias: name for alias, name in first_names(network).items() if name in graph.axes}
        prefix = _prefix(first, saved)
        # Key in the folder -> name of the tensor, and entry of the optimizer's state or "".
        self._grown = {key: (first[name], "") for key in saved if (name := key.removeprefix(prefix)) in first}
        for key, tensor in saved.items():
            match = _MOMENT.fullmatch(key)
            if key not in self._grown and match and match["name"] in first and len(tensor.size):
                self._grown[key] = first[match["name"]], match["entry"]
        self._keys = {name: key for key, (name, entry) in self._grown.items() if not entry}
        shapes = {name: tuple(saved[key].size) for name, key in self._keys.items()}
        graph = replace(graph, axes={name: graph.axes[name] for name in self._keys})
        before = {**graph.full_widths, **graph.widths_of(shapes)}
        if wrong := [n for n, shape in shapes.items() if graph.shape(n, before) != shape]:
            raise UserError(f"{wrong[0]} is {list(shapes[wrong[0]])} in {folder}, which no widths explain.")
        if larger := [group for group, width in before.items() if width > widths[group]]:
            raise UserError(f"{larger[0]} has {before[larger[0]]} channels in {folder}, more than the network.")
        like = {name: torch.empty((), dtype=saved[key].properties.dtype) for name, key in self._keys.items()}
        old = as_applied(graph, OneByOne(self._keys, lambda name: self._read(self._keys[name]), like))
        self._context = context = GrowthContext(graph, old, before, dict(widths), seed, stage=1)
        growth = grown(network, method, context)
        self._carry, self._noise = gradients_follow(method, growth), method.noise(context)
        noisy = graph.weight_norms.keys() & self._noise.keys()
        self._stored = as_stored(
            graph,
            OneByOne(
                growth.tensors, lambda n: growth.tensors[n] + self._noise[n] if n in noisy else growth.tensors[n], like
            ),
        )
        weighted = carried_weights(graph, {}, growth.carry, before, dict(widths))
        uneven = any(len(set(each)) > 1 for each in weighted.values())
        if uneven or growth.multipliers or growth.output_factor != 1.0:
            raise UserError(
                f"{method.name} from {before} preserves the outputs only while a Grower trains the network: widen by "
                "whole factors with HyperCloning, or load the checkpoint and grow with Grower.from_trained."
            )
        self._last: tuple[str, Tensor] | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Metadata of the wider checkpoint."""
        metadata = dict(self._saved.state_dict_metadata)
        for key, (name, _) in self._grown.items():
            size = torch.Size(self._context.new_shape(name))
            chunks = [ChunkStorageMetadata(torch.Size([0] * len(size)), size)]
            metadata[key] = replace(metadata[key], size=size, chunks=chunks)  # type: ignore[arg-type]
        return replace(self._saved, state_dict_metadata=metadata)

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Any:
        """Compute the tensors that grow, and read the others."""
        grown, others = list[Any](), list[Any]()
        for item in plan.items:
            (grown if item.storage_index.fqn in self._grown else others).append(item)
        for item in sorted(grown, key=lambda item: item.storage_index.fqn):
            tensor = self.tensor(item.storage_index.fqn)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        return super().read_data(replace(plan, items=others), planner)

    def tensor(self, key: str) -> Tensor:
        """Compute a tensor of the wider checkpoint by its key."""
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = key, self._computed(*self._grown[key], key)
        return self._last[1]

    def _computed(self, name: str, entry: str, key: str) -> Tensor:
        context, graph = self._context, self._context.graph
        if entry:
            power, value = POWERS.get(entry), self._read(key)
            rule = Carry() if power is None else self._carry
            return rule.carried(value, name, graph, context.old_widths, context.new_widths, power or 0)
        new = self._stored[name].to(self._saved.state_dict_metadata[key].properties.dtype, copy=True)
        return new.add_(self._noise[name].to(new)) if name in self._noise and name not in graph.weight_norms else new

    def _read(self, key: str) -> Tensor:
        tensor: Tensor = _empty(self._saved.state_dict_metadata[key], "cpu")
        dcp.load({key: tensor}, storage_reader=dcp.FileSystemReader(self._folder), no_dist=True)
        return tensor

    def save(self, out: Path) -> None:
        """Write the wider checkpoint as a DCP folder, one tensor at a time."""
        old, new = self._saved.state_dict_metadata, self.read_metadata().state_dict_metadata
        grown = {key: _empty(new[key], "meta") for key in self._grown}
        others = {key: _empty(metadata, "cpu") for key, metadata in old.items() if key not in self._grown}
        dcp.load(others, storage_reader=dcp.FileSystemReader(self._folder), no_dist=True)
        planner = _OnDemand(self)
        dcp.save(grown | others, storage_writer=dcp.FileSystemWriter(out), planner=planner, no_dist=True)


class _OnDemand(dcp.DefaultSavePlanner):
    """Computes each tensor of a widened checkpoint when it is written."""

    def __init__(self, reader: WidenedReader) -> None:
        super().__init__(flatten_state_dict=False)
        self._reader = reader

    def lookup_object(self, index: Any) -> Any:
        return self._reader.tensor(index.fqn) if index.fqn in self._reader._grown else super().lookup_object(index)

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], Metadata]:
        """Keep the nesting of the original checkpoint."""
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=self._reader._saved.planner_data)


def widen_distributed(
    folder: Path,
    checkpoint: Path,
    out: Path,
    width: float,
    method: GrowthMethod,
    parts: Collection[str] = PARTS,
    seed: int = 0,
) -> nn.Module:
    """Write the DCP checkpoint of a wider model with the same outputs, with its configuration.

    Args:
        folder: folder with the configuration of the model, as `save_pretrained` writes it.
        checkpoint: DCP folder of the model and perhaps its optimizer.
        out: a new folder.
        width: factor on the sizes of `parts`.
        method: see `WidenedReader`.
        parts: parts to widen, among `PARTS`.
        seed: seed of all random draws.

    Returns:
        The wider model, without values in its parameters.

    Raises:
        UserError: see `WidenedReader`; or the folder has no configuration.
    """
    check_out(folder, out)
    kind, config = load(folder)
    wider = widened(config, width, parts)
    network = skeleton(kind, wider)
    graph = trace(network, inputs_of(network))
    WidenedReader(checkpoint, network, graph, graph.full_widths, method, seed).save(out)
    wider.save_pretrained(out)
    return network


def _empty(metadata: Any, device: str) -> Any:
    if not isinstance(metadata, TensorStorageMetadata):
        return None
    return torch.empty(metadata.size, dtype=metadata.properties.dtype, device=device)


def _prefix(first: Mapping[str, str], saved: Mapping[str, Any]) -> str:
    """Find the prefix of the network's tensors in the keys of a checkpoint."""
    name = next(iter(first))
    candidates = [key[: -len(name)] for key in saved if key == name or key.endswith(f".{name}")]
    prefixes = [
        p for p in candidates if not re.search(r"(^|\.)state\.$", p) and saved.keys() >= {p + n for n in first.values()}
    ]
    if len(prefixes) != 1:
        raise UserError(f"the checkpoint does not contain the tensors of the network, such as {name}.")
    return prefixes[0]
