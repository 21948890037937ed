"""The LightningModule that trains a growing network."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor

from growlab.base.errors import UserError
from growlab.base.ranks import stacked
from growlab.grower import Grower
from growlab.growth import Schedule
from growlab.lab.analysis.identity import differences
from growlab.lab.training.checkpoints import HEADER, shapes
from growlab.lab.training.learning_rate import LearningRate
from growlab.lab.training.objectives import Classification, Objective
from growlab.optim import exempt_from_decay

_CHECK_LOSS_EVERY = 50  # steps: reading the loss stalls a GPU, and ranks have to agree


class Task(LightningModule):
    """Trains a growing network on an objective.

    Args:
        grower: grower of the network.
        schedule: epochs and batch sizes of the run's stages.
        steps_in_epoch: optimizer steps of each epoch.
        make_optimizer: makes the optimizer from the parameters; those of `growlab.optim.without_decay` are then
            exempted from weight decay.
        learning_rate: learning rate schedule.
        objective: loss and metrics; None: `Classification`.
        settings: the run's settings in plain containers; checkpoints with other settings cannot be resumed.
        run_id: identifier for loggers that a resumed run keeps.

    Attributes:
        statistics_ranks: number of parts of a batch with separate batch normalisation statistics, one per rank.
        batch_fit: searched batch sizes, see `fit_batch_sizes`; None if the schedule sets them.
        watched: split that is evaluated after each epoch: "val", or "test" if the test set is watched.
        flops_in_epoch: forward FLOPs of each epoch, for learning rates that follow cost; None if not known in advance.
        evaluating: context for evaluating a validation batch, see `FreshStatistics`.
    """

    def __init__(
        self,
        grower: Grower,
        schedule: Schedule,
        steps_in_epoch: list[int],
        make_optimizer: Callable[..., torch.optim.Optimizer],
        learning_rate: LearningRate | None = None,
        objective: Objective | None = None,
        settings: Mapping[str, Any] | None = None,
        run_id: str | None = None,
    ) -> None:
        super().__init__()
        self.network, self.grower = grower.network, grower
        self.schedule, self.steps_in_epoch = schedule, steps_in_epoch
        self.learning_rate = learning_rate or LearningRate()
        self.objective = objective or Classification()
        self.settings, self.run_id = dict(settings or {}), run_id
        self.statistics_ranks = 1
        self.batch_fit: list[dict[str, int]] | None = None
        self.watched = "val"
        self.flops_in_epoch: list[int] | None = None
        self.evaluating: Callable[[], AbstractContextManager[None]] = nullcontext
        self._make_optimizer = make_optimizer
        self._sums: dict[str, Tensor] = {}
        self._evaluated: dict[str, dict[str, Any]] = {}
        self._saved_sums: Tensor | None = None
        self._bad_step: Tensor | None = None

    @property
    def stage_widths(self) -> list[dict[str, int]]:
        """Width of each group at every stage: planned, or decided so far."""
        planned = self.grower.forecast.stages if self.grower.forecast.known else None
        return planned or [self.grower.seed_widths, *(event.widths_after for event in self.grower.events)]

    def forward(self, *inputs: Any) -> Tensor:
        """Map a batch's inputs to logits, such as [B, num_classes]."""
        return self.network(*inputs)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Mean loss of the network's output, such as [B, num_classes]."""
        return self.objective(output, self.grower.targets(y))[0]

    def configure_optimizers(self) -> dict[str, Any]:
        """Make one optimizer for all parameters, and a learning rate schedule in steps."""
        optimizer = self._make_optimizer(self.network.parameters())
        if not any(part.one_group for part in self.grower.parts):
            exempt_from_decay(optimizer, self.network)
        factor = self.learning_rate.factor_at_step(self.schedule, self.steps_in_epoch, self.flops_in_epoch)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Restore the sums of a checkpoint from the middle of an epoch."""
        saved, self._saved_sums = self._saved_sums, None
        if saved is None:
            return
        saved = (saved.float() if self.device.type == "mps" else saved).to(self.device)
        if len(saved) == self.trainer.world_size:
            self._sums["train"] = saved[self.global_rank]
        else:
            # Saved with another number of ranks: the first rank continues with the total.
            self._sums["train"] = saved.sum(0) if self.global_rank == 0 else torch.zeros_like(saved[0])

    def on_train_epoch_start(self) -> None:
        """Reset the sums."""
        self._sums = {}

    def on_train_batch_start(self, batch: tuple[Tensor, ...], batch_index: int) -> None:
        """Seed the step's random numbers."""
        self.seed_step(self.current_epoch, batch_index)

    def seed_step(self, epoch: int, batch_index: int) -> None:
        """Seed a step's random numbers (dropout) by the run's seed, the step and the rank, so that runs can resume."""
        seed = hash((self.grower.seed, epoch, batch_index, self.global_rank)) & (2**63 - 1)
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def training_step(self, batch: tuple[Tensor, ...], batch_index: int) -> Tensor:
        """Loss of one batch."""
        *inputs, target = batch
        loss, sums = self.objective(self(*inputs), self.grower.targets(target))
        self._add("train", sums)
        self._watch(loss, batch_index)
        if self.objective.uneven and self.trainer.world_size > 1:
            # DDP weights ranks equally, but the loss is the mean over the tokens of all ranks.
            loss = loss * (sums[-1] / stacked(sums[-1]).mean())
        return loss

    def on_validation_epoch_start(self) -> None:
        """Reset the sums."""
        self._forget(self.watched)

    def validation_step(self, batch: tuple[Tensor, ...], batch_index: int) -> None:
        """Add the metrics of a validation batch."""
        with self.evaluating():
            self._evaluate(self.watched, batch)

    def on_validation_epoch_end(self) -> None:
        """Compute the objective's further results."""
        self._evaluated[self.watched] = self.objective.evaluate(self, self.watched, self.current_epoch)

    def on_test_epoch_start(self) -> None:
        """Reset the sums."""
        self._forget("test")

    def test_step(self, batch: tuple[Tensor, ...], batch_index: int) -> None:
        """Add the metrics of a test batch."""
        self._evaluate("test", batch)

    def on_test_epoch_end(self) -> None:
        """Compute the objective's further results."""
        self._evaluated["test"] = self.objective.evaluate(self, "test", None)

    def metrics(self, split: str) -> dict[str, Any]:
        """The objective's metrics over the epoch so far, over all ranks; empty if there are none.

        Args:
            split: "train", "val" or "test"; "val_NAME" or "test_NAME" for an average of the network.
        """
        if split not in self._sums:
            return {}
        metrics = self.objective.metrics(self.total(split)) | self._evaluated.get(split, {})
        return {f"{split}_{name}": value for name, value in metrics.items()}

    def total(self, split: str) -> list[float]:
        """The objective's sums over the epoch so far, over all ranks."""
        return stacked(self._sums[split]).sum(0).tolist()

    def running_metrics(self) -> dict[str, float]:
        """This rank's training metrics so far in the epoch (waits for a GPU)."""
        return self.objective.metrics(self._sums["train"].tolist()) if "train" in self._sums else {}

    def check_loss(self) -> None:
        """Stop the run if a training loss was not finite."""
        if self._bad_step is None:
            return
        # Gathered from all ranks, so that all stop together.
        if bad := [step for step in stacked(self._bad_step).tolist() if step >= 0]:
            raise UserError(self._not_finite("the training loss became NaN or infinite at", min(bad)))

    def check_weights(self) -> None:
        """Stop the run, before saving, if a weight or running statistic is not finite or another buffer is NaN."""
        tensors = {n: t for n, t in self.network.state_dict().items() if t.is_floating_point() or t.is_complex()}
        # Masks of -inf, for example, are infinite by design.
        buffers = {n for n, _ in self.network.named_buffers(remove_duplicate=False)}
        may_be_infinite = {n for n in buffers if not n.endswith(("running_mean", "running_var"))}
        valid = [(~t.isnan() if n in may_be_infinite else t.isfinite()).all() for n, t in tensors.items()]
        # The state dict also contains factors of hooks, which are on the CPU.
        finite = torch.stack([each.to(self.device) for each in valid])
        finite = stacked(finite).all(0)
        if not bool(finite.all()):
            first = next(n for n, fine in zip(tensors, finite.tolist(), strict=True) if not fine)
            raise UserError(self._not_finite(f"{first} was NaN or infinite after", self.global_step - 1))

    def _not_finite(self, what: str, step: int) -> str:
        kept = "the last checkpoint is from before it" if self.current_epoch else "there is no checkpoint yet"
        return (
            f"{what} step {step} (epoch {self.current_epoch}, stage {self.grower.state.stage}); {kept}: lower "
            "optimizer.lr, raise schedule.learning_rate.warmup_epochs or set trainer.gradient_clip_val."
        )

    def _evaluate(self, split: str, batch: tuple[Tensor, ...]) -> None:
        *inputs, target = batch
        target, output = self.grower.targets(target), self(*inputs)
        self._add(split, self.objective(output, target)[1])
        self.objective.observe(output, target)
        for name, copy in self.grower.copies().items():
            self._add(f"{split}_{name}", self.objective(copy(*inputs), target)[1])

    def _forget(self, split: str) -> None:
        for name in (split, *(f"{split}_{copy}" for copy in self.grower.copies())):
            self._sums.pop(name, None)
            self._evaluated.pop(name, None)

    def _add(self, split: str, entry: Tensor) -> None:
        # Counts of a large epoch exceed the integers that float32 represents exactly.
        entry = entry.double() if entry.device.type != "mps" else entry
        self._sums[split] = self._sums[split] + entry if split in self._sums else entry

    def _watch(self, loss: Tensor, batch_index: int) -> None:
        if loss.device.type == "cpu" and self.trainer.world_size == 1:
            if not isfinite(loss.item()):
                self._bad_step = torch.tensor(self.global_step)
                self.check_loss()
            return
        if self._bad_step is None:
            self._bad_step = torch.tensor(-1, device=loss.device)
        bad = ~torch.isfinite(loss.detach()) & (self._bad_step < 0)
        self._bad_step = torch.where(bad, self.global_step, self._bad_step)
        if batch_index % _CHECK_LOSS_EVERY == 0:
            self.check_loss()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the growth history, which is needed to load the weights."""
        checkpoint[HEADER] = {
            **self._plan(),
            "grower": self.grower.state_dict(),
            "batch_fit": self.batch_fit,
            "settings": self.settings,
            "run_id": self.run_id,
            "statistics_ranks": self.statistics_ranks,
            # [ranks, k]: gathered on every rank, saved by the first.
            "train_sums": stacked(self._sums["train"]).cpu() if "train" in self._sums else None,
        }

    def _plan(self) -> dict[str, Any]:
        """Method and stages, which must match when a run is resumed."""
        epochs, sizes = list(self.schedule.epochs), list(self.schedule.batch_sizes)
        return {"method": self.grower.method.name, "epochs": epochs, "batch_sizes": sizes}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the network's structure and widths before Lightning loads the weights."""
        saved = checkpoint.get(HEADER)
        if saved is None:
            raise UserError("the checkpoint was not written by growlab; give ckpt_path one of growlab's.")
        ours = self._plan()
        theirs = {key: saved[key] for key in ours} | {"full_widths": saved["grower"]["full_widths"]}
        ours["full_widths"] = self.grower.full_graph.full_widths
        other = differences(saved["settings"], self.settings) or differences(theirs, ours)
        if not other:
            self.grower.load_state_dict(saved["grower"])
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
                f"1/{saved['statistics_ranks']} as the checkpoint's run did: resume with as many devices as before, or "
                "between one device and several with trainer.sync_batchnorm=true."
            )
        if all(checkpoint["state_dict"][name].dtype == torch.float64 for name, _ in self.named_parameters()):
            # Lightning converts the module only after loading, when the weights would have been rounded.
            self.double()
        self._saved_sums = saved["train_sums"]
