"""Numbers of a run that a paper's statement is about, beside its test score."""

import math
from collections.abc import Callable

import pandas

from growlab.base.errors import UserError
from growlab.lab.analysis.metrics import metric_of
from growlab.lab.analysis.results import Run


def score(run: Run) -> float:
    """The test metric in its own unit, of accuracy percent."""
    metric = metric_of([run.results])
    value = run.results.get(f"test_{metric.key}")
    return math.nan if value is None else metric.scale * value


def first_loss(run: Run) -> float:
    """The loss on held-out images before training, from `layers.csv`."""
    losses = run.layers[run.layers["quantity"] == "loss"].sort_values("step")
    return float(losses["mean"].iloc[0])


def train_loss_change(run: Run) -> float:
    """The training loss of the last epoch less that of the first."""
    losses = run.curve("train_loss")
    if losses is None:
        raise UserError(f"{run.path} has no training loss over epochs.")
    return float(losses[-1] - losses[0])


def last_train_loss(run: Run) -> float:
    """The training loss of the last epoch."""
    losses = run.curve("train_loss")
    if losses is None:
        raise UserError(f"{run.path} has no training loss over epochs.")
    return float(losses[-1])


def last_width(run: Run) -> float:
    """Channels of all groups in the last epoch."""
    return float(run.width_path[-1])


def width_gained(run: Run) -> float:
    """Channels that came while there were more classes than before: mean over those parts of `data.class_schedule`."""
    return _width_changes(run, more=True)


def width_given_back(run: Run) -> float:
    """Channels that went while there were fewer classes than before, likewise."""
    return -_width_changes(run, more=False)


def _width_changes(run: Run, more: bool) -> float:
    """Mean change of width from the end of one set of classes to the end of the next, where these are more or fewer."""
    classes = run.class_schedule
    starts = sorted(classes)
    path = run.width_path
    ends = [float(path[after - 1]) for after in (*starts[1:], len(path))]
    counts = [len(classes[start]) for start in starts]
    changes = [
        ends[index] - ends[index - 1]
        for index in range(1, len(starts))
        if (counts[index] > counts[index - 1]) == more
    ]
    return sum(changes) / len(changes) if changes else math.nan


def jump(run: Run) -> float:
    """Change of the held-out accuracy (points) in epochs that begin with another width, less that in the others.

    Counted from the first change of width on; runs that keep their width have none (nan), as have steps to less than
    16 neurons, which the paper itself sets apart.
    """
    path, accuracy = run.width_path, run.held_out("accuracy")
    if accuracy is None:
        raise UserError(f"{run.path} has no held-out accuracy over epochs.")
    at = [epoch for epoch in range(1, len(path)) if path[epoch] != path[epoch - 1]]
    events = [epoch for epoch in at if path[epoch] >= 16 or path[epoch] > path[epoch - 1]]
    others = [epoch for epoch in range(at[0], len(path)) if epoch not in at] if at else []
    if not events or not others:
        return math.nan

    def mean(epochs: list[int]) -> float:
        return sum(float(accuracy[epoch] - accuracy[epoch - 1]) for epoch in epochs) / len(epochs)

    return 100 * (mean(events) - mean(others))


def log_seconds(run: Run) -> float:
    """The logarithm of a run's seconds: differences are of ratios."""
    return math.log(run.results["seconds"])


def new_rate_factor(run: Run) -> float:
    """Rate factor, less 1, with which what came last begins: its first record, the mean over inner layers.

    The first and the last layer are left out: the paper has rules of their own for both.
    """
    if run.rates is None:
        raise UserError(f"{run.path} has no rates.csv.")
    layers = list(dict.fromkeys(run.rates["parameter"]))
    inner = run.rates[run.rates["parameter"].isin(layers[1:-1])]
    newest = inner[inner["region"] == inner["region"].max()].sort_values("step")
    first = newest.groupby("parameter", sort=False).first()
    return float(pandas.to_numeric(first["rate_factor"]).mean()) - 1


QUANTITIES: dict[str, tuple[Callable[[Run], float], str]] = {
    "score": (score, ""),
    "first_loss": (first_loss, "loss"),
    "last_train_loss": (last_train_loss, "loss"),
    "train_loss_change": (train_loss_change, "loss"),
    "last_width": (last_width, "neurons"),
    "width_gained": (width_gained, "neurons"),
    "width_given_back": (width_given_back, "neurons"),
    "jump": (jump, "points"),
    "log_seconds": (log_seconds, "(logarithm of seconds)"),
    "new_rate_factor": (new_rate_factor, ""),
}
"""Each with the unit that it is told in."""
