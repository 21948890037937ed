"""Growth in Hugging Face's Trainer: a callback for any model that it trains."""

import importlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from growlab.base.errors import UserError, how_to_install, needs
from growlab.frontends.common import GrowthCallback, continue_optimizer, metrics
from growlab.grower import Grower, renew
from growlab.grower.network import put_back, wrapper_of
from growlab.grower.part import Part
from growlab.grower.sharding import Shard, ShardWithin
from growlab.grower.trained import is_adapted
from growlab.grower.triggers import Clock, Trigger
from growlab.growth import GrowthMethod, Schedule
from growlab.optim import Inheritance
from growlab.widths.inputs import Example, as_example

with needs("Growth in Hugging Face's Trainer", how_to_install("transformers")):
    from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import ExportableState

log = logging.getLogger(__name__)

# Stored next to the Trainer's files in a checkpoint.
_FILE = "growlab.pt"


class Growth(GrowthCallback, TrainerCallback, ExportableState):
    """Grows the Trainer's model, or a submodule of it, while it trains.

    The model becomes a seed when the Trainer is constructed with the callback: `Trainer(callbacks=[...])`. Resume
    checkpoints with `trainer.train(resume_from_checkpoint=...)`; at the end the model has the shapes of its full
    configuration again.

    Args:
        network: name of the submodule to grow; "" for the model itself.
        method: growth method, which initialises new entries and rescales old ones; see `growlab.Grower` for names.
        trigger: the next widths, and when to grow; see `growlab.Grower`. Batch sizes stay the Trainer's.
        parts: features besides growing; see `growlab.parts`.
        example: the network's input, tuple of positional inputs or dict of inputs, [B, ...] with B >= 2; None: the
            model's `dummy_inputs`.
        seed: of all random draws of growth.
        optimizer_state: see `growlab.optim.follow`.
        anneal_steps: see `growlab.Grower`.
        verbose: log a line for each event.
        start: a small trained model to start from, see `growlab.Grower.from_trained`, its state_dict, or a folder
            written by `save_pretrained` or the Trainer, whose `optimizer.pt` is loaded too. The trigger may name
            its widths, {0: "small", 10: 1.0}; None: growth before the first batch.

    Attributes:
        grower: the engine, once the Trainer is made.
        events: all growth events so far.

    Raises:
        UserError: an argument is invalid.

    The Trainer's log (`trainer.state.log_history`) has stage, number of parameters and widths in each entry.
    """

    def __init__(
        self,
        network: str = "",
        *,
        method: GrowthMethod | str | None = None,
        trigger: Trigger | Schedule | Mapping[float, Any] | None = None,
        parts: Sequence[Part] = (),
        example: Example | None = None,
        seed: int = 0,
        optimizer_state: Inheritance = "auto",
        anneal_steps: int | None = None,
        verbose: bool = True,
        start: nn.Module | Mapping[str, Tensor] | str | Path | None = None,
    ) -> None:
        self._network, self._example = network, example
        self._set("the Trainer", method, trigger, parts, seed, optimizer_state, anneal_steps, verbose, start)
        self._wrapper: DistributedDataParallel | None = None
        self._shard: Shard | None = None
        self._mark = ""

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        """Trace the model and make it a seed.

        Raises:
            UserError: growth does not support a setting of the Trainer, or the model cannot be traced.
        """
        if args.n_gpu > 1:
            raise UserError(
                f"one process would train on {args.n_gpu} GPUs (torch.nn.DataParallel), copying the model for each "
                f"batch; start one process for each: torchrun --nproc_per_node={args.n_gpu} your_program.py, or let it "
                "see one GPU: CUDA_VISIBLE_DEVICES=0."
            )
        if model is None:
            raise UserError("growth needs the Trainer's model: give it as model=, not as model_init=.")
        if args.deepspeed:
            raise UserError(
                "DeepSpeed shares parameters out in flat buffers, which growth cannot resize: shard the model with "
                "FSDP2 (fsdp=True), or train with DistributedDataParallel (torchrun alone)."
            )
        if args.fsdp:
            self._shard = _sharding(args, model)
        if args.restore_callback_states_from_checkpoint:
            raise UserError(
                "restore_callback_states_from_checkpoint recreates callbacks from plain arguments, which a growth "
                "method is not; leave it out, as Growth restores itself."
            )
        network = model.get_submodule(self._network)
        example = self._example
        if example is None:
            inputs = getattr(network, "dummy_inputs", None)
            if inputs is None:
                raise UserError(f"{type(network).__name__} has no dummy_inputs; give Growth an example of its input.")
            example = as_example(network, (), inputs)
        prefix = self._network and f"{self._network}."
        self.grower = self._make(network, example, self._trigger, prefix, shard=self._shard)
        if self._shard is not None and args.resume_from_checkpoint:
            # A sharded network has to have a checkpoint's widths before the Trainer loads it.
            self._resume_from(Path(args.resume_from_checkpoint))
        if is_adapted(model):
            self._load_base_first(model, self.grower.network)

    def _load_base_first(self, model: Any, network: nn.Module) -> None:
        """Load a checkpoint's base model, and with it the widths, before the Trainer loads its adapters."""
        load = type(model).load_adapter

        def load_adapter(folder: Any, *args: Any, **named: Any) -> Any:
            if kept := _extra(Path(folder)).get("kept"):
                network.load_state_dict(kept)
            return load(model, folder, *args, **named)

        model.load_adapter = load_adapter

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Attach the optimizer, and restore the state of growth from a checkpoint."""
        if self.grower is None:
            raise UserError("give Growth to the Trainer as it is made: Trainer(..., callbacks=[Growth(...)]).")
        saved, self.grower.clock = self._saved_in(state), Clock()
        if state.global_step and saved:
            self._resume(self.grower, saved, _resumed(args, state))
        if optimizer is not None:
            if not state.global_step:
                continue_optimizer(optimizer, self._trained_optimizer, self.grower)
            self.grower.follow(optimizer, state=self._optimizer_state)
        self._announce(self.grower, state.num_train_epochs, state.max_steps)
        if model is not None:
            whole = getattr(model, "module", model)
            self._provide_steps(self.grower, lambda: train_dataloader, lambda batch: whole(**batch)["loss"])
        if args.world_size > 1 and model is not None and self._shard is None:
            self._wrapper = wrapper_of(model)
            if self._wrapper is None:
                raise UserError(
                    "growth with several processes needs the Trainer to wrap its model in DistributedDataParallel."
                )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Grow if the trigger says so."""
        then = None if self._wrapper is None else partial(renew, self._wrapper)
        self.grower.step(int(state.epoch or 0), step=state.global_step, then=then)

    on_epoch_begin = on_step_begin

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Add stage, number of parameters and widths to what the Trainer logs."""
        if self.grower is not None and logs is not None and state.log_history:
            logs.update(metrics(self.grower))
            state.log_history[-1].update(metrics(self.grower))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        """Make the checkpoint's model a plain one, which `from_pretrained` loads at full width.

        The original weights, to resume with, and the state of parts are stored in a separate file of the checkpoint.
        """
        if self.grower is None or not args.should_save:
            return
        folder, kept = _folder(args, state), dict[str, Tensor]()
        plain: dict[str, Tensor] | None = None
        try:
            if self._shard is None:
                plain, kept = self.grower.plain_tensors(self.grower.network)
        except UserError as error:
            log.warning("%s is for resuming alone: %s", folder, error)
        if is_adapted(model):
            # The Trainer saves only the adapters.
            kept = dict(self.grower.network.state_dict())
        elif not isinstance(model, PreTrainedModel):
            kept = {}
        elif kept or _renames(model):
            prefix, tensors = self._network and f"{self._network}.", model.state_dict()
            if plain is not None:
                others = {k: t for k, t in tensors.items() if not k.startswith(prefix)}
                tensors = {**others, **{prefix + k: t for k, t in plain.items()}}
            # By their own names, by which the Trainer loads them.
            model.save_pretrained(folder, state_dict=tensors, save_original_format=False)
        if kept or self.grower.parts or self.grower.state.constants:
            saved = self.grower.state_dict()
            own = {"kept": kept, "parts": saved["parts"], "constants": saved["growth"]["constants"]}
            torch.save({**own, "mark": self._mark}, folder / _FILE)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Turn the model into an ordinary one, also if the Trainer has loaded the best checkpoint.

        Raises:
            UserError: the best checkpoint lacks the state of growth.
        """
        self._wrapper = None
        vars(model or self.grower.network).pop("load_adapter", None)
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            folder = Path(state.best_model_checkpoint)
            if not self._resume_from(folder):
                raise UserError(
                    f"load_best_model_at_end took {folder}, which was written without Growth or is gone: the model may "
                    "be of no stage; resume from the last checkpoint without load_best_model_at_end."
                )
        self._finish(self.grower)

    def state(self) -> dict[str, Any]:
        """Return the state of growth without tensors, for trainer_state.json; called before `on_save`."""
        if self.grower is None:
            return {"args": {}, "attributes": {}}
        saved = self.grower.state_dict()
        del saved["parts"], saved["growth"]["constants"]
        self._mark = secrets.token_hex(8)
        return {"args": {}, "attributes": {**saved, "mark": self._mark}}

    def _saved_in(self, state: TrainerState) -> dict[str, Any]:
        saved: dict[str, Any] = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {})
        return saved

    def _resume_from(self, folder: Path) -> bool:
        """Restore the state of growth that a checkpoint has, and return True if it has one."""
        written = folder / TRAINER_STATE_NAME
        saved = self._saved_in(TrainerState.load_from_json(str(written))) if written.is_file() else {}
        if saved:
            self._resume(self.grower, saved, folder)
        return bool(saved)

    def _resume(self, grower: Grower, saved: Mapping[str, Any], folder: Path) -> None:
        extra, mark = _extra(folder), saved.get("mark")
        if mark is not None and extra.get("mark", mark) != mark:
            extra = {}
        parts = extra.get("parts", {part.name: part.state_dict() for part in grower.parts})
        growth = {**saved["growth"], "constants": extra.get("constants", {})}
        grower.load_state_dict({**saved, "growth": growth, "parts": parts})
        # Sharded checkpoints have the weights that training continues with.
        if not extra and (grower.parts or (self._shard is None and _multiplied(grower))):
            raise UserError(
                f"{folder / _FILE} is missing or of another run, and training cannot be resumed without it: resume "
                "from a checkpoint in the Trainer's output_dir, or give its folder as "
                "TrainingArguments(resume_from_checkpoint=...) too."
            )
        put_back(grower.network, extra.get("kept", {}))


def _sharding(args: TrainingArguments, model: nn.Module) -> Shard:
    """Function by which accelerate shards the Trainer's model; raise if FSDP2 or a setting rules growth out."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    state = AcceleratorState()
    if not getattr(state, "is_fsdp2", False):
        raise UserError(
            "fsdp= shards the model by FSDP1, or not at all as on the CPU, which growth does not support: set "
            "version 2 in fsdp_config, with an accelerator."
        )
    plugin = state.fsdp_plugin
    unsupported = {
        "state_dict_type FULL_STATE_DICT in fsdp_config, which loses growth's entries as it is loaded: set "
        "SHARDED_STATE_DICT": "FULL" in str(plugin.state_dict_type),
        "activation_checkpointing in fsdp_config: set gradient_checkpointing=True": plugin.activation_checkpointing,
        "cpu_ram_efficient_loading in fsdp_config": plugin.cpu_ram_efficient_loading,
        "load_best_model_at_end": args.load_best_model_at_end,
        "adapters of PEFT": is_adapted(model),
    }
    if given := [name for name, setting in unsupported.items() if setting]:
        raise UserError(f"growth of a model that fsdp= shards does not support {given[0]}.")
    from accelerate.utils import fsdp2_prepare_model  # as new as FSDP2 there

    # The constructor would replace the Trainer's settings for accumulated gradients.
    accelerator = Accelerator.__new__(Accelerator)
    accelerator.state = state
    return ShardWithin(model, partial(fsdp2_prepare_model, accelerator, model))


def _extra(folder: Path) -> dict[str, Any]:
    """Load the file that `on_save` has written into a checkpoint, or {}."""
    path = folder / _FILE
    return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else {}


def _resumed(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the checkpoint that the Trainer resumes from, if callbacks can know it."""
    given = args.resume_from_checkpoint
    return Path(given) if isinstance(given, str) and Path(given).is_dir() else _folder(args, state)


def _multiplied(grower: Grower) -> bool:
    """Return True if a plain network's weights differ from those that training continues with."""
    try:
        return bool(grower.plain_tensors(grower.network)[1])
    except UserError:
        return False


def _renames(model: PreTrainedModel) -> bool:
    """Return True if `save_pretrained` writes tensors under other names, which the Trainer does not load again.

    transformers 5.23 resumes a ViT or a Mixtral without them; it has no public function for the names.
    """
    loading: Any = importlib.import_module("transformers.core_model_loading")
    tensors = {name: torch.empty_like(t, device="meta") for name, t in model.state_dict().items()}
    return bool(tensors.keys() - loading.revert_weight_conversion(model, tensors).keys())


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
