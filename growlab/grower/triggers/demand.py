"""Growth on demand: when a network grows, and which of its groups, decided from how training goes."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import Any

from growlab.base.settings import at_least, finite, one_of, whole
from growlab.growth import Bottleneck

GROUPS = ("all", "gradient", "bottleneck")


@dataclass(frozen=True)
class Progress:
    """Progress of a run at the beginning of an epoch.

    Attributes:
        epoch: that begins, counted from 0.
        total_epochs: of the run.
        rows: what was recorded of each epoch since the trigger's last event, or since the beginning.
        steps_left: growth events of all groups between here and full width.
        spent: what has been trained, in percent of the fixed-size run's FLOPs.
        climbing: what the whole run will have cost, likewise, if it grows now and after every `min_epochs` until it
            has full width.
        gradient_norms: root mean square of the running gradient's entries that produce each group's channels.
        bottlenecks: expressivity bottlenecks of the groups that have one, if the demand looks at them.
        out_of_reach: what is missing of all of them, in parts of what is wanted, at the beginning of each epoch of the
            stage but its first; this epoch's is the last.
    """

    epoch: int
    total_epochs: int
    rows: Sequence[Mapping[str, Any]]
    steps_left: int
    spent: float = 0.0
    climbing: float = 0.0
    gradient_norms: Mapping[str, float] = field(default_factory=dict)
    bottlenecks: Mapping[str, Bottleneck] = field(default_factory=dict)
    out_of_reach: Sequence[float] = ()


class Demand(ABC):
    """Decides at the beginning of each epoch whether a network grows by a step of its schedule's widths.

    It has full width in time: where waiting longer would leave less than `final_fraction` of the epochs to the last
    stage, every group grows. What it says is a function of its arguments alone: ranks follow the first one's, and a
    resumed run asks again.

    Args:
        min_epochs: between two growth events, and before the first.
        final_fraction: least part of the run at full width.
        groups: "all" grow together; "gradient": those with the largest gradients; "bottleneck": those whose channels'
            reader misses most, see `bottlenecks`.
        groups_fraction: how many of the groups "gradient" and "bottleneck" take, at least one.
        batches: training batches that bottlenecks are measured on, at the beginning of each epoch.

    Raises:
        ValueError: a value is impossible.
    """

    #: Whether it needs the optimizer's running gradients.
    wants_gradients: bool = False
    #: Whether it needs expressivity bottlenecks.
    wants_bottlenecks: bool = False
    #: Whether it looks at what widths to come will cost.
    plans_cost: bool = False
    #: A column of the records that it looks at.
    metric: str | None = None

    def __init__(
        self,
        min_epochs: int = 1,
        final_fraction: float = 0.2,
        groups: str = "all",
        groups_fraction: float = 0.5,
        batches: int = 1,
    ) -> None:
        whole(1, batches=batches, min_epochs=min_epochs)
        finite(final_fraction=final_fraction, groups_fraction=groups_fraction)
        if not 0 <= final_fraction < 1:
            raise ValueError(f"final_fraction must lie in [0, 1), not {final_fraction}.")
        one_of(GROUPS, groups=groups)
        if not 0 < groups_fraction <= 1:
            raise ValueError(f"groups_fraction must lie in (0, 1], not {groups_fraction}.")
        self.min_epochs, self.final_fraction = min_epochs, final_fraction
        self.groups, self.groups_fraction = groups, groups_fraction
        self.batches = batches
        self.wants_gradients = self.wants_gradients or groups == "gradient"
        self.wants_bottlenecks = self.wants_bottlenecks or groups == "bottleneck"

    @abstractmethod
    def wants(self, progress: Progress) -> bool:
        """Return True if it is time to grow, provided that there is time."""

    def latest(self, total_epochs: int, steps_left: int) -> int:
        """The last epoch at whose beginning the next step may be climbed, with so many to climb."""
        final = max(1, ceil(self.final_fraction * total_epochs))
        return total_epochs - final - (steps_left - 1) * self.min_epochs

    def must(self, progress: Progress) -> bool:
        """Return True if waiting longer would leave too little time at full width."""
        return progress.epoch >= self.latest(progress.total_epochs, progress.steps_left)

    def check(self, total_epochs: int, steps: int, cheapest: float) -> None:
        """Refuse a run in which it could not do what it promises.

        Args:
            total_epochs: of the run.
            steps: growth events of all groups to full width.
            cheapest: least that the run can cost, in percent of the fixed-size run's FLOPs.

        Raises:
            ValueError: it could not.
        """
        if steps and self.latest(total_epochs, steps) < self.min_epochs:
            needed = total_epochs - self.latest(total_epochs, steps) + self.min_epochs
            raise ValueError(
                f"{total_epochs} epochs are too few to grow {steps} times, every min_epochs="
                f"{self.min_epochs}, and to train a part of {self.final_fraction} at full width: take "
                f"{needed}, or lower num_stages."
            )

    def check_records(self, columns: Collection[str]) -> None:
        """Refuse a run that does not record what it looks at.

        Args:
            columns: of metrics.csv, those that will have values.

        Raises:
            ValueError: it does not.
        """
        if self.metric is not None and self.metric not in columns:
            instead = "set a validation set apart, or " if self.metric.startswith("val_") else ""
            raise ValueError(f"metric={self.metric!r} is not recorded: {instead}watch train_loss.")

    def decide(
        self, progress: Progress, widths: Mapping[str, int], steps: Sequence[Mapping[str, int]]
    ) -> dict[str, int]:
        """Width of each group from here on: those that it has, or more.

        Args:
            progress: how training has gone.
            widths: width of each group now.
            steps: widths of the schedule's stages; the last ones are the full ones.
        """
        due = progress.steps_left > 0 and self.must(progress)
        early = len(progress.rows) < self.min_epochs
        if progress.steps_left == 0 or (early and not due) or not (due or self.wants(progress)):
            return dict(widths)
        if due or self.groups == "all":
            step = steps[len(steps) - progress.steps_left]
            return {group: max(width, step[group]) for group, width in widths.items()}
        growing = [group for group in widths if widths[group] < steps[-1][group]]
        scores = progress.gradient_norms
        if self.groups == "bottleneck":
            scores = {group: found.missing for group, found in progress.bottlenecks.items()}
        # Of equal scores the first group counts.
        growing.sort(key=lambda group: -scores.get(group, 0.0))
        chosen = growing[: max(1, round(self.groups_fraction * len(growing)))]
        wider = {group: min(step[group] for step in steps if step[group] > widths[group]) for group in chosen}
        return {**widths, **wider}


class Plateau(Demand):
    """Grow when a metric has stopped improving.

    Args:
        metric: a column of metrics.csv: val_loss, val_accuracy, train_loss or train_accuracy.
        patience: epochs without an improvement.
        min_delta: what counts as an improvement, relative to the best value of the stage.
        demand: see `Demand`.

    Raises:
        ValueError: a value is impossible.
    """

    METRICS = ("val_loss", "val_accuracy", "train_loss", "train_accuracy")
    metric: str

    def __init__(
        self, metric: str = "val_loss", patience: int = 3, min_delta: float = 0.01, **demand: Any
    ) -> None:
        super().__init__(**demand)
        one_of(self.METRICS, metric=metric)
        whole(1, patience=patience)
        at_least(0, min_delta=min_delta)
        self.metric, self.patience, self.min_delta = metric, patience, min_delta

    def wants(self, progress: Progress) -> bool:
        """Return True if the last improvement is `patience` epochs ago."""
        sign = 1.0 if self.metric.endswith("loss") else -1.0
        best, since = None, 0
        for row in progress.rows:
            value = sign * float(row[self.metric])
            if best is None or value < best - self.min_delta * abs(best):
                best, since = value, 0
            else:
                since += 1
        return since >= self.patience


class GradientNorm(Demand):
    """Grow when the gradient has become small: the widths have little left to learn by (Evci et al. 2022's motive).

    The gradient is the optimizer's running mean at the end of an epoch.

    Args:
        ratio: grow when its norm is below this part of the largest one of the stage.
        demand: see `Demand`.

    Raises:
        ValueError: a value is impossible.
    """

    wants_gradients = True

    def __init__(self, ratio: float = 0.5, **demand: Any) -> None:
        super().__init__(**demand)
        finite(ratio=ratio)
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must lie in (0, 1], not {ratio}.")
        self.ratio = ratio

    def wants(self, progress: Progress) -> bool:
        """Return True if the last epoch's gradient is below `ratio` of the stage's largest."""
        norms = [float(row["gradient_norm"]) for row in progress.rows]
        finite = [norm for norm in norms if isfinite(norm)]
        return len(finite) > 1 and norms[-1] < self.ratio * max(finite)


class Expressivity(Demand):
    """Grow when the weights that are there can do little more of what the loss asks for (Verbockhaven et al. 2024).

    Of the change that the loss asks of the layers' outputs, a change of their weights can do a part; the rest is the
    expressivity bottleneck. That part is largest early in a stage, and shrinks as training comes to rest at its
    widths. How large it is depends on the network and the batches, so it is compared with itself. It takes one forward
    and backward pass over `batches` at the beginning of each epoch, which count as cost.

    Args:
        ratio: grow when it is below this part of the largest one of the stage.
        demand: see `Demand`.

    Raises:
        ValueError: a value is impossible.
    """

    wants_bottlenecks = True

    def __init__(self, ratio: float = 0.8, **demand: Any) -> None:
        super().__init__(**demand)
        finite(ratio=ratio)
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must lie in (0, 1], not {ratio}.")
        self.ratio = ratio

    def wants(self, progress: Progress) -> bool:
        """Return True if the reachable part is below `ratio` of the largest, or no bottleneck can be measured."""
        within = [1.0 - share for share in progress.out_of_reach]
        return not progress.bottlenecks or within[-1] < self.ratio * max(within)


class Budget(Demand):
    """Grow as soon as a budget of FLOPs allows to climb to full width and to train on there to the end.

    So the network is narrow for as long as it must be, and the run costs what was given, or a little less.

    Args:
        percent: of the FLOPs of the fixed-size run of as many epochs.
        demand: see `Demand`.

    Raises:
        ValueError: a value is impossible.
    """

    plans_cost = True

    def __init__(self, percent: float = 50.0, **demand: Any) -> None:
        super().__init__(**demand)
        finite(percent=percent)
        if not 0 < percent <= 100:
            raise ValueError(f"percent must lie above 0 and at most at 100, not {percent}.")
        self.percent = percent

    def wants(self, progress: Progress) -> bool:
        """Return True if growing from now on stays within the budget."""
        return progress.climbing <= self.percent

    def check(self, total_epochs: int, steps: int, cheapest: float) -> None:
        """Refuse a budget that the narrowest way exceeds.

        Raises:
            ValueError: it does.
        """
        super().check(total_epochs, steps, cheapest)
        if cheapest > self.percent:
            raise ValueError(
                f"percent={self.percent} is below {cheapest:.1f}, what growing late costs: "
                "raise it, or lower final_fraction or initial_width."
            )
