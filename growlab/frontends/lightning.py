"""Lightning callback that grows the network of any LightningModule.

It relies on undocumented parts of Lightning, which tests cover: `strategy.configure_ddp()` wraps `strategy.model`
again, loops keep their data in `_data_source`, and modules have methods that call the batch transfer hooks.
"""

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial, wraps
from itertools import islice
from math import ceil, inf, isfinite
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from growlab.base.errors import UserError
from growlab.frontends.common import GrowthCallback, continue_optimizer, metrics
from growlab.grower import Grower
from growlab.grower.network import make_plain, put_back
from growlab.grower.part import Part, WidthPart
from growlab.grower.sharding import Shard, ShardWithin
from growlab.grower.triggers import At, Clock, Never, Trigger
from growlab.growth import GrowthEvent, GrowthMethod, Schedule, restore
from growlab.optim import Inheritance
from growlab.widths.inputs import Example, captured
from growlab.widths.unchanged import draws_restored

log = logging.getLogger(__name__)

# Checkpoint key of the weights to resume with where the state_dict has a plain network's instead.
_KEPT = "kept"
# File of a distributed checkpoint that has everything except the tensors.
_REST = "meta.pt"
_STEPS = {"fit": "training", "validate": "validation", "test": "test", "predict": "predict"}
_PROBE = 8  # samples in the example input
_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_AVERAGING = (StochasticWeightAveraging, WeightAveraging)


def starts_by_copies(strategy: Any) -> bool:
    """True if a strategy forks or spawns its processes (a private attribute, covered by a test)."""
    return isinstance(strategy, DDPStrategy) and strategy._start_method != "popen"


def renew_wrapper(trainer: Trainer, grower: Grower) -> None:
    """Rebuild DistributedDataParallel, if any, after parameters were replaced; this broadcasts rank 0's parameters."""
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy) or not isinstance(strategy.model, DistributedDataParallel):
        return
    # Lightning converts to SyncBatchNorm once, before training: convert the layers that were added since.
    for network in _networks(grower).values() if (sync := strategy._layer_sync) is not None else ():
        for path, module in list(network.named_modules()):
            if type(module) in _PLAIN_NORMS and (synced := sync.apply(module)) is not module:
                network.set_submodule(path, synced)
    wrapper = strategy.model
    strategy.model = trainer.lightning_module
    try:
        strategy.configure_ddp()
    except BaseException:
        strategy.model = wrapper
        raise


class Growth(GrowthCallback, Callback):
    """Grows a network of any LightningModule while it trains.

    The network is narrowed to a seed before the optimizers are created, grows before the batches that the trigger
    chooses, and is an ordinary network at the end. Optimizers, learning rate schedules and other callbacks stay the
    same; checkpoints restore their widths. With `ModelParallelStrategy` it calls the module's `configure_model` to
    shard the network.

    Args:
        network: name of the submodule to grow, "" for the module itself; None: the only one with parameters. With a
            tuple of names the first one grows and the others follow as copies, such as the target network of BYOL or
            Q-learning; each starts as a copy of the seed.
        method: growth method, which initialises new entries and rescales old ones; see `growlab.Grower` for names.
        trigger: the next widths, and when to grow; see `growlab.Grower`. If it sets batch sizes, they are assigned to
            the data module's `batch_size`.
        parts: features besides growing; see `growlab.parts`.
        example: the submodule's input, tuple of positional inputs or dict of inputs, [B, ...] with B >= 2; None: the
            module's `example_input_array` if the module itself grows, else its inputs for the first training batch.
        seed: seed of all random draws of growth.
        optimizer_state: see `growlab.optim.follow`.
        anneal_steps: see `growlab.Grower`.
        grower: a Grower that the module creates, saves, loads and finishes itself, instead of the arguments above. The
            callback then only calls its steps and attaches the optimizers.
        verbose: log a line for each event.
        start: a small trained network to start from, see `growlab.Grower.from_trained`; or its state_dict, a folder
            written by `save_pretrained`, or a Lightning checkpoint, whose optimizer state is loaded too.
            The trigger may name its widths, {0: "small", 10: 1.0}; None: growth before the first batch.
        on_event: called with the trainer and each event, instead of logging metrics to the trainer's loggers.

    Attributes:
        grower: the engine, from `setup` on.
        events: all growth events so far.

    Raises:
        UserError: an argument is invalid, the submodule does not exist or cannot be traced, or the strategy is not
            supported.
        ValueError: `grower` is given together with a method or a trigger.

    Examples:
        `Trainer(callbacks=[Growth(method=VarianceTransfer(), trigger={0: 0.25, 10: 0.5, 20: 1.0})])`
    """

    def __init__(
        self,
        network: str | tuple[str, ...] | None = None,
        *,
        method: GrowthMethod | str | None = None,
        trigger: Trigger | Schedule | Mapping[float, Any] | None = None,
        parts: Sequence[Part] = (),
        example: Example | None = None,
        seed: int = 0,
        optimizer_state: Inheritance = "auto",
        anneal_steps: int | None = None,
        grower: Grower | None = None,
        verbose: bool = True,
        start: nn.Module | Mapping[str, Tensor] | str | Path | None = None,
        on_event: Callable[[Trainer, GrowthEvent], None] | None = None,
    ) -> None:
        if grower is not None and (method is not None or trigger is not None):
            raise ValueError("give Growth a method and a trigger, or a grower, which has both.")
        self.grower, self._is_given, self._on_event = grower, grower is not None, on_event
        names = network if isinstance(network, tuple) else (network,)
        if not names or len(set(names)) < len(names) or (len(names) > 1 and None in names):
            raise UserError(
                f"network={names!r} must be different names: the submodule that grows, followed by its copies."
            )
        (self._network, *self._copies), self._example = names, example

        self._set("Lightning", method, trigger, parts, seed, optimizer_state, anneal_steps, verbose, start)
        self._is_seed, self._ended, self._shapes = False, False, dict[str, torch.Size]()
        self._saving: Saving | None = None
        self._put_back_batches: Callable[[], None] = lambda: None
        self._put_back_sharding: Callable[[], None] = lambda: None
        self._shard: Shard | None = None

    @cached_property
    def state_key(self) -> str:
        """Key of this callback's state in checkpoints; different for each submodule."""
        return self._generate_state_key(network=self._network)

    # Setup -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Trace the network, and narrow it to a seed for training."""
        strategy = trainer.strategy
        sharded = isinstance(strategy, ModelParallelStrategy)
        # Not isinstance of DDPStrategy: DeepSpeed's strategy is a subclass.
        if not isinstance(strategy, SingleDeviceStrategy) and type(strategy) is not DDPStrategy and not sharded:
            raise UserError(
                f"{type(strategy).__name__} does not support growth: use strategy='ddp', or ModelParallelStrategy for "
                "a sharded network."
            )
        if starts_by_copies(strategy):
            raise UserError(
                "forked or spawned processes return the network in its initial shapes, so training that ends before "
                "its last stage would be lost: use strategy='ddp' in a script."
            )
        if self._is_given:
            return
        if sharded:
            self._take_over(strategy, pl_module)
        elif is_overridden("configure_model", pl_module):
            # Lightning calls it again next, and requires that a second call does nothing.
            pl_module.configure_model()
        self._open(pl_module, stage, partial(self._inputs_in_step, trainer, pl_module, stage))
        self._shapes = shapes_of(self._find(pl_module, self._network))
        if stage == "fit":
            self._ended = False
            if self._saving is not None:
                # The previous fit raised an error, after which Lightning does not call `teardown`.
                self._saving.remove()
                self._put_back_batches()
            self._saving = Saving(pl_module, partial(self._on_save, pl_module))
            self._put_back_batches = change_batch_sizes(trainer, self._trigger)

    def _take_over(self, strategy: ModelParallelStrategy, module: LightningModule) -> None:
        """Call `configure_model` instead of Lightning, and load a checkpoint's widths before its weights."""
        self._put_back_sharding()
        configure, load = module.configure_model, strategy.load_checkpoint
        self._shard = ShardWithin(module, configure)

        def load_checkpoint(path: Any, weights_only: bool | None = None) -> dict[str, Any]:
            local = Path(strategy.broadcast(path))
            file = local / _REST if local.is_dir() else local
            saved = torch.load(file, "cpu", mmap=True, weights_only=weights_only).get("callbacks", {})
            if self.state_key in saved:
                self.grower.load_state_dict(saved[self.state_key])
            return load(path, weights_only)

        def put_back() -> None:
            del module.configure_model, strategy.load_checkpoint
            self._put_back_sharding = lambda: None

        module.configure_model = lambda: None
        strategy.load_checkpoint = load_checkpoint
        self._put_back_sharding = put_back

    def _open(self, module: LightningModule, stage: str, capture: Callable[[nn.Module], Any]) -> Grower:
        """Create the Grower for a stage, or reuse that of the stage before; `capture` returns example inputs."""
        network = self._find(module, self._network)
        grower = self.grower
        # The network was only evaluated; a method that changes how weights are stored has restored plain ones.
        starts_over = grower is not None and grower.method.changes_storage and not self._is_seed
        if grower is not None and not starts_over and grower.network is getattr(network, "_orig_mod", network):
            grower.reattach_hooks()
            if stage == "fit":
                # Every fit counts epochs and steps from zero.
                grower.clock = Clock()
            if stage != "fit" or self._is_seed:
                return grower
            # It was only evaluated so far, possibly at a checkpoint's widths.
            grower.restore_full_width()
        example = capture(network) if self._example is None else self._example
        # A network that is only evaluated keeps its weights.
        trigger = self._trigger if stage == "fit" else Never()
        path, self._is_seed = next(n for n, m in module.named_modules() if m is network), stage == "fit"
        self.grower = self._make(network, example, trigger, path and f"{path}.", self._is_seed, self._shard)
        for name in self._copies:
            copy = self._find(module, name)
            self._follow(self.grower, copy)
            if self._is_seed:
                copy.load_state_dict(network.state_dict())
        return self.grower

    @staticmethod
    def _follow(grower: Grower, copy: nn.Module) -> None:
        # Their widths differ if the network has loaded a checkpoint already.
        grower.resize_to(copy, grower.state)
        restore(copy, grower.graph, grower.state)
        grower.follow(copy)

    # Growing -----------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the optimizers, and the weight averages of other callbacks."""
        # A resumed run loads its own optimizer's state instead.
        if self._trained_optimizer is not None and len(trainer.optimizers) == 1 and trainer.ckpt_path is None:
            continue_optimizer(trainer.optimizers[0], self._trained_optimizer, self.grower)
            self._trained_optimizer = None
        self.grower.follow(*trainer.optimizers, state=self._optimizer_state, announced=True)
        self._follow_averages(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Call the parts' hooks on gradients; Lightning computes these inside the optimizer's step."""
        self.grower.before_step(optimizer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Grow if the run was resumed from a stage's last step; warn if training ends before the last stage."""
        if not self._is_given:
            self._announce(self.grower, *length(trainer))
            loader = partial(getattr, trainer, "train_dataloader")
            self._provide_steps(self.grower, loader, partial(_step_loss, trainer, pl_module))
        self._step(trainer)
        self._log(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Grow if the trigger says so."""
        self._step(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Grow if the trigger says so; a run resumed at the end of an epoch starts here."""
        self._step(trainer)

    def _step(self, trainer: Trainer) -> None:
        events = self.grower.step(
            epoch=trainer.current_epoch, step=trainer.global_step, then=partial(renew_wrapper, trainer, self.grower)
        )
        if self._on_event is None and events:
            self._log(trainer)
        for event in events if self._on_event is not None else ():
            self._on_event(trainer, event)

    def _log(self, trainer: Trainer) -> None:
        for logger in trainer.loggers if self._on_event is None else ():
            logger.log_metrics(metrics(self.grower), step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Turn the network into an ordinary one, and warn if it is not fully grown."""
        self._ended = True
        if not self._is_given:
            self._finish(self.grower)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Turn the network into an ordinary one after an evaluation, or a fit without training steps."""
        if self._is_given:
            return
        if self._saving is not None:
            self._saving.remove()
            self._saving = None
        self._put_back_batches()
        self._put_back_sharding()
        if stage != "fit" or not self._ended:
            # Any stage is fine for an evaluation and the learning rate finder, which do not train.
            self._finish(self.grower, at_any_stage=stage != "fit" or not trainer.global_step)

    # Checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of growth for Lightning's checkpoints."""
        return {} if self.grower is None or self._is_given else self.grower.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of growth; Lightning has loaded the module's weights before."""
        self.grower.load_state_dict(state_dict)
        put_back_networks(self.grower, state_dict.get(_KEPT, {}))

    def _on_save(self, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # A sharded checkpoint is loaded into a network that already has the widths in the callback's state.
        kept = {} if self._shard is not None else hold_plain_networks(self.grower, module, checkpoint)
        if "callbacks" in checkpoint:
            checkpoint["callbacks"][self.state_key][_KEPT] = kept

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Resize the averages of other callbacks before these load their state."""
        self._follow_averages(trainer, pl_module)

    def _follow_averages(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_given:
            return
        grower, others = self.grower, [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        for average in averages(others, grower.network, self._shapes, (pl_module, *grower.copies().values())):
            self._follow(grower, average)

    def load(self, module: LightningModule, path: str | Path) -> LightningModule:
        """Load a checkpoint of any stage without a trainer, like `load_from_checkpoint`.

        Args:
            module: made as for training, at full width.
            path: checkpoint that was written with this callback.

        Returns:
            The module at the checkpoint's widths, as an ordinary network.

        Raises:
            UserError: the callback was not given an `example`.
        """
        grower = self._open(module, "test", partial(self._example_inputs, module))
        content = torch.load(path, map_location=module.device, weights_only=True)
        module.load_state_dict(content["state_dict"])
        saved = content.get("callbacks", {}).get(self.state_key, {}).get("parts", {})
        for part in grower.parts:
            if isinstance(part, WidthPart):
                part.load_for_inference(saved.get(part.name, {}))
        grower.finish(at_any_stage=True)
        return module

    # Example inputs ----------------------------------------------------------------------------------------

    @staticmethod
    def _find(module: LightningModule, name: str | None) -> nn.Module:
        names = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
        if name is None:
            if len(names) != 1:
                listed = ", ".join(f"Growth({name!r}, ...)" for name in names)
                raise UserError(
                    f"{type(module).__name__} has {len(names)} submodules with parameters: say which one grows"
                    f"{listed and f', {listed}'}, or Growth('', ...) for the module as a whole."
                )
            name = names[0]
        try:
            return module.get_submodule(name)
        except AttributeError:
            raise UserError(
                f"{type(module).__name__} has no submodule {name!r}, only {', '.join(names) or 'none'}."
            ) from None

    def _example_inputs(self, module: LightningModule, network: nn.Module) -> tuple[Any, ...]:
        example = move_data_to_device(module.example_input_array, module.device)
        if example is None:
            raise UserError("give Growth an example of the network's input, such as example=torch.randn(2, 3, 32, 32).")
        call = partial(module, **example) if isinstance(example, dict) else partial(module, *_as_tuple(example))
        inputs = captured(call, network, module)
        return _as_tuple(example) if inputs is None else inputs

    def _inputs_in_step(
        self, trainer: Trainer, module: LightningModule, stage: str, network: nn.Module
    ) -> tuple[Any, ...]:
        """Capture the network's inputs in a step of the stage on a few samples."""
        if module.example_input_array is not None:
            return self._example_inputs(module, network)
        stage = getattr(stage, "value", stage)
        loop = getattr(trainer, f"{stage}_loop")
        kind = f"{_STEPS[stage]}_step"
        with draws_restored(module):
            batch = few_samples(loop._data_source.dataloader())
            try:
                batch = _transferred(module, batch)
            except Exception:
                # The hooks may need what the module's `setup` creates, which Lightning calls later.
                batch = move_data_to_device(batch, module.device)
        step = getattr(module, kind)
        arguments = (batch, 0)[: len(inspect.signature(step).parameters)]
        try:
            example = captured(partial(step, *arguments), network, module)
        except Exception as error:
            raise UserError(
                f"Growth cannot capture the network's input, because {kind} of a few samples failed before it was "
                f"called ({type(error).__name__}: {error}); give Growth an example of its input."
            ) from error
        if example is None:
            raise UserError(f"{kind} does not call the network that is to grow; give Growth an example of its input.")
        return example


def _transferred(module: LightningModule, batch: Any) -> Any:
    """Move a batch to the module's device, with the hooks for it of the module or data module."""
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return module._apply_batch_transfer_handler(batch, device=module.device, dataloader_idx=0)


def _as_tuple(example: Any) -> tuple[Any, ...]:
    return tuple(example) if isinstance(example, (tuple, list)) else (example,)


def _step_loss(trainer: Trainer, module: LightningModule, batch: Any) -> Tensor:
    """Compute the loss of the module's training step without logging."""
    if not module.automatic_optimization:
        raise UserError(
            "a module with manual optimization returns no loss to train extra steps with: give the callback's grower "
            "one by grower.provide(step_loss=...)."
        )
    arguments = (_transferred(module, batch), 0)[: len(inspect.signature(module.training_step).parameters)]
    silenced = {name: vars(module).get(name) for name in ("log", "log_dict")}
    try:
        for name in silenced:
            vars(module)[name] = lambda *_, **__: None
        with trainer.precision_plugin.train_step_context():
            output = module.training_step(*arguments)
    finally:
        for name, override in silenced.items():
            vars(module).pop(name)
            if override is not None:
                vars(module)[name] = override
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def change_batch_sizes(trainer: Trainer, trigger: Trigger) -> Callable[[], None]:
    """Set the data module's `batch_size` to the trigger's before each `train_dataloader`; return the undo function."""
    data = getattr(trainer, "datamodule", None)
    if not isinstance(trigger, At) or trigger.batch_sizes is None or len(set(trigger.batch_sizes)) == 1:
        return lambda: None
    sizes = trigger.batch_sizes
    if not hasattr(data, "batch_size"):
        log.warning("the trigger's batch sizes %s are ignored: the data module has no batch_size", sizes)
        return lambda: None
    if uneven := [size for size in sizes if size % trainer.world_size]:
        raise UserError(f"a batch of {uneven[0]} does not divide among {trainer.world_size} processes.")
    attributes, every_n_epochs = vars(data), trainer.reload_dataloaders_every_n_epochs
    before = {name: attributes[name] for name in ("train_dataloader", "batch_size") if name in attributes}
    original = data.train_dataloader

    @wraps(original)
    def train_dataloader() -> Any:
        now = Clock(epoch=trainer.current_epoch, step=trainer.global_step)
        data.batch_size = sizes[trigger.stage_at(now)] // trainer.world_size
        return original()

    def put_back() -> None:
        for name in ("train_dataloader", "batch_size"):
            attributes.pop(name, None)
        attributes.update(before)
        trainer.reload_dataloaders_every_n_epochs = every_n_epochs

    data.train_dataloader = train_dataloader
    trainer.reload_dataloaders_every_n_epochs = 1
    return put_back


def length(trainer: Trainer) -> tuple[float, float]:
    """Return the maximum numbers of epochs and optimizer steps of a fit, `inf` if unknown.

    Assumes that all epochs have as many batches as the current one. With several optimizers only `max_steps` is used.
    """
    epochs = inf if trainer.max_epochs in (None, -1) else float(trainer.max_epochs or 0)
    steps = inf if trainer.max_steps == -1 else float(trainer.max_steps)
    in_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
    if len(trainer.optimizers) != 1 or not isfinite(in_epoch) or not in_epoch:
        return epochs, steps
    steps_in_epoch = ceil(in_epoch)
    return min(epochs, ceil(steps / steps_in_epoch) if isfinite(steps) else inf), min(steps, epochs * steps_in_epoch)


def few_samples(loaders: Any) -> Any:
    """Return a batch of a few samples, without using the loader's sampler or workers if its dataset can be indexed."""
    is_batched = isinstance(loaders, DataLoader) and loaders.batch_sampler is not None
    if is_batched and (batch := _indexed(loaders)) is not None:
        return batch
    # Stateful loaders keep their position, so restore it: training must not start later.
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    positions = [(loader, loader.state_dict()) for loader in combined.flattened if hasattr(loader, "load_state_dict")]
    batch = next(islice(combined, 1))[0]
    combined.reset()
    for loader, position in positions:
        loader.load_state_dict(position)
    return batch


def _indexed(loader: DataLoader[Any]) -> Any:
    """Return the first samples of a dataset by integer index, or None if it has other keys."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        number = min(_PROBE, len(loader.dataset))  # type: ignore[arg-type]
        return loader.collate_fn([loader.dataset[index] for index in range(number)])
    except Exception:
        # Errors in the data themselves are raised again when the loader is read.
        return None


#: Network name -> tensor name -> the original value of an entry that was replaced by a plain one, to resume with.
Kept = dict[str, dict[str, Tensor]]


class Saving:
    """Wraps a module's `on_save_checkpoint`, the last hook before a checkpoint is written, to call `then` before it.

    Needed because Lightning does not call callbacks' hooks for weights-only checkpoints, and because callbacks that
    keep an average add it in their own hook.
    """

    def __init__(self, module: LightningModule, then: Callable[[dict[str, Any]], None]) -> None:
        self._module, self._next = module, module.on_save_checkpoint
        self._then: Callable[[dict[str, Any]], None] | None = then
        self._override = vars(module).get("on_save_checkpoint")
        module.on_save_checkpoint = self  # type: ignore[method-assign]

    def __call__(self, checkpoint: dict[str, Any]) -> None:
        """Change the checkpoint, then call the module's hook."""
        if self._then is not None:
            self._then(checkpoint)
        self._next(checkpoint)

    def __reduce__(self) -> Any:
        # A copy of the module is not trained: it keeps its own hook.
        return getattr, (self._module, "on_save_checkpoint")

    def remove(self) -> None:
        """Restore the module's hook."""
        self._then = None
        # If two networks of the module grow, their hooks may be removed in any order.
        while isinstance(first := vars(self._module).get("on_save_checkpoint"), Saving) and first._then is None:
            if first._override is None:
                del self._module.on_save_checkpoint
            else:
                self._module.on_save_checkpoint = first._override


def hold_plain_networks(grower: Grower, module: LightningModule, checkpoint: dict[str, Any]) -> Kept:
    """Replace networks in a checkpoint by plain ones, which `load_from_checkpoint` loads at full width.

    While normalisations over channels are being annealed, the checkpoint stays unchanged, with entries that a plain
    network rejects.

    Returns:
        The original values of changed entries, for `put_back_networks`.
    """
    kept: Kept = {}
    for key, path, name, network in list(_networks_in(grower, module, checkpoint)):
        try:
            plain, kept[name] = grower.plain_tensors(network)
        except UserError:
            return {}
        prefix = path and f"{path}."
        state = checkpoint[key] = _with_metadata(checkpoint[key], path, network)
        for entry in network.state_dict().keys() - plain.keys():
            state.pop(prefix + entry, None)
        # A module may leave entries out of its state_dict.
        state.update({prefix + entry: plain[entry] for entry in kept[name] if prefix + entry in state})
        make_plain(vars(state)["_metadata"].get(path, {}))
    return kept


def put_back_networks(grower: Grower, kept: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Restore the growing networks' own values after plain weights were loaded into them."""
    for name, network in _networks(grower).items():
        put_back(network, kept.get(name, {}))


def _networks(grower: Grower) -> dict[str, nn.Module]:
    return {"": grower.network, **grower.copies()}


def _networks_in(
    grower: Grower, module: LightningModule, checkpoint: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, nn.Module]]:
    """Yield each growing network in a checkpoint: the checkpoint's key, the path below it, the network's name, itself.

    Averages of the whole module have networks at the same paths as the module.
    """
    networks = _networks(grower)
    paths = {path for path, part in module.named_modules() if any(part is each for each in networks.values())}
    for key, state in checkpoint.items():
        for path in sorted(paths) if isinstance(state, Mapping) else ():
            for name, network in networks.items():
                if _is_of(state, path, network):
                    yield key, path, name, network


def _is_of(state: Mapping[str, Any], path: str, network: nn.Module) -> bool:
    """Return True if the entries of a state_dict at a path share memory with this network's parameters."""
    parameters = {f"{path}.{name}" if path else name: p for name, p in network.named_parameters() if p.numel()}
    saved = ((state.get(name), p) for name, p in parameters.items())
    return any(isinstance(t, Tensor) and t.data_ptr() == p.data_ptr() for t, p in saved)


def _with_metadata(state: Any, path: str, network: nn.Module) -> Any:
    """Return the state_dict with the network's metadata, which a callback may have dropped."""
    if not hasattr(state, "_metadata"):
        state = OrderedDict(state)
        vars(state)["_metadata"] = OrderedDict()
    metadata = vars(network.state_dict())["_metadata"].get("", {})
    vars(state)["_metadata"].setdefault(path, dict(metadata))
    return state


def shapes_of(network: nn.Module) -> dict[str, torch.Size]:
    """Shapes of a network's parameters and buffers, by name."""
    return {name: tensor.shape for name, tensor in network.state_dict().items()}


def averages(
    callbacks: Iterable[Callback], network: nn.Module, shapes: Mapping[str, torch.Size], known: Iterable[nn.Module]
) -> Iterator[nn.Module]:
    """Yield the copies of the network in modules of callbacks, such as Lightning's weight averages.

    `shapes` are the network's at the time of the callbacks' `setup`; `known` are the trained module and the copies
    that are followed already, which callbacks may reference too.

    Raises:
        UserError: Lightning made an average before the network became a seed.
    """
    seen = {id(module) for each in known for module in each.modules()}
    for callback in callbacks:
        attributes = [value for value in vars(callback).values() if isinstance(value, nn.Module)]
        for copy in (module for value in attributes for module in value.modules() if id(module) not in seen):
            copy_shapes = shapes_of(copy) if type(copy) is type(network) else {}
            if copy_shapes == shapes:
                yield copy
            elif copy_shapes.keys() == shapes.keys() and isinstance(callback, _AVERAGING):
                name = type(callback).__name__
                raise UserError(
                    f"{name} has copied the network before it became a seed: put Growth before it, "
                    f"Trainer(callbacks=[Growth(...), {name}(...)])."
                )
