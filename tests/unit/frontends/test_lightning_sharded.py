"""Lightning's ModelParallelStrategy with the callback: FSDP2 and tensor parallelism in `configure_model`."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from growlab.base.errors import UserError
from growlab.base.pieces import is_piece, reshard, whole
from tests.command_line import CommandLine, join, offer_port
from tests.unit.frontends.lightning_runs import EPOCHS, STEPS, Loader, Plain, Save, growth, trainer_of

# Adam would divide the gradients of biases before batch normalisation, which are zero, by their rounding.
MOMENTUM = partial(torch.optim.SGD, momentum=0.9)


class Sharded(Plain):
    """Shards its network by the strategy's mesh, and itself, as Lightning's guides do."""

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
    trainer = trainer_of(folder, callback, *callbacks, **settings)
    trainer.fit(module, loader, **fit)
    assert trainer.global_step == EPOCHS * STEPS
    reshard(module)
    (optimizer,) = trainer.optimizers
    names = {p: name for name, p in module.named_parameters()}
    found = {f"{key} of {names[p]}": t for p, s in optimizer.state.items() for key, t in s.items()}
    found |= dict(module.named_parameters())
    return callback, {name: whole(t.detach()).clone() for name, t in found.items()}


def one_rank(rank: int, folder: Path, sizes: tuple[int, int], distributed: bool) -> None:
    join(rank, folder)

    def strategy() -> ModelParallelStrategy:
        return ModelParallelStrategy(*sizes, save_distributed_checkpoint=distributed)

    def loader() -> Loader:
        return Loader(rank, 2) if sizes[0] == 2 else Loader()

    module = Sharded(MOMENTUM)
    callback, found = trained(folder, module, strategy(), loader(), Save(folder))
    assert any(map(is_piece, module.parameters()))
    _, wanted = trained(folder, Plain(MOMENTUM), "ddp", loader())
    assert len(callback.events) == 2
    for name, tensor in wanted.items():
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
    cli.on_two_ranks(one_rank, tmp_path, sizes, distributed)


@pytest.mark.parametrize("strategy", [FSDPStrategy(), type("DeepSpeedStrategy", (DDPStrategy,), {})()])
def test_other_sharding_strategies_are_refused(strategy: Any) -> None:
    with pytest.raises(UserError, match=f"{type(strategy).__name__} does not go with growth"):
        growth().setup(SimpleNamespace(strategy=strategy), Plain(), "fit")
