"""Grow a network of a public library twice while it trains, and measure how much of it grows and how exactly."""

import copy
import csv
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from growlab.grower import Grower
from growlab.growth import ParityError, VarianceTransfer
from growlab.growth.outputs import main_output, observe
from growlab.growth.parity import relative_error
from growlab.optim import SGD
from growlab.widths import UnsupportedOperation
from growlab.widths.inputs import call_with, inputs_of
from tests.foreign.networks import NETWORKS

TABLE = Path(__file__).with_name("table.csv")
LIBRARIES = ("vit_pytorch", "x_transformers", "diffusers", "monai")
STAGES = {0: 1 / 4, 1: 1 / 2, 2: 1.0}
STEPS = 3
EXACT = 1e-10
# Share of the parameters in tensors that grow at which a network counts as growing.
ENOUGH = 0.9


@dataclass(frozen=True)
class Row:
    """Result for one network.

    Attributes:
        network: key in `networks.NETWORKS`.
        share: fraction of all parameters that are in tensors that grow; 0 if tracing failed.
        eval: largest relative output error of an event in eval mode; NaN without events.
        train: the same in train mode.
        loaded: relative difference in outputs of a new network that has loaded the finished state_dict; NaN if an
            earlier step failed.
        seconds: total time.
        why: the error, or the most frequent reason for which a width is fixed.
    """

    network: str
    share: float = 0.0
    eval: float = float("nan")
    train: float = float("nan")
    loaded: float = float("nan")
    seconds: float = 0.0
    why: str = ""

    @property
    def traced(self) -> bool:
        """True if any width grows."""
        return self.share > 0

    @property
    def exact(self) -> bool:
        """True if all errors are known and small: NaN is not exact."""
        return all(error <= EXACT for error in (self.eval, self.train, self.loaded))


def grown(name: str) -> Row:
    """Trace, train, grow twice, finish and reload one network in float64; the optimizer alternates, SGD or AdamW."""
    began = time.perf_counter()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = _grown(name)
    finally:
        torch.set_default_dtype(default)
    return Row(**{**asdict(row), "seconds": time.perf_counter() - began})


def _grown(name: str) -> Row:
    torch.manual_seed(0)
    network, inputs = NETWORKS[name]()
    fresh = copy.deepcopy(network)
    inputs = inputs_of(inputs, network)
    try:
        grower = Grower(network, inputs, method=VarianceTransfer(), trigger=STAGES, anneal_steps=STEPS - 1)
    except UnsupportedOperation as error:
        return Row(name, why=str(error))
    except Exception as error:  # recorded in the row
        return Row(name, why=f"{type(error).__name__}: {error}")
    number = list(NETWORKS).index(name)
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3) if number % 2 else SGD(parameters, lr=1e-3, momentum=0.9)
    grower.follow(optimizer)
    sizes = {key: p.numel() for key, p in fresh.named_parameters()}
    found: dict[str, Any] = {
        "share": sum(n for key, n in sizes.items() if grower.graph.grows(key)) / sum(sizes.values())
    }
    found["why"] = _most_frequent_reason(grower.graph.fixed)
    try:
        found |= {"eval": 0.0, "train": 0.0}
        for epoch in range(len(STAGES)):
            for event in grower.step(epoch=epoch):
                found["eval"] = max(found["eval"], event.parity_error_eval)
                found["train"] = max(found["train"], event.parity_error_train)
            _train(network, optimizer, inputs)
        grower.finish()
        fresh.load_state_dict(network.state_dict(), strict=True)
        pair = [observe(of, inputs) for of in (network, fresh)]
        found["loaded"] = max(
            relative_error(getattr(pair[0], mode), getattr(pair[1], mode)) for mode in ("eval", "train")
        )
    except Exception as error:
        found["why"] = f"{type(error).__name__}: {error}".partition("\n")[0]
        if isinstance(error, ParityError):
            found["eval"] = found["train"] = float("nan")
    return Row(name, **found)


def _train(network: nn.Module, optimizer: torch.optim.Optimizer, inputs: tuple[Any, ...]) -> None:
    network.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        (main_output(call_with(network, inputs)) - 1).square().mean().backward()
        optimizer.step()


def _most_frequent_reason(fixed: Mapping[str, str]) -> str:
    reasons = [reason for reason in fixed.values() if reason != "the network's output"]
    return max(dict.fromkeys(reasons), key=reasons.count, default="")


def write(rows: list[Row]) -> None:
    """Write the rows to `TABLE`."""
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        table.writeheader()
        for row in rows:
            cells = asdict(row)
            cells |= {"share": f"{row.share:.3f}", "seconds": f"{row.seconds:.1f}"}
            cells |= {mode: f"{cells[mode]:.0e}" for mode in ("eval", "train", "loaded")}
            table.writerow({**cells, "why": " ".join(row.why.split())})


def read() -> dict[str, Row]:
    """Read the committed `TABLE`, as rows by network."""
    with TABLE.open(newline="") as file:
        rows = [
            Row(**{k: v if k in ("network", "why") else float(v) for k, v in cells.items()})
            for cells in csv.DictReader(file)
        ]
    return {row.network: row for row in rows}
