"""The Lightning task: train a network that grows towards an objective."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from growlab.errors import UserError
from growlab.growth import Depth, GrowthMethod, GrowthState, Schedule, WidthDecision, restore
from growlab.optim import Regional, Regions, exempt_from_decay, weight_regions
from growlab.ranks import stacked
from growlab.training.checkpoints import HEADER, as_precise, differences, shapes
from growlab.training.learning_rate import LearningRate
from growlab.training.objective import Classification, Objective, SumObjective
from growlab.training.rate_adaptation import RateAdaptation
from growlab.training.weight_average import WeightAverage
from growlab.widths import WidthGraph, resize

_CHECK_LOSS_EVERY = 50  # steps: reading the loss stalls a GPU, and ranks have to agree


class Task(LightningModule):
    """Training towards an objective with a growing network.

    Args:
        network: the network, planted at its first widths.
        graph: its width graph.
        method: the growth method.
        schedule: the run's stages.
        state: what `plant` returned.
        make_optimizer: makes the optimizer from the parameters; decay then spares `growlab.optim.without_decay`.
        steps_in_epoch: optimizer steps of each epoch.
        rate_adaptation: rates of regions; needs an optimizer of `growlab.optim`.
        learning_rate: the schedule of the rate.
        seed: of everything that a training step draws.
        settings: the run's, in plain containers; a checkpoint of other settings is not resumed.
        run_id: a name for the run that survives interruptions, for loggers.
        ema_decay: of an average of the weights that is evaluated and saved beside them; None: no average.
        objective: loss and metrics; None: of classification.
    """

    def __init__(
        self,
        network: nn.Module,
        graph: WidthGraph,
        method: GrowthMethod,
        schedule: Schedule,
        state: GrowthState,
        make_optimizer: Callable[..., torch.optim.Optimizer],
        steps_in_epoch: list[int],
        rate_adaptation: RateAdaptation | None = None,
        learning_rate: LearningRate | None = None,
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        ema_decay: float | None = None,
        objective: Objective | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.average = None if ema_decay is None else WeightAverage(network, ema_decay)
        self.graph, self.method, self.schedule = graph, method, schedule
        self.growth_state = state
        self.events: list[dict[str, Any]] = []
        self.looks: list[dict[str, Any]] = []  # What a demand has measured by passes of its own, and when.
        self.rate_adaptation = rate_adaptation or RateAdaptation()
        self.learning_rate = learning_rate or LearningRate()
        self.objective = objective or Classification()
        self.seed, self.settings, self.run_id = seed, dict(settings or {}), run_id
        #: The class that each row of a head that grows with the classes is of; None: rows are in the labels' order.
        self.class_order: list[int] | None = None
        #: The blocks that come in while the network trains; None: it has all of them from the start.
        self.depth: Depth | None = None
        #: Whether a demand says when the network grows, in place of the schedule.
        self.on_demand = False
        #: Into how many parts, by rank, a batch is divided for the statistics of batch normalisation.
        self.statistics_ranks = 1
        #: The batch sizes that were found to fit, see `fit_batch_sizes`; None where the schedule says them.
        self.batch_fit: list[dict[str, int]] | None = None
        #: What is evaluated behind each epoch: "val", or "test" where the test set is watched.
        self.watched = "val"
        #: What a validation batch is evaluated in, see `FreshStatistics`.
        self.evaluating: Callable[[], AbstractContextManager[None]] = nullcontext
        self._make_optimizer, self.steps_in_epoch = make_optimizer, steps_in_epoch
        self._seed_widths = dict(state.widths)
        self._regions: tuple[Any, dict[str, Regions]] | None = None
        self._sums: dict[str, Tensor] = {}
        self._evaluated: dict[str, dict[str, Any]] = {}
        self._saved_sums: Tensor | None = None
        self._bad_step: Tensor | None = None

    @property
    def stage_widths(self) -> list[dict[str, int]]:
        """Width of each group at every stage: of the whole schedule, or as a method has decided so far."""
        if self.decides_widths:
            return [self._seed_widths, *(event["widths_after"] for event in self.events)]
        return self.schedule.widths(self.graph)

    @property
    def decides_widths(self) -> bool:
        """Whether widths are decided while the network trains, by the method or on demand."""
        return self.on_demand or isinstance(self.method, WidthDecision)

    def forward(self, *inputs: Any) -> Tensor:
        """Map a batch's inputs to logits, such as [B, num_classes]."""
        return self._scaled(self.network(*inputs))

    def positions(self, y: Tensor) -> Tensor:
        """The output that stands for each label."""
        if self.class_order is None:
            return y
        order = torch.tensor(self.class_order, device=y.device)
        return torch.argsort(order)[y]

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Mean loss of what the network puts out, such as [B, num_classes], against the target."""
        return self.objective(self._scaled(output), self.positions(y))[0]

    def _scaled(self, logits: Tensor) -> Tensor:
        factor = self.growth_state.output_factor
        return logits if factor == 1.0 else tree_map_only(Tensor, lambda tensor: tensor * factor, logits)

    # Optimizer -----------------------------------------------------------------------------------------

    def configure_optimizers(self) -> dict[str, Any]:
        """One optimizer over all parameters, its rate stepped after every batch."""
        optimizer = self._make_optimizer(self.network.parameters())
        if self.depth is None:  # Else blocks that come in join a single group.
            exempt_from_decay(optimizer, self.network)
        if self.rate_adaptation.rule is not None:
            known = self.rate_adaptation.optimizers
            if not isinstance(optimizer, Regional) or (known and type(optimizer).__name__ not in known):
                raise UserError(
                    f"this lr_adapt works with the optimizers {', '.join(known) or 'of growlab.optim'}, not "
                    f"{type(optimizer).__module__}.{type(optimizer).__name__}; choose one of them with "
                    "optimizer=..., or lr_adapt=none."
                )
            optimizer.rule = self.rate_adaptation.rule
        self.relabel_regions(optimizer)
        factor = self.learning_rate.factor_at_step(self.schedule, self.steps_in_epoch)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        """Step, and let the average follow."""
        super().optimizer_step(*arguments, **named)
        if self.average is not None:
            self.average.update_parameters(self.network)

    def relabel_regions(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell the optimizer which elements came with which stage."""
        if not isinstance(optimizer, Regional) or self.rate_adaptation.rule is None:
            return
        parameters = dict(self.network.named_parameters())
        scales = {}
        if self.rate_adaptation.output_fan_in:
            for layer in self.graph.layers:
                if layer.is_output:
                    scale = 1.0 / self.graph.fan_in(layer, self._seed_widths)
                    names = (layer.weight, *layer.emitters)
                    scales |= {parameters[name]: scale for name in names if name in parameters}
        optimizer.set_regions({parameters[name]: region for name, region in self.regions.items()}, scales)

    @property
    def regions(self) -> dict[str, Regions]:
        """Which elements of which parameters came with which stage, by the parameter's name."""
        key = (self.growth_state.stage, self.device)
        if self._regions is None or self._regions[0] != key:
            since = {} if self.depth is None else self.depth.births(self.growth_state.blocks)
            known = weight_regions(self.graph, self.growth_state.births, since)
            parameters = [name for name, _ in self.network.named_parameters() if name in known]
            self._regions = key, {name: known[name].to(self.device) for name in parameters}
        return self._regions[1]

    # Steps ---------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Go on counting where a checkpoint in the middle of an epoch stopped."""
        saved, self._saved_sums = self._saved_sums, None
        if saved is None:
            return
        saved = (saved.float() if self.device.type == "mps" else saved).to(self.device)
        if len(saved) == self.trainer.world_size:
            self._sums["train"] = saved[self.global_rank]
        else:
            # The first rank goes on for all that there were.
            self._sums["train"] = saved.sum(0) if self.global_rank == 0 else torch.zeros_like(saved[0])

    def on_train_epoch_start(self) -> None:
        """Begin to count anew."""
        self._sums = {}

    def on_train_batch_start(self, batch: tuple[Tensor, ...], batch_index: int) -> None:
        """Make what a step draws (dropout) a function of seed, epoch, batch and rank, so that a resumed run agrees."""
        self.seed_step(self.current_epoch, batch_index)

    def seed_step(self, epoch: int, batch_index: int) -> None:
        """Seed what the network draws in a step (dropout), as a function of the run's seed, these and the rank."""
        seed = hash((self.seed, epoch, batch_index, self.global_rank)) & (2**63 - 1)
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def training_step(self, batch: tuple[Tensor, ...], batch_index: int) -> Tensor:
        """Loss of one batch."""
        *inputs, target = batch
        loss, sums = self.objective(self(*inputs), self.positions(target))
        self._add("train", sums)
        self._watch(loss, batch_index)
        if self.objective.uneven and self.trainer.world_size > 1:
            # Gradients are averaged over ranks with equal weight: of all tokens, not of each rank's, is the mean.
            loss = loss * (sums[-1] / stacked(sums[-1]).mean())
        return loss

    def on_validation_epoch_start(self) -> None:
        """Begin to count anew."""
        self._forget(self.watched)

    def validation_step(self, batch: tuple[Tensor, ...], batch_index: int) -> None:
        """Metrics of one validation batch."""
        with self.evaluating():
            self._evaluate(self.watched, batch)

    def test_step(self, batch: tuple[Tensor, ...], batch_index: int) -> None:
        """Metrics of one test batch."""
        self._evaluate("test", batch)

    def on_validation_epoch_end(self) -> None:
        """Metrics of the whole network."""
        self._finish(self.watched, self.current_epoch)

    def on_test_epoch_start(self) -> None:
        """Begin to count anew."""
        self._forget("test")

    def on_test_epoch_end(self) -> None:
        """Metrics of the whole network."""
        self._finish("test", None)

    def metrics(self, split: str) -> dict[str, Any]:
        """The objective's metrics over the epoch so far, over all ranks; empty if there are none.

        Args:
            split: "train", "val" or "test"; "val_ema" or "test_ema" for the averaged weights.
        """
        if split not in self._sums:
            return {}
        found = self.objective.metrics(stacked(self._sums[split]).sum(0).tolist())
        return {
            f"{split}_{name}": value for name, value in {**found, **self._evaluated.get(split, {})}.items()
        }

    def running_metrics(self) -> dict[str, float]:
        """This rank's training metrics so far in the epoch (waits for a GPU)."""
        return self.objective.metrics(self._sums["train"].tolist()) if "train" in self._sums else {}

    def check_loss(self) -> None:
        """Stop the run if a training loss was not finite.

        Raises:
            UserError: naming the first such step.
        """
        if self._bad_step is None:
            return
        # Of all ranks, so that all stop alike.
        bad = [step for step in stacked(self._bad_step).tolist() if step >= 0]
        if bad:
            raise UserError(self._not_finite("the training loss became NaN or infinite at", min(bad)))

    def check_weights(self) -> None:
        """Stop the run if the last step left a weight or statistic that is not finite, before it is saved.

        Raises:
            UserError: naming the step and the tensor.
        """
        tensors = {n: t for n, t in self.network.state_dict().items() if t.is_floating_point()}
        finite = torch.stack([tensor.isfinite().all() for tensor in tensors.values()])
        finite = stacked(finite).all(0)
        if not bool(finite.all()):
            first = next(n for n, fine in zip(tensors, finite.tolist(), strict=True) if not fine)
            raise UserError(self._not_finite(f"{first} held NaN or infinity after", self.global_step - 1))

    def _not_finite(self, what: str, step: int) -> str:
        kept = "the last checkpoint is from before it" if self.current_epoch else "there is no checkpoint yet"
        return (
            f"{what} step {step} (epoch {self.current_epoch}, stage {self.growth_state.stage}); {kept}: lower "
            "optimizer.lr, raise schedule.learning_rate.warmup_epochs or set trainer.gradient_clip_val."
        )

    def _evaluate(self, split: str, batch: tuple[Tensor, ...]) -> None:
        *inputs, target = batch
        target, output = self.positions(target), self(*inputs)
        self._add(split, self.objective(output, target)[1])
        if isinstance(self.objective, SumObjective):
            self.objective.observe(output, target)
        if self.average is not None:
            logits = self._scaled(self.average.module(*inputs))
            self._add(f"{split}_ema", self.objective(logits, target)[1])

    def _finish(self, split: str, epoch: int | None) -> None:
        self._evaluated[split] = self.objective.evaluate(self, split, epoch)

    def _forget(self, split: str) -> None:
        for name in (split, f"{split}_ema"):
            self._sums.pop(name, None)
            self._evaluated.pop(name, None)

    def _add(self, split: str, entry: Tensor) -> None:
        # Sums of a large epoch leave float32's exact integers.
        entry = entry.double() if entry.device.type != "mps" else entry
        self._sums[split] = self._sums[split] + entry if split in self._sums else entry

    def _watch(self, loss: Tensor, batch_index: int) -> None:
        if self._bad_step is None:
            self._bad_step = torch.tensor(-1, device=loss.device)
        bad = ~torch.isfinite(loss.detach()) & (self._bad_step < 0)
        self._bad_step = torch.where(bad, self.global_step, self._bad_step)
        alone_on_cpu = loss.device.type == "cpu" and self.trainer.world_size == 1
        if alone_on_cpu or batch_index % _CHECK_LOSS_EVERY == 0:
            self.check_loss()

    # Checkpoints ---------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the growth history, which the weights cannot be loaded without."""
        checkpoint[HEADER] = {
            "state": self.growth_state.as_dict(),
            "events": self.events,
            "looks": self.looks,
            "full_widths": self.graph.full_widths,
            "epochs": list(self.schedule.epochs),
            "batch_sizes": list(self.schedule.batch_sizes),
            "batch_fit": self.batch_fit,
            "method": self.method.name,
            "settings": self.settings,
            "run_id": self.run_id,
            "statistics_ranks": self.statistics_ranks,
            # [ranks, k]: collected on every rank, saved by the first.
            "train_sums": stacked(self._sums["train"]).cpu() if "train" in self._sums else None,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Bring the network to the widths that the weights were saved at.

        Raises:
            UserError: the checkpoint is of another network, method or schedule, or of other settings.
        """
        saved = checkpoint.get(HEADER)
        if saved is None:
            raise UserError("the checkpoint was not written by growlab; give ckpt_path one of growlab's.")
        other = differences(saved["settings"], self.settings)
        other = other or differences(
            {key: saved[key] for key in ("full_widths", "method", "epochs", "batch_sizes")},
            {
                "full_widths": self.graph.full_widths,
                "method": self.method.name,
                "epochs": list(self.schedule.epochs),
                "batch_sizes": list(self.schedule.batch_sizes),
            },
        )
        state = GrowthState.from_dict(saved["state"])
        if not other:
            resize(self.network, self.graph, self.growth_state.widths, state.widths)
            if self.average is not None:
                self.average.resize(self.graph, self.growth_state, state)
            if self.depth is not None:
                # Their weights follow.
                self.graph = self.depth.restore(self.network, state.blocks, state.widths)
                if self.average is not None:
                    self.depth.restore(self.average.module, state.blocks, state.widths)
                    self.average.resize(self.graph, state, state)
            restore(self.network, self.graph, state)
            other = differences(shapes(checkpoint["state_dict"]), shapes(self.state_dict()), "the shape of ")
        if other:
            more = f" and {len(other) - 3} more" if len(other) > 3 else ""
            raise UserError(
                f"the checkpoint is of another run, with {'; '.join(other[:3])}{more}: resume with the settings "
                "that it was trained with."
            )
        if saved["statistics_ranks"] != self.statistics_ranks:
            raise UserError(
                f"batch normalisation would take its statistics over 1/{self.statistics_ranks} of each batch, not "
                f"1/{saved['statistics_ranks']} as the checkpoint's run did: go on with as many devices as before, or "
                "between one device and several with trainer.sync_batchnorm=true."
            )
        as_precise(self, checkpoint["state_dict"])
        self.growth_state, self.events = state, list(saved["events"])
        self.looks = list(saved.get("looks", []))
        self._saved_sums = saved["train_sums"]
