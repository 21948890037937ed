"""Training loops of libraries that wrap the network and the optimizer, or shard the network, on two CPU processes.

Lightning's Fabric and ModelParallelStrategy; accelerate in a loop and in Hugging Face's Trainer.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

from growlab import Grower, HyperCloning, UserError, VarianceTransfer
from growlab.base.pieces import is_piece, reshard, whole
from growlab.grower import renew
from tests.command_line import CommandLine, join, offer_port
from tests.unit.frontends import trainer_runs
from tests.unit.frontends.lightning_runs import EPOCHS, IMAGES, LABELS, Loader, Plain, Save, fitted, growth
from tests.unit.grower.test_sharded import llama

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from growlab.frontends.transformers import Growth  # noqa: E402

TOKENS = torch.randint(32, (12, 6), generator=torch.Generator().manual_seed(0))
TRIGGER = {0: 0.25, 1: 0.5, 2: 1.0}


def tensors(network: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All parameters and moments as full tensors."""
    reshard(network)
    names = {p: name for name, p in network.named_parameters()}
    states = [(names[p], s) for optimizer in optimizers for p, s in optimizer.state.items()]
    found = {f"{key} of {name}": t for name, s in states for key, t in s.items() if isinstance(t, Tensor)}
    return {name: whole(t.detach()).clone() for name, t in {**found, **dict(network.named_parameters())}.items()}


# Networks that are not sharded ----------------------------------------------------------------------------------


def trained_whole(
    prepare: Callable[..., Any], backward: Callable[[Tensor], None], rank: int, ranks: int
) -> dict[str, Tensor]:
    """Parameters and momentum at the end of a run that grows twice."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)).double()
    method = VarianceTransfer(noise_std=1e-3)
    grower = Grower(network, IMAGES[:8].double(), method=method, trigger={0: 0.5, 1: 0.75, 2: 1.0}, anneal_steps=2)
    own = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = prepare(network, own)
    grower.follow(optimizer)
    for epoch in range(3):
        if grower.step(epoch=epoch):
            renew(model)
        for first in range(0, len(IMAGES), 16):
            x, y = (data[first : first + 16][rank::ranks] for data in (IMAGES.double(), LABELS))
            optimizer.zero_grad()
            backward(F.cross_entropy(model(x), y))
            optimizer.step()
    grower.finish()
    return tensors(network, own)


def whole_on_a_rank(rank: int, folder: Path) -> None:
    join(rank, folder)
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    ends = {"fabric": trained_whole(fabric.setup, fabric.backward, rank, 2)}
    library = accelerate.Accelerator(cpu=True)
    ends["accelerate"] = trained_whole(library.prepare, library.backward, rank, 2)
    torch.save(ends, folder / f"{rank}.pt")


def test_two_processes_end_equal_and_match_one_process(cli: CommandLine, tmp_path: Path) -> None:
    offer_port(tmp_path)
    cli.on_two_ranks(whole_on_a_rank, tmp_path)
    alone = trained_whole(lambda *given: given, Tensor.backward, 0, 1)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for library in ("fabric", "accelerate"):
        assert alone.keys() == first[library].keys()
        for name, expected in alone.items():
            assert torch.equal(first[library][name], second[library][name])
            torch.testing.assert_close(first[library][name], expected, rtol=1e-9, atol=1e-12)


# Lightning's ModelParallelStrategy: FSDP2 and tensor parallelism in `configure_model` ----------------------------


# Adam would divide the gradients of biases before batch normalisation, which are zero, by their rounding.
MOMENTUM = partial(torch.optim.SGD, momentum=0.9)


class Sharded(Plain):
    """Shards its network by the strategy's mesh, as in Lightning's guides."""

    def configure_model(self) -> None:
        data, tensors = (self.device_mesh[name] for name in ("data_parallel", "tensor_parallel"))
        if tensors.size() > 1:
            whole_outputs = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(self.network, tensors, {"0": whole_outputs, "3": whole_outputs})
        else:
            fully_shard(self.network, mesh=data)
            fully_shard(self, mesh=data)


def trained(folder: Path, module: Plain, strategy: Any, loader: Loader, *callbacks: Any, **fit: Any) -> Any:
    """Train a module; return the callback, and all parameters and moments."""
    callback = growth()
    settings = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
    trainer = fitted(folder, module, callback, *callbacks, data=loader, **settings, **fit)
    assert trainer.global_step == EPOCHS * len(loader)
    return callback, tensors(module, *trainer.optimizers)


def lightning_on_a_rank(rank: int, folder: Path, sizes: tuple[int, int], distributed: bool) -> None:
    join(rank, folder)

    def strategy() -> ModelParallelStrategy:
        return ModelParallelStrategy(*sizes, save_distributed_checkpoint=distributed)

    def loader() -> Loader:
        return Loader(rank, 2) if sizes[0] == 2 else Loader()

    module = Sharded(MOMENTUM)
    callback, found = trained(folder, module, strategy(), loader(), Save(folder))
    assert any(map(is_piece, module.parameters()))
    _, expected = trained(folder, Plain(MOMENTUM), "ddp", loader())
    assert len(callback.events) == 2
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)
    for name in ("step4", "epoch1", "step7"):
        path = folder / f"{name}.ckpt"
        assert path.is_dir() == distributed
        _, resumed = trained(folder, Sharded(MOMENTUM), strategy(), loader(), ckpt_path=path)
        assert [key for key in found if not torch.equal(found[key], resumed[key])] == [], name
    if not distributed and not rank:
        plain = growth(example=torch.randn(4, 6)).load(Plain(), folder / "epoch2.ckpt")
        assert plain.network[0].weight.shape == (6, 6)


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["fsdp", "tensors"])
def test_sharded_training_equals_ddp_and_resumes(
    sizes: tuple[int, int], distributed: bool, cli: CommandLine, tmp_path: Path
) -> None:
    offer_port(tmp_path)
    cli.on_two_ranks(lightning_on_a_rank, tmp_path, sizes, distributed)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (FSDPStrategy(), "FSDPStrategy does not support growth"),
        (type("DeepSpeedStrategy", (DDPStrategy,), {})(), "DeepSpeedStrategy does not support growth"),
        (DDPStrategy(start_method="fork"), "would be lost: use strategy='ddp'"),
    ],
)
def test_unsupported_strategies_raise_errors(strategy: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        growth().setup(SimpleNamespace(strategy=strategy), Plain(), "fit")


# accelerate, in a loop ------------------------------------------------------------------------------------------


def claim_an_accelerator() -> None:
    """Make accelerate shard on the CPU, where it does not shard models by default."""
    state = accelerate.PartialState(cpu=True)
    state.distributed_type = accelerate.DistributedType.MULTI_XPU


def seeded(tied: bool = False) -> Any:
    torch.manual_seed(0)
    return llama(tied)


def in_a_loop(shard: Any, prepare: Any, backward: Any, rank: int, ranks: int, tied: bool) -> dict[str, Tensor]:
    network = seeded(tied).double()
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
        expected = in_a_loop(None, lambda *given: given, Tensor.backward, 0, 1, tied)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=name)
    after = seeded().double()
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


class OnAnAccelerator(trainer_runs.InOrder):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        claim_an_accelerator()
        super().__init__(*arguments, **named)


def trained_by_trainer(
    folder: Path, resume: Path | None = None, config: Any = None, **settings: Any
) -> dict[str, Tensor]:
    """Train for three epochs of three steps, sharded if there is a `config` of FSDP; return weights and momentum."""
    usual: dict[str, Any] = {
        **{"num_train_epochs": 3, "per_device_train_batch_size": 2, "save_steps": 1, "learning_rate": 0.05},
        **{"optim": "sgd", "optim_args": "momentum=0.9", "ddp_backend": "gloo"},
        **({} if config is None else {"fsdp": True, "fsdp_config": config}),
        **({} if resume is None else {"resume_from_checkpoint": str(resume)}),
    }
    growth = Growth(method=VarianceTransfer(), trigger=TRIGGER, anneal_steps=2, optimizer_state="inherit")
    data = [{"input_ids": words, "labels": words} for words in TOKENS]
    make = trainer_runs.InOrder if config is None else OnAnAccelerator
    trainer = trainer_runs.trained(folder, seeded(), data, growth, resume=resume, make=make, **{**usual, **settings})
    assert any(map(is_piece, trainer.model.parameters())) == (config is not None)
    assert len(growth.events) == 2 and trainer.state.global_step == 9
    return tensors(growth.grower.network, trainer.optimizer.optimizer)


SHARDED = {"state_dict_type": "SHARDED_STATE_DICT"}


def trainer_on_a_rank(rank: int, folder: Path) -> None:
    join(rank, folder)
    found = trained_by_trainer(folder / "sharded", config=SHARDED)
    # Within normalisations' annealing after an event, and at the end of each stage.
    for step in (3, 4, 5, 8):
        checkpoint = folder / "sharded" / f"checkpoint-{step}"
        resumed = trained_by_trainer(folder / "sharded", checkpoint, config=SHARDED, save_strategy="no")
        assert [name for name in found if not torch.equal(found[name], resumed[name])] == [], step
    expected = trained_by_trainer(folder / "whole", save_strategy="no")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
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
            trained_by_trainer(folder / "refused", config=config, **settings)


@pytest.mark.slow
def test_the_trainer_shards_and_resumes_in_every_stage(cli: CommandLine, tmp_path: Path) -> None:
    offer_port(tmp_path)
    outcome = cli.on_ranks(2, trainer_on_a_rank, tmp_path, limit_sec=400.0)
    assert outcome.code == 0, outcome.err
