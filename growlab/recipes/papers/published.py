"""Published values, each with its table and row: L. Yuan, P. Savarese, M. Maire, NeurIPS 2023.

They lie in `published.csv`. Where the paper's tables give a method twice, a run stands beside the first table's value:
plain SGD of Table 11 (91.95) beside Growing+VT of Table 6 (92.00), plain SGD of Table 12 beside Growing (91.62 both).
Rows of Table 2 that Tables 6, 7, 11 and 12 repeat as they are stand there once.
"""

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

from growlab.lab.analysis.results import Group

# Overrides of these change the method; those of other keys change how long, on what or where it is trained.
_METHOD_KEYS = (
    *("growth.", "lr_adapt.", "optimizer.", "model.", "optimizer_state=", "schedule.", "~"),
    *("osgd.", "data.incremental."),
)


@dataclass(frozen=True)
class Published:
    """One published value.

    Attributes:
        table: "Table 2" and so on.
        row: the method's name there.
        model: our name of the network.
        data: our name of the data set.
        epochs: epochs of the published training.
        growth: our name of the growth method.
        lr_adapt: our name of the rate adaptation.
        optimizer: our name of the optimizer.
        overrides: what else our command needs to be the same method.
        cost_percent: training FLOPs in percent of the fixed-size network's; None where not given.
        value: mean of the metric, in its own unit (percent for accuracy).
        std: its standard deviation over three seeds; None where not given.
        metric: "accuracy" (test, percent) or "BLEU".
    """

    table: str
    row: str
    model: str
    data: str
    epochs: int
    growth: str
    lr_adapt: str
    optimizer: str
    overrides: tuple[str, ...]
    cost_percent: float | None
    value: float
    std: float | None
    metric: str


@cache
def published() -> tuple[Published, ...]:
    """All published values, in the paper's order.

    Examples:
        >>> [p.value for p in published() if (p.model, p.growth) == ("resnet20", "firefly")]
        [92.1]
    """
    text = resources.files("growlab.recipes.papers").joinpath("published.csv").read_text(encoding="utf-8")
    return tuple(
        Published(
            **{
                key: line[key] for key in ("table", "row", "model", "data", "growth", "lr_adapt", "optimizer")
            },
            epochs=int(line["epochs"]),
            overrides=tuple(line["overrides"].split()),
            cost_percent=float(line["cost_percent"]) if line["cost_percent"] else None,
            value=float(line["value"]),
            std=float(line["std"]) if line["std"] else None,
            metric=line["metric"],
        )
        for line in csv.DictReader(text.splitlines())
    )


def published_for(group: Group) -> Published | None:
    """The published value of the method, network and data of a row; None if there is none.

    Another number of epochs or another batch size still finds it, so a comparison has to say so; another
    schedule, optimizer setting or variant of the method does not.
    """
    own = {override for override in group.overrides if override.startswith(_METHOD_KEYS)}
    for one in published():
        same = (one.model, one.data, one.growth, one.lr_adapt, one.optimizer) == (
            *(group.model, group.data, group.growth, group.lr_adapt),
            group.optimizer,
        )
        if same and own == set(one.overrides):
            return one
    return None
