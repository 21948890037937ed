"""Eight families grow from a trained network in three loops: outputs, moments, resumed runs, saved results, ranks."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import growlab
from growlab import Grower, HyperCloning
from growlab.grower import renew
from growlab.growth import GrowthMethod
from growlab.growth.parity import relative_error
from growlab.parts import Part
from tests.command_line import CommandLine
from tests.unit.grower.test_trained import CASES, LABELS, TOKENS, output, residual

transformers = pytest.importorskip("transformers")
FAMILIES = tuple(name for name in CASES if CASES[name][0] is not residual)
STEPS, EVENT = 4, 2


@dataclass(frozen=True)
class Run:
    """What one training does; every step is an epoch of one batch, all of the data."""

    name: str
    lr: float
    method: GrowthMethod | None
    layers: tuple[int, int]
    betas = (0.9, 0.999)

    def network(self, large: bool) -> Any:
        torch.manual_seed(large)
        return CASES[self.name][0](32 if large else 16, self.layers[large])

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {k: x for k, x in CASES[self.name][1].items() if k != "attention_mask"}

    @property
    def batch(self) -> dict[str, Tensor]:
        # The Trainer divides losses by the number of labels, which are shifted: the first counts nowhere.
        words = TOKENS.masked_fill(torch.arange(TOKENS.shape[1]) == 0, -100)
        return {**self.inputs, "labels": words if "input_ids" in self.inputs else LABELS}

    def rows(self) -> list[dict[str, Tensor]]:
        return [{key: x[index] for key, x in self.batch.items()} for index in range(4)]

    @property
    def trigger(self) -> dict[float, Any]:
        return {0: "small", EVENT: 1.0}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr, betas=self.betas, weight_decay=0.0)


class Watch(Part):
    """Note the outputs before the first step and after the last one, and their change in events."""

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        self.inputs, self.errors = inputs, list[float]()
        self.first: Tensor | None = None

    def _now(self, grower: Any) -> Tensor:
        return output(grower.network, self.inputs)

    def before_growth(self, grower: Any, widths: Any) -> Mapping[str, Any]:
        self.last = self._now(grower)
        return {}

    def after_growth(self, grower: Any, event: Any) -> Mapping[str, Any]:
        self.errors.append(relative_error(self.last, self._now(grower)))
        return {}

    def check(self, grower: Any) -> None:
        """Called last when training begins."""
        self.first = self._now(grower)

    def after_step(self, grower: Any) -> None:
        self.last = self._now(grower)


Trained = tuple[nn.Module, torch.optim.Optimizer]


class Plain:
    """A loop by hand."""

    def small(self, run: Run, folder: Path) -> Any:
        small = run.network(False)
        optimizer = run.optimizer(small.parameters())
        self._steps(run, small, optimizer, range(STEPS))
        return small, optimizer

    def grow(self, run: Run, start: Any, folder: Path, parts: Sequence[Part], stop: int | None = None) -> Trained:
        wide, (small, optimizer) = run.network(True), copy.deepcopy(start)
        grower = Grower.from_trained(
            small, wide, run.inputs, optimizer=optimizer, trigger=run.trigger, parts=parts, method=run.method
        )
        grower.provide(total_steps=STEPS)
        objects, first = (grower, wide, optimizer), 0
        if stop is not None:
            for each, state in zip(objects, torch.load(folder / f"{stop}.pt", weights_only=True), strict=True):
                each.load_state_dict(state)
            first = stop
        for epoch in range(first, STEPS):
            torch.save([each.state_dict() for each in objects], folder / f"{epoch}.pt")
            grower.step(epoch)
            self._steps(run, wide, optimizer, range(1))
        return grower.finish(), optimizer

    @staticmethod
    def _steps(run: Run, network: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for _ in steps:
            optimizer.zero_grad()
            network.train()(**run.batch).loss.backward()
            optimizer.step()


class Lightning:
    """A LightningModule, its checkpoint, and the callback."""

    def _fit(self, run: Run, network: Any, callbacks: list[Any], checkpoint: Path | None = None) -> Any:
        lightning = pytest.importorskip("lightning")

        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.network = network

            def training_step(self, batch: Any, _: int) -> Tensor:
                loss: Tensor = self.network(**batch).loss
                return loss

            def configure_optimizers(self) -> Any:
                return run.optimizer(self.parameters())

        trainer = lightning.Trainer(
            max_epochs=STEPS, callbacks=callbacks, logger=False, enable_progress_bar=False, accelerator="cpu",
            enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(Module(), torch.utils.data.DataLoader(run.rows(), batch_size=4), ckpt_path=checkpoint)
        return trainer

    def small(self, run: Run, folder: Path) -> Any:
        small = run.network(False)
        trainer = self._fit(run, small, [])
        if run.name == "gemma3":
            # Its factor on embeddings is no tensor of a checkpoint.
            small.save_pretrained(folder / "small")
            torch.save(trainer.optimizers[0].state_dict(), folder / "small" / "optimizer.pt")
            return folder / "small"
        trainer.save_checkpoint(folder / "small.ckpt")
        return folder / "small.ckpt"

    def grow(self, run: Run, start: Any, folder: Path, parts: Sequence[Part], stop: int | None = None) -> Trained:
        lightning = pytest.importorskip("lightning")

        class Save(lightning.Callback):  # type: ignore[misc]
            def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
                trainer.save_checkpoint(folder / f"{trainer.current_epoch + 1}.ckpt")

        wide = run.network(True)
        growth = growlab.Growth(
            "network", start=start, trigger=run.trigger, parts=parts, method=run.method, example=run.inputs
        )
        callbacks = [growth, *([Save()] if stop is None else [])]
        trainer = self._fit(run, wide, callbacks, None if stop is None else folder / f"{stop}.ckpt")
        return wide, trainer.optimizers[0]


class Trainer:
    """The Trainer of transformers, and the callback."""

    def _fit(self, run: Run, network: Any, folder: Path, callbacks: list[Any], stop: int | None = None) -> Any:
        pytest.importorskip("accelerate")
        arguments = transformers.TrainingArguments(
            str(folder), num_train_epochs=STEPS, per_device_train_batch_size=4, report_to=[], use_cpu=True,
            save_steps=1, disable_tqdm=True, seed=0, learning_rate=run.lr, lr_scheduler_type="constant",
            max_grad_norm=0.0, adam_beta1=run.betas[0], adam_beta2=run.betas[1],
        )  # fmt: skip
        trainer = transformers.Trainer(network, arguments, train_dataset=run.rows(), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=None if stop is None else str(folder / f"checkpoint-{stop}"))
        return trainer

    def small(self, run: Run, folder: Path) -> Any:
        self._fit(run, run.network(False), folder / "small", [])
        return folder / "small" / f"checkpoint-{STEPS}"

    def grow(self, run: Run, start: Any, folder: Path, parts: Sequence[Part], stop: int | None = None) -> Trained:
        from growlab.frontends.transformers import Growth

        wide = run.network(True)
        growth = Growth(start=start, trigger=run.trigger, parts=parts, method=run.method, example=run.inputs)
        trainer = self._fit(run, wide, folder / "wide", [growth], stop)
        return wide, getattr(trainer.optimizer, "optimizer", trainer.optimizer)


LOOPS: dict[str, Any] = {"plain": Plain(), "lightning": Lightning(), "trainer": Trainer()}
TABLE = [
    pytest.param(name, loop, id=f"{name}-{loop}", marks=[pytest.mark.slow] * ((name, loop) != ("llama", "plain")))
    for name in FAMILIES
    for loop in LOOPS
]


def exact(network: nn.Module) -> float:
    return 1e-10 if next(network.parameters()).dtype == torch.float64 else 1e-5


@pytest.mark.parametrize(("name", "loop"), TABLE)
def test_outputs_stay_from_the_trained_network_to_the_saved_result(name: str, loop: str, tmp_path: Path) -> None:
    """Width and depth, with noise; a resumed training ends with the same bits."""
    run, row = Run(name, 1e-3, None, (1, 2)), LOOPS[loop]
    start, watch = row.small(run, tmp_path), Watch(run.inputs)
    wide, _ = row.grow(run, start, tmp_path, [watch])
    small = start[0] if loop == "plain" else run.network(False)
    if loop != "plain" and start.is_dir():
        small = type(small).from_pretrained(start)
    elif loop == "lightning":
        tensors = torch.load(start, weights_only=True)["state_dict"]
        small.load_state_dict({n.removeprefix("network."): t for n, t in tensors.items()})
    assert watch.first is not None
    assert relative_error(output(small, run.inputs), watch.first) < exact(wide)
    assert len(watch.errors) == 1 and watch.errors[0] < exact(wide)
    assert relative_error(watch.last, found := output(wide, run.inputs)) < exact(wide)
    wide.save_pretrained(tmp_path / "saved")
    state = type(wide).from_pretrained(tmp_path / "saved").state_dict()
    # Gemma's factor is a number of float32 in this one too.
    (loaded := run.network(True)).load_state_dict(state)
    assert relative_error(found, output(loaded, run.inputs)) < exact(wide)
    for stop in (1, 3):
        again, _ = row.grow(run, start, tmp_path, [Watch(run.inputs)], stop)
        for (key, tensor), other in zip(again.state_dict().items(), wide.state_dict().values(), strict=True):
            assert torch.equal(tensor, other), (stop, key)


@pytest.mark.parametrize(("name", "loop"), TABLE)
def test_moments_are_those_of_the_large_network_s_gradient(name: str, loop: str, tmp_path: Path) -> None:
    """With a rate of 0 the gradient is the same in each step, and moments after t steps are 1 - beta**t of it.

    Layers in front of a normalisation and keys have biases without a gradient: theirs is rounding, as are its moments.
    """
    run, row = Run(name, 0.0, HyperCloning(), (2, 2)), LOOPS[loop]
    wide, optimizer = row.grow(run, row.small(run, tmp_path), tmp_path, [])
    wide.train().zero_grad()
    wide(**run.batch).loss.backward()
    relative, rounding = (1e-5, 1e-9) if exact(wide) < 1e-9 else (1e-3, 1e-6)
    largest = max(float(p.grad.abs().max()) for p in wide.parameters())
    shares = [1 - beta ** (2 * STEPS) for beta in run.betas]
    for key, parameter in wide.named_parameters():
        state, gradient = optimizer.state[parameter], parameter.grad
        assert state["step"] == 2 * STEPS
        bound = relative * float(gradient.abs().max()) + rounding * largest
        assert float((state["exp_avg"] / shares[0] - gradient).abs().max()) < bound, key
        assert float((state["exp_avg_sq"] / shares[1]).sqrt().sub(gradient.abs()).abs().max()) < bound, key


def on_rank(rank: int, folder: Path) -> None:
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    run = Run((folder / "name").read_text(), 1e-3, None, (1, 2))
    small, wide = run.network(False), run.network(True)
    optimizer = run.optimizer(small.parameters())
    grower = Grower.from_trained(small, wide, run.inputs, optimizer=optimizer, trigger=run.trigger)
    wrapped = nn.parallel.DistributedDataParallel(wide)
    mine = {key: x[2 * rank : 2 * rank + 2] for key, x in run.batch.items()}
    for epoch in range(STEPS):
        grower.step(epoch, then=lambda: renew(wrapped))
        optimizer.zero_grad()
        wrapped.train()(**mine).loss.backward()
        optimizer.step()
    torch.save(dict(grower.finish().named_parameters()), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_end_with_the_same_bits(cli: CommandLine, tmp_path: Path, name: str) -> None:
    (tmp_path / "name").write_text(name)
    cli.on_two_ranks(on_rank, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
    assert all(first[key].shape == p.shape for key, p in CASES[name][0](32, 2).named_parameters())
    assert all(bool(tensor.isfinite().all()) for tensor in first.values())
