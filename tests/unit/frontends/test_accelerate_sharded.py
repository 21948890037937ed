"""Models that accelerate shards by FSDP2, in a loop and in Hugging Face's Trainer, in two CPU processes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from growlab import Grower, HyperCloning, UserError, VarianceTransfer
from growlab.base.pieces import is_piece, reshard, whole
from tests.command_line import CommandLine, join, offer_port

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from growlab.frontends.transformers import Growth  # noqa: E402

TOKENS = torch.randint(32, (12, 6), generator=torch.Generator().manual_seed(0))
TRIGGER = {0: 0.25, 1: 0.5, 2: 1.0}


def llama(tied: bool = False) -> Any:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 32}
    config = transformers.LlamaConfig(**sizes, **heads, use_cache=False, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def claim_an_accelerator() -> None:
    """Let accelerate take the CPU for a device that it shards on; on the CPU it leaves models whole."""
    state = accelerate.PartialState(cpu=True)
    state.distributed_type = accelerate.DistributedType.MULTI_XPU


def tensors(network: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All parameters and moments, whole."""
    reshard(network)
    names = {p: name for name, p in network.named_parameters()}
    states = [(names[p], s) for optimizer in optimizers for p, s in optimizer.state.items()]
    found = {f"{key} of {name}": t for name, s in states for key, t in s.items() if isinstance(t, Tensor)}
    return {name: whole(t.detach()).clone() for name, t in {**found, **dict(network.named_parameters())}.items()}


# In a loop -----------------------------------------------------------------------------------------------------


def in_a_loop(shard: Any, prepare: Any, backward: Any, rank: int, ranks: int, tied: bool) -> dict[str, Tensor]:
    network = llama(tied).double()
    method = VarianceTransfer(noise_std=1e-3)
    grower = Grower(network, TOKENS[:2], method=method, trigger=TRIGGER, anneal_steps=2, shard=shard)
    own = torch.optim.AdamW(network.parameters(), lr=1e-3, eps=1e-5)
    model, optimizer = prepare(network, own)
    grower.follow(optimizer)
    for epoch in range(3):
        grower.step(epoch=epoch)
        for _ in range(2):
            mine = TOKENS[rank::ranks]
            optimizer.zero_grad()
            backward(model(input_ids=mine, labels=mine).loss)
            optimizer.step()
    grower.finish()
    assert len(grower.events) == 2 and any(map(is_piece, network.parameters())) == (shard is not None)
    return tensors(network, own)


def loop_on_a_rank(rank: int, folder: Path) -> None:
    join(rank, folder)
    claim_an_accelerator()
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    library = accelerate.Accelerator(fsdp_plugin=plugin)
    assert library.is_fsdp2
    for tied in (False, True):
        shard = partial(accelerate.utils.fsdp2_prepare_model, library)
        found = in_a_loop(shard, library.prepare, library.backward, rank, 2, tied)
        wanted = in_a_loop(None, lambda *given: given, Tensor.backward, 0, 1, tied)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=name)
    after = llama().double()
    grower = Grower(after, TOKENS[:2], method=HyperCloning(), trigger=TRIGGER)
    optimizer = torch.optim.AdamW(after.parameters())
    library.prepare(after, optimizer)
    with pytest.raises(UserError, match="is sharded: give Grower the network before"):
        grower.follow(optimizer)


@pytest.mark.slow
def test_a_loop_of_accelerate_equals_one_process(cli: CommandLine, tmp_path: Path) -> None:
    offer_port(tmp_path)
    cli.on_two_ranks(loop_on_a_rank, tmp_path)


# The Trainer ---------------------------------------------------------------------------------------------------


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trained(folder: Path, resume: Path | None = None, config: Any = None, **settings: Any) -> dict[str, Tensor]:
    """Train for three epochs of three steps, sharded if there is a `config` of FSDP; return weights and momentum."""
    usual: dict[str, Any] = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 2,
        "save_steps": 1,
        "learning_rate": 0.05,
        "optim": "sgd",
        "optim_args": "momentum=0.9",
    }
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    sharded: dict[str, Any] = {} if config is None else {"fsdp": True, "fsdp_config": config}
    again = None if resume is None else str(resume)
    arguments = transformers.TrainingArguments(
        str(folder), ddp_backend="gloo", resume_from_checkpoint=again, **{**usual, **quiet, **sharded, **settings}
    )
    if config is not None:
        claim_an_accelerator()
    growth = Growth(method=VarianceTransfer(), trigger=TRIGGER, anneal_steps=2, optimizer_state="inherit")
    data = [{"input_ids": words, "labels": words} for words in TOKENS]
    trainer = InOrder(model=llama(), args=arguments, train_dataset=data, eval_dataset=data, callbacks=[growth])
    trainer.train(resume_from_checkpoint=again)
    assert any(map(is_piece, trainer.model.parameters())) == (config is not None)
    assert len(growth.events) == 2 and trainer.state.global_step == 9
    return tensors(growth.grower.network, trainer.optimizer.optimizer)


SHARDED = {"state_dict_type": "SHARDED_STATE_DICT"}


def trainer_on_a_rank(rank: int, folder: Path) -> None:
    join(rank, folder)
    found = trained(folder / "sharded", config=SHARDED)
    # Within normalisations' annealing after an event, and at the end of each stage.
    for step in (3, 4, 5, 8):
        checkpoint = folder / "sharded" / f"checkpoint-{step}"
        resumed = trained(folder / "sharded", checkpoint, config=SHARDED, save_strategy="no")
        assert [name for name in found if not torch.equal(found[name], resumed[name])] == [], step
    wanted = trained(folder / "whole", save_strategy="no")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    refused: dict[str, tuple[Any, dict[str, Any]]] = {
        "state_dict_type FULL_STATE_DICT": ({}, {}),
        "set gradient_checkpointing": ({**SHARDED, "activation_checkpointing": True}, {}),
        "cpu_ram_efficient_loading": ({**SHARDED, "cpu_ram_efficient_loading": True}, {}),
        "load_best_model_at_end": (
            SHARDED,
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1},
        ),
    }
    for words, (config, settings) in refused.items():
        with pytest.raises(UserError, match=words):
            trained(folder / "refused", config=config, **settings)


@pytest.mark.slow
def test_the_trainer_shards_and_resumes_in_every_stage(cli: CommandLine, tmp_path: Path) -> None:
    offer_port(tmp_path)
    outcome = cli.on_ranks(2, trainer_on_a_rank, tmp_path, limit_sec=400.0)
    assert outcome.code == 0, outcome.err
