"""Search a network for blocks that fit a start, with reasons for those that do not."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError, first_line
from growlab.growth.outputs import without_side_effects
from growlab.growth.parity import ROUNDING, relative_error
from growlab.parts.depth.branches import edge_of
from growlab.parts.depth.finding import (
    FAILURES,
    Block,
    Forward,
    PassThrough,
    Run,
    analysed,
    called,
    learnt_parameters,
    runs_of_units,
    same_draws,
    signature,
    traced_output,
)
from growlab.parts.depth.starts import ZEROING, Insertion, identity
from growlab.widths import tensors_in
from growlab.widths.inputs import call_with
from growlab.widths.meta import copied


@dataclass(frozen=True)
class Chain:
    """Sibling modules of class `kind`: names of those that may be left out at first, and why others may not."""

    kind: str
    names: tuple[str, ...]
    found: tuple[str, ...]
    reasons: Mapping[str, str]


class Search:
    """Searches a network at full width and depth for blocks that fit a start, a name in `STARTS`."""

    def __init__(self, network: nn.Module, example: tuple[Any, ...], start: str) -> None:
        self._network, self._example, self._start = network, example, start
        self._forward = Forward(network, example)

    def all(self) -> tuple[list[Block], list[Chain]]:
        """Find all blocks that follow another of their kind; return them and the chains searched.

        Blocks are in their order of insertion: the second of each chain, then the third, and so on.
        """
        runs = runs_of_units(self._forward, bare=self._start == "identity")
        reasons: dict[str, str] = {}
        positions: dict[str, tuple[int, int]] = {}
        blocks: dict[str, Block] = {}
        chosen: list[str] = []
        for run in runs:
            if any(name.startswith(f"{outer}.") for name, _ in run.units for outer in chosen):
                continue
            for position, (before, (name, paths)) in enumerate(pairwise(run.units), start=1):
                block = self._fitting(name, paths, before[1])
                if isinstance(block, str):
                    reasons[name] = block
                else:
                    blocks[name], positions[name] = block, (position, run.order)
            if any(name in blocks for name, _ in run.units):
                chosen += [name for name, _ in run.units]
        reasons |= self._failures(blocks)
        for name in reasons.keys() & blocks.keys():
            del blocks[name]
        order = sorted(blocks, key=positions.__getitem__)
        return [blocks[name] for name in order], list(_chains(runs, blocks, reasons))

    def named(self, name: str, paths: tuple[str, ...]) -> Block:
        """Return the block with a name."""
        block = self._fitting(name, called(self._forward, paths), ())
        reason = block if isinstance(block, str) else self._failures({name: block}).get(name)
        if isinstance(block, str) or reason is not None:
            raise UserError(f"{name} of blocks cannot be left out with start={self._start!r}: {reason}.")
        return block

    def _fitting(self, name: str, paths: tuple[str, ...], before: tuple[str, ...]) -> Block | str:
        """Return the block of these modules, or the reason why it does not fit the start."""
        if not paths:
            return "it contains no modules that the forward runs"
        block = analysed(self._forward, name, paths)
        if isinstance(block, str):
            return block
        if before and not self._forward.follows(paths[0], before[-1]):
            return f"its input is not the output of {before[-1]}"
        if self._start in ZEROING and block.zeroed is None:
            return block.obstacle
        if self._start == "identity" and block.zeroed is not None:
            return "it has a residual branch, for which there is start='zero'"
        if self._start == "gstack" and not same_shaped_before(self._network, block):
            return "no block of the same shapes comes before it to copy"
        return block

    def _failures(self, blocks: Mapping[str, Block]) -> dict[str, str]:
        """Test candidate blocks by running a copy of the network; return the reasons of failures by name."""
        rehearsal = copied(self._network)
        wrong: dict[str, str] = {}
        if self._start in ZEROING:
            with torch.no_grad():
                for block in blocks.values():
                    for name in block.zeroed or ():
                        rehearsal.get_parameter(name).zero_()
            wrong = self._changes(rehearsal, list(blocks.values()))
        elif self._start == "identity":
            for name, block in blocks.items():
                try:
                    with torch.no_grad():
                        identity(Insertion(rehearsal, block, self._example))
                except UserError as error:
                    wrong[name] = str(error).removeprefix("start='identity'").rstrip(".").lstrip()
                    continue
                wrong |= self._changes(rehearsal, [block])
        dropping = [
            b for b in blocks.values() if b.name not in wrong and any(p.drops for p in b.pass_throughs.values())
        ]
        if dropping and self._uses_all(dropping):
            used = "the network uses or returns more than one of the tensors that it outputs"
            wrong |= {block.name: used for block in dropping if self._uses_all([block])}
        left = [block for name, block in blocks.items() if name not in wrong]
        if self._runs_without(left) is not None:
            for block in left:
                if (reason := self._runs_without([block])) is not None:
                    wrong[block.name] = reason
        return wrong

    def _changes(self, network: nn.Module, blocks: Sequence[Block]) -> dict[str, str]:
        """Return reasons, by name, for blocks that change their input although they should be the identity."""
        errors: dict[str, float] = {}
        inputs: dict[str, Tensor] = {}

        def enter(path: str) -> Any:
            call = self._forward.call(path)
            assert not isinstance(call, str)

            def hook(module: nn.Module, args: Any, named: Any) -> None:
                inputs[path] = call.pass_through.taken((args, named)).detach().clone()

            return hook

        def leave(block: Block, first: str, branch: bool) -> Any:
            def hook(module: nn.Module, args: Any, named: Any, output: Any) -> None:
                result, x = tensors_in(output)[0].detach(), inputs.pop(first)
                error = relative_error(x, x + result if branch else result)
                errors[block.name] = max(error, errors.get(block.name, 0.0))

            return hook

        with ExitStack() as hooks:
            for block, span in ((b, span) for b in blocks for span in b.spans):
                first, last = (network.get_submodule(span.paths[index]) for index in (0, -1))
                hooks.enter_context(first.register_forward_pre_hook(enter(span.paths[0]), with_kwargs=True))
                hook = leave(block, span.paths[0], span.kind == "branch")
                hooks.enter_context(last.register_forward_hook(hook, with_kwargs=True))
            with without_side_effects(network), same_draws():
                for training in (False, True):
                    network.train(training)
                    call_with(network, self._example)
        return {
            name: f"it changes its input by {error:.1e} although its branches are zero: something after the sum does"
            for name, error in errors.items()
            if not error <= self._rounding
        }

    @property
    def _rounding(self) -> float:
        return max(ROUNDING.get(p.dtype, 0.0) for p in self._network.parameters())

    def _uses_all(self, blocks: Sequence[Block]) -> bool:
        """Return True if the network, in either mode, needs or returns outputs of blocks that placeholders lack."""
        rehearsal = copied(self._network)
        try:
            before = self._outputs(rehearsal)
            for path, pass_through in ((path, p) for block in blocks for path, p in block.pass_throughs.items()):
                rehearsal.get_submodule(path).register_forward_hook(partial(_main_only, pass_through))
            pairs = list(zip(before, self._outputs(rehearsal), strict=True))
        except FAILURES:
            return True
        return any(
            len(old) != len(new) or old[0].shape != new[0].shape or not relative_error(old[0], new[0]) <= self._rounding
            for old, new in pairs
        )

    def _outputs(self, network: nn.Module) -> list[list[Tensor]]:
        """Return the outputs in eval and train mode."""
        outputs = []
        with torch.no_grad(), without_side_effects(network), same_draws():
            for training in (False, True):
                network.train(training)
                outputs.append(tensors_in(call_with(network, self._example)))
        return outputs

    def _runs_without(self, blocks: Sequence[Block]) -> str | None:
        """Return the reason why the network does not work without some blocks, or None."""
        rehearsal = copied(self._network)
        for parameter in rehearsal.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        for block in blocks:
            block.leave_out(rehearsal)
        try:
            output = traced_output(rehearsal, self._example)
        except FAILURES as error:
            return f"the network does not run without it ({first_line(error)})"
        if output.shape != self._forward.shape:
            return f"the network's output has shape {list(output.shape)} without it"
        learnt = learnt_parameters(rehearsal, edge_of(output))
        lost = [
            name
            for name in self._forward.names.values()
            if name in self._forward.reached - learnt and not any(block.contains(name) for block in blocks)
        ]
        return f"nothing would be learnt in {lost[0]} without it" if lost else None


def _main_only(pass_through: PassThrough, module: nn.Module, inputs: Any, output: Any) -> Any:
    return pass_through.main_only(output)


def same_shaped_before(network: nn.Module, block: Block) -> tuple[str, ...]:
    """Paths of the nearest earlier sibling of a block with the same shapes that is present, or ()."""
    parent, _, last = block.name.rpartition(".")
    names = list(network.get_submodule(parent)._modules)
    shapes, modules = signature(network, block.paths), dict(network.named_modules())
    first, colon, _ = last.partition(":")
    step = len(block.paths) if colon else 1
    for earlier in range(names.index(first) - step, -1, -step):
        if colon:
            paths = tuple(f"{parent}.{names[earlier + i]}".lstrip(".") for i in range(step))
        else:
            paths = tuple(
                f"{parent}.{names[earlier]}{path.removeprefix(block.name)}".lstrip(".") for path in block.paths
            )
        if all(path in modules for path in paths) and signature(network, paths) == shapes:
            return paths
    return ()


def _chains(runs: Sequence[Run], blocks: Mapping[str, Block], reasons: Mapping[str, str]) -> Iterator[Chain]:
    """Yield the chains of a network; nested ones only if blocks were found in them."""
    outer: list[str] = []
    for run in runs:
        names = tuple(name for name, _ in run.units)
        found = tuple(name for name in names if name in blocks)
        nested = any(name.startswith(f"{path}.") for name in names for path in outer)
        run_reasons = {name: reasons[name] for name in names if name in reasons}
        if found or (run_reasons and not nested):
            yield Chain(run.kind, names, found, run_reasons)
        outer += names


_SHOWN_NAMES = 3


def describe(network: nn.Module, example: tuple[Any, ...]) -> list[str]:
    """Describe chains of blocks of one kind, one per line: exact starts, and why other blocks cannot be left out."""
    try:
        blocks, chains = Search(network, example, "zero").all()
    except FAILURES as error:
        return [f"not looked for: {first_line(error)}"]
    lines = []
    for chain in chains:
        if chain.found:
            lines.append(_later(chain, "zero or stack"))
        lines += _reasons(chain.reasons)
    if blocks:
        return lines
    chains = Search(network, example, "identity").all()[1]
    lines += [_later(chain, "identity") for chain in chains if chain.found]
    return lines or ["no modules of one kind in a row"]


def _later(chain: Chain, starts: str) -> str:
    some = f"{len(chain.found)} of {len(chain.names)} {chain.kind} ({_shortened(chain.found)})"
    return f"{some} may be inserted later, exactly with start={starts}"


def _shortened(names: Sequence[str]) -> str:
    if len(names) <= _SHOWN_NAMES:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {names[-1]}"


def _reasons(reasons: Mapping[str, str]) -> list[str]:
    """Group names whose reasons differ only in numbers, one line each, with the first reason."""
    grouped: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        grouped.setdefault(re.sub(r"\d+", "*", reason), []).append(name)
    return [f"{_shortened(names)} cannot be left out: {reasons[names[0]]}" for names in grouped.values()]
