"""Callback that grows a model while Hugging Face's Trainer trains it."""

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

# File in the Trainer's checkpoints with the weights to resume with and the state of parts.
_FILE = "growlab.pt"


class Growth(GrowthCallback, TrainerCallback, ExportableState):
    """Grows the Trainer's model, or a submodule of it, while it trains.

    The model is narrowed to a seed when the Trainer is constructed: `Trainer(callbacks=[Growth(...)])`. Resume with
    `trainer.train(resume_from_checkpoint=...)`. At the end the model has the shapes of its configuration again.

    Args:
        network: name of the submodule to grow; "" for the model itself.
        method: growth method, which initialises new entries and rescales old ones; see `growlab.Grower` for names.
        trigger: the next widths, and when to grow; see `growlab.Grower`. Batch sizes stay the Trainer's.
        parts: features besides growing; see `growlab.parts`.
        example: the network's input, tuple of positional inputs or dict of inputs, [B, ...] with B >= 2; None: the
            model's `dummy_inputs`, which models of text have.
        seed: seed of all random draws of growth.
        optimizer_state: see `growlab.optim.follow`.
        anneal_steps: see `growlab.Grower`.
        verbose: log a line for each event.
        start: a small trained model to start from, see `growlab.Grower.from_trained`, its state_dict, or a folder
            written by `save_pretrained` or the Trainer, whose `optimizer.pt` is loaded too. The trigger may name
            its widths, {0: "small", 10: 1.0}; None: growth before the first batch.

    Attributes:
        grower: the engine, once the Trainer is constructed.
        events: all growth events so far.

    Raises:
        UserError: an argument is invalid.

    Each entry of the Trainer's log (`trainer.state.log_history`) has the stage, number of parameters and widths.
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
        # Identify the checkpoint that the Trainer is saving, and the last one that `on_save` has completed.
        self._mark = self._written = ""

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        """Trace the model and narrow it to a seed.

        Raises:
            UserError: growth does not support a setting of the Trainer, or the model cannot be traced.
        """
        if args.n_gpu > 1:
            raise UserError(
                f"one process would train on {args.n_gpu} GPUs by torch.nn.DataParallel, which growth cannot support; "
                f"start one process per GPU: torchrun --nproc_per_node={args.n_gpu} your_program.py, or use one GPU: "
                "CUDA_VISIBLE_DEVICES=0."
            )
        if model is None:
            raise UserError("growth needs the Trainer's model: give it as model=, not as model_init=.")
        if args.deepspeed:
            raise UserError(
                "DeepSpeed shards parameters in flat buffers, which growth cannot resize: shard the model with FSDP2 "
                "(fsdp=True), or train with DistributedDataParallel (torchrun alone)."
            )
        if args.fsdp:
            self._shard = _sharding(args, model)
        if args.restore_callback_states_from_checkpoint:
            raise UserError(
                "restore_callback_states_from_checkpoint recreates callbacks from JSON, which has no growth method; "
                "leave it out, as Growth restores its own state."
            )
        network = model.get_submodule(self._network)
        example = self._example
        if example is None:
            inputs = getattr(network, "dummy_inputs", None) or {}
            # The default is text (input_ids), also for images and sound.
            if not inputs or getattr(network, "main_input_name", "input_ids") not in {*inputs, "input_ids"}:
                raise UserError(f"{type(network).__name__} has no dummy_inputs; give Growth an example of its input.")
            example = as_example(network, (), inputs)
        prefix = self._network and f"{self._network}."
        self.grower = self._make(network, example, self._trigger, prefix, shard=self._shard)
        if self._shard is not None and args.resume_from_checkpoint:
            # The Trainer can load a sharded checkpoint only into a network of the same widths.
            self._resume_from(Path(args.resume_from_checkpoint))
        if is_adapted(model):
            self._load_base_first(model, self.grower.network)

    def _load_base_first(self, model: Any, network: nn.Module) -> None:
        """Patch `load_adapter`: load a checkpoint's base model, which has the widths, before its adapters."""
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
            raise UserError("pass Growth to the Trainer's constructor: Trainer(..., callbacks=[Growth(...)]).")
        saved, self.grower.clock = self._saved_in(state), Clock()
        if state.global_step and saved:
            self._resume(self.grower, saved, _resumed(args, state))
        if optimizer is not None:
            if not state.global_step:
                continue_optimizer(optimizer, self._trained_optimizer, self.grower)
                # A second call of `train` continues with the same optimizer, at other widths.
                self._trained_optimizer = None
            self.grower.follow(optimizer, state=self._optimizer_state)
        self._announce(self.grower, state.num_train_epochs, state.max_steps)
        if model is not None:
            unwrapped = getattr(model, "module", model)
            self._provide_steps(self.grower, lambda: train_dataloader, lambda batch: unwrapped(**batch)["loss"])
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
        """Add the stage, number of parameters and widths to the Trainer's log."""
        if self.grower is not None and logs is not None and state.log_history:
            logs.update(metrics(self.grower))
            state.log_history[-1].update(metrics(self.grower))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        """Replace the checkpoint's model by a plain one, which `from_pretrained` loads at full width.

        The original weights, to resume with, and the state of parts go to a separate file of the checkpoint.
        """
        if self.grower is None or not args.should_save or self._written == self._mark:
            return
        self._written = self._mark
        folder, kept = _folder(args, state), dict[str, Tensor]()
        plain: dict[str, Tensor] | None = None
        try:
            if self._shard is None:
                plain, kept = self.grower.plain_tensors(self.grower.network)
        except UserError as error:
            log.warning("%s can only be used to resume: %s", folder, error)
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
            # The Trainer loads tensors by the model's names, not by those of the original format.
            model.save_pretrained(folder, state_dict=tensors, save_original_format=False)
        if kept or self.grower.parts or self.grower.state.constants:
            saved = self.grower.state_dict()
            content = {"kept": kept, "parts": saved["parts"], "constants": saved["growth"]["constants"]}
            torch.save({**content, "mark": self._mark}, folder / _FILE)

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Make the checkpoint's model plain before the Trainer uploads it, which precedes `on_save`."""
        if (_folder(args, state) / TRAINER_STATE_NAME).is_file():
            self.on_save(args, state, control, **named)

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
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best is not None and not self._resume_from(Path(best)):
            raise UserError(
                f"load_best_model_at_end loaded {best}, which was written without Growth or is gone: the model's "
                "widths are unknown; resume from the last checkpoint without load_best_model_at_end."
            )
        self._finish(self.grower)

    def state(self) -> dict[str, Any]:
        """Return the state of growth for trainer_state.json, without tensors; called before `on_save`."""
        if self.grower is None:
            return {"args": {}, "attributes": {}}
        saved = self.grower.state_dict()
        del saved["parts"], saved["growth"]["constants"]
        self._mark = secrets.token_hex(8)
        return {"args": {}, "attributes": {**saved, "mark": self._mark}}

    def _saved_in(self, state: TrainerState) -> dict[str, Any]:
        saved = state.stateful_callbacks.get(type(self).__name__, {})
        if isinstance(saved, list):
            raise UserError("a Trainer has one Growth callback: grow a module that contains both networks.")
        return dict(saved.get("attributes", {}))

    def _resume_from(self, folder: Path) -> bool:
        """Restore the state of growth from a checkpoint; return False if it has none."""
        path = folder / TRAINER_STATE_NAME
        saved = self._saved_in(TrainerState.load_from_json(str(path))) if path.is_file() else {}
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
        # Sharded checkpoints have the original weights themselves.
        if not extra and (grower.parts or (self._shard is None and _multiplied(grower))):
            raise UserError(
                f"{folder / _FILE} is missing or of another run, and training cannot be resumed without it: resume "
                "from a checkpoint in the Trainer's output_dir, or pass its folder as "
                "TrainingArguments(resume_from_checkpoint=...) too."
            )
        put_back(grower.network, extra.get("kept", {}))


def _sharding(args: TrainingArguments, model: nn.Module) -> Shard:
    """Return the function by which accelerate shards the Trainer's model; raise if growth does not support it."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    state = AcceleratorState()
    if not getattr(state, "is_fsdp2", False):
        raise UserError(
            "fsdp= would use FSDP1, or no sharding on a CPU, which growth does not support: set version 2 in "
            "fsdp_config, and train on an accelerator."
        )
    plugin = state.fsdp_plugin
    unsupported = {
        "state_dict_type FULL_STATE_DICT in fsdp_config, which drops growth's entries on loading: set "
        "SHARDED_STATE_DICT": "FULL" in str(plugin.state_dict_type),
        "activation_checkpointing in fsdp_config: set gradient_checkpointing=True": plugin.activation_checkpointing,
        "cpu_ram_efficient_loading in fsdp_config": plugin.cpu_ram_efficient_loading,
        "load_best_model_at_end": args.load_best_model_at_end,
        "adapters of PEFT": is_adapted(model),
    }
    if used := [name for name, setting in unsupported.items() if setting]:
        raise UserError(f"growth of a model that fsdp= shards does not support {used[0]}.")
    from accelerate.utils import fsdp2_prepare_model  # absent from versions without FSDP2

    # The constructor would override the Trainer's gradient accumulation.
    accelerator = Accelerator.__new__(Accelerator)
    accelerator.state = state
    return ShardWithin(model, partial(fsdp2_prepare_model, accelerator, model))


def _extra(folder: Path) -> dict[str, Any]:
    """Load the file that `on_save` wrote into a checkpoint; {} if it does not exist."""
    path = folder / _FILE
    return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else {}


def _resumed(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the checkpoint that the Trainer resumes from, as far as callbacks can know it."""
    path = args.resume_from_checkpoint
    return Path(path) if isinstance(path, str) and Path(path).is_dir() else _folder(args, state)


def _multiplied(grower: Grower) -> bool:
    """Return True if the plain network's weights differ from those to resume with."""
    try:
        return bool(grower.plain_tensors(grower.network)[1])
    except UserError:
        return False


def _renames(model: PreTrainedModel) -> bool:
    """Return True if `save_pretrained` writes tensors under other names, which the Trainer does not load on resuming.

    This is so for a ViT or a Mixtral in transformers 5.23, which has no public function for the names.
    """
    loading: Any = importlib.import_module("transformers.core_model_loading")
    tensors = {name: torch.empty_like(t, device="meta") for name, t in model.state_dict().items()}
    return bool(tensors.keys() - loading.revert_weight_conversion(model, tensors).keys())


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
