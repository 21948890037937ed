"""Sharded networks: growth with `shard=` equals growth in one process; other kinds of sharding raise errors."""

import copy
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from growlab import (
    Bert2Bert,
    GradMax,
    Grower,
    HyperCloning,
    Lemon,
    Net2Net,
    PairGrowth,
    ParityError,
    RandomGrowth,
    UserError,
    VarianceTransfer,
)
from growlab.base.pieces import is_piece, reshard, whole
from growlab.base.ranks import checksums
from growlab.growth import GrowthMethod
from growlab.lab.networks import resnet20 as whole_resnet20
from growlab.lab.networks.image_networks import BasicBlock
from growlab.optim import SGD
from growlab.parts import Averages, Depth
from tests.cases import differing, train
from tests.command_line import ROOT, CommandLine
from tests.unit.parts.stages import Residual

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own
X = torch.randn(6, 4)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class ZeRODictionary(dict[str, Any]):
    """Stands for DeepSpeed's dictionary of parameters."""


Stage = type("Pipe", (nn.Linear,), {"__module__": "torch.distributed.pipelining._IR"})


def as_deepspeed_does(network: nn.Module) -> None:
    for module in network.modules():
        module._parameters = ZeRODictionary(module._parameters)
        for parameter in module.parameters(recurse=False):
            parameter.ds_id = 0  # type: ignore[attr-defined]


def in_fsdp1(network: Any) -> None:
    network[0] = FullyShardedDataParallel(network[0], device_id=torch.device("cpu"))


def around_fsdp1(network: Any, use_orig_params: bool) -> None:
    FullyShardedDataParallel(network, device_id=torch.device("cpu"), use_orig_params=use_orig_params)


WAYS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "fully_shard": ("is sharded", lambda network, mesh: fully_shard(network, mesh=mesh)),
    "fully_shard of a part": ("is sharded", lambda network, mesh: fully_shard(network[0], mesh=mesh)),
    "tensor parallel": (
        "is sharded",
        lambda network, mesh: parallelize_module(network, mesh, {"0": ColwiseParallel()}),
    ),
    "FSDP1": ("is sharded by FSDP1", lambda network, _: in_fsdp1(network)),
    "FSDP1 around it": ("is sharded by FSDP1", lambda network, _: around_fsdp1(network, True)),
    "FSDP1 around it, flat": ("is sharded by FSDP1", lambda network, _: around_fsdp1(network, False)),
    "DeepSpeed": ("is of DeepSpeed", lambda network, _: as_deepspeed_does(network)),
    "pipeline": ("is a stage of a pipeline", lambda network, _: setattr(network[0], "__class__", Stage)),
    "replicate": ("is replicated", lambda network, _: replicate(network)),
    "replicate of a part": ("is replicated", lambda network, _: replicate(network[0])),
}


@pytest.mark.parametrize("way", WAYS)
def test_sharding_without_shard_raises_an_error_at_once(way: str, mesh: Any) -> None:
    expected, change = WAYS[way]
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    grower = Grower(network, X, method=PairGrowth(), trigger={0: 0.5, 1: 1.0})
    optimizer = torch.optim.AdamW(network.parameters())
    grower.follow(optimizer)
    grower.step(epoch=0)
    change(network, mesh)
    with pytest.raises(UserError, match=expected):
        grower.follow(torch.optim.AdamW(network.parameters()))
    with pytest.raises(UserError, match=expected):
        grower.step(epoch=0)
    with pytest.raises(UserError, match=expected):
        Grower(network, X, method=PairGrowth(), trigger={0: 0.5, 1: 1.0})
    assert grower.events == []


class Language(nn.Module):
    """A tiny language model of two blocks, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 16)
        self.blocks = nn.Sequential(Residual(16, 24), Residual(16, 24))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(self.table(x))))
        return out


def convolutional() -> nn.Module:
    def block(i: int, o: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())

    return nn.Sequential(
        nn.Sequential(block(3, 8), block(8, 8)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )


def gpt2() -> nn.Module:
    """GPT-2 of two blocks, whose weights are Conv1D's."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 12, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False, bos_token_id=0, eos_token_id=0))


def llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, tie_word_embeddings=tied))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=10))


def resnet20() -> nn.Module:
    return whole_resnet20((3, 8, 8), 10, width=8)


TOKENS = torch.arange(8 * 4 * 6).view(8, 4, 6) * 7 % 32
IMAGES = torch.linspace(-777, 777, 8 * 4 * 3 * 64).view(8, 4, 3, 8, 8).sin()
# Network, batches [steps, B, ...], and the modules that are sharded one by one.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, Callable[[Any], list[nn.Module]]]] = {
    "language": (Language, torch.arange(8 * 4 * 5).view(8, 4, 5) % 12, lambda net: list(net.blocks)),
    "convolutional": (
        convolutional,
        torch.linspace(-1, 1, 8 * 4 * 3 * 36).view(8, 4, 3, 6, 6).sin(),
        lambda net: list(net[0]),
    ),
    "gpt2": (gpt2, torch.arange(8 * 4 * 5).view(8, 4, 5) % 12, lambda net: list(net.transformer.h)),
    "llama": (llama, TOKENS, lambda net: list(net.model.layers)),
    "vit": (vit, IMAGES, lambda net: list(net.vit.layers)),
    "resnet20": (resnet20, IMAGES, lambda net: [m for m in net.modules() if type(m) is BasicBlock]),
}
Optimizers = list[torch.optim.Optimizer]


def adam(network: nn.Module) -> Optimizers:
    # The gradient of a key's bias is only rounding, which a smaller eps would amplify.
    return [torch.optim.AdamW(network.parameters(), lr=1e-3, eps=1e-5)]


def momentum(network: nn.Module) -> Optimizers:
    # With lr=1e-2, training of a randomly grown ViT amplifies rounding by 100 in each stage.
    return [torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)]


def muon(network: nn.Module) -> Optimizers:
    """torch's Muon for matrices, which computes in bfloat16, and AdamW for the rest."""
    matrices, rest = ([p for p in network.parameters() if (p.dim() == 2) == two] for two in (True, False))
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]


# Network, method, optimizers; and parts.
Case = tuple[str, Callable[[], GrowthMethod], Callable[[nn.Module], Optimizers], Callable[[], Sequence[Any]]]


def stacked() -> list[Any]:
    return [Depth("auto", "stack")]


ROWS: dict[str, tuple[Any, ...]] = {
    "variance transfer": ("language", VarianceTransfer, adam),
    "multipliers": ("language", lambda: VarianceTransfer(multipliers="compensate"), adam),
    "gpt2": ("gpt2", lambda: VarianceTransfer(multipliers="compensate"), adam),
    "constraint": ("convolutional", lambda: VarianceTransfer("constraint", noise_std=0.01), momentum),
    "pairs": ("convolutional", PairGrowth, adam),
    "net2net": ("language", Net2Net, momentum),
    "cloning": ("language", lambda: HyperCloning("diagonal", noise_std=0.1), adam),
    "lemon": ("language", Lemon, adam),
    "bert2bert": ("language", Bert2Bert, adam),
    "random": ("convolutional", RandomGrowth, momentum),
    # Adam would amplify the rounding of gradients in a block that begins at zero.
    "depth": ("language", VarianceTransfer, momentum, stacked),
}
CASES: dict[str, Case] = {name: (*row, *[tuple][len(row) - 3 :]) for name, row in ROWS.items()}
OPTIMIZERS = {"adam": adam, "momentum": momentum, "muon": muon}
METHODS: dict[str, Callable[[], GrowthMethod]] = {
    "cloning": lambda: HyperCloning(noise_std=0.1),
    "pairs": PairGrowth,
    "variance transfer": VarianceTransfer,
    "net2net": Net2Net,
    "random": RandomGrowth,
}
TABLE = {f"{n} {m} {o}": (n, m, o) for n in ("llama", "vit", "resnet20") for m in METHODS for o in OPTIMIZERS}
CASES |= {name: (n, METHODS[m], OPTIMIZERS[o], tuple) for name, (n, m, o) in TABLE.items()}
DEEPER = {f"{n} deeper {o}": (n, o) for n in ("llama", "vit", "resnet20") for o in OPTIMIZERS}
CASES |= {name: (n, VarianceTransfer, OPTIMIZERS[o], stacked) for name, (n, o) in DEEPER.items()}


def by_fsdp(network: nn.Module, blocks: list[nn.Module], mesh: Any = None) -> None:
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)


def by_tensors(network: nn.Module, blocks: list[nn.Module], mesh: Any) -> None:
    for block in blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def by_both(network: nn.Module, blocks: list[nn.Module], sizes: tuple[int, int]) -> None:
    mesh = mesh_of(sizes)
    by_tensors(network, blocks, mesh["b"])
    by_fsdp(network, blocks, mesh["a"])


def wrapped(network: Any, blocks: list[nn.Module]) -> None:
    for index, block in enumerate(blocks):
        block.compile(backend="eager")
        network.blocks[index] = checkpoint_wrapper(block)
        fully_shard(network.blocks[index])
    fully_shard(network)


def by_policies(network: Any, blocks: list[nn.Module]) -> None:
    """Selective checkpointing of blocks, which keep whole weights between forward and backward."""

    def policy(_: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        keeps = operation is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy)
    apply_activation_checkpointing(network, partial(checkpoint_wrapper, context_fn=context), lambda m: m in blocks)
    for block in network.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(network, offload_policy=CPUOffloadPolicy(pin_memory=False))


def by_halves(network: nn.Module, blocks: list[nn.Module]) -> None:
    """Forward and backward passes in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(network, mp_policy=policy)


@cache
def mesh_of(sizes: tuple[int, int]) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b"))


WAYS_TO_SHARD: dict[str, Callable[[Any, list[nn.Module]], None]] = {
    "fsdp": by_fsdp,
    "replicated": lambda net, blocks: by_fsdp(net, blocks, mesh_of((2, 1))),
    "tensors": lambda net, blocks: by_tensors(net, blocks, mesh_of((1, 2))["b"]),
    "both, cut by tensors": lambda net, blocks: by_both(net, blocks, (1, 2)),
    "both, cut by fsdp": lambda net, blocks: by_both(net, blocks, (2, 1)),
    "wrapped": wrapped,
    "policies": by_policies,
    "accumulated": by_fsdp,
    "halves": by_halves,
}
WAYS_OF_TWO = list(WAYS_TO_SHARD)
WAYS_TO_SHARD["both on four"] = lambda net, blocks: by_both(net, blocks, (2, 2))


class Run:
    """A network that trains for two steps in each of three stages, sharded or in one process."""

    def __init__(self, case: str, sharded: bool, way: str = "fsdp", **settings: Any) -> None:
        self.way, self.split = way, "tensors" not in way and "both" not in way
        name, method, optimizers, parts = CASES[case]
        make, self.data, self.blocks = NETWORKS[name]
        torch.manual_seed(0)
        self.network, self.sharded = make().double(), sharded
        self.data = self.data.double() if self.data.is_floating_point() else self.data
        shard = self.shard if sharded else None
        about: dict[str, Any] = {
            "method": method(),
            "trigger": {0: 0.25, 1: 0.5, 2: 1.0},
            "anneal_steps": 1,
            "verbose": False,
            "parts": parts(),
        }
        self.grower = Grower(self.network, self.data[0], shard=shard, **{**about, **settings})
        self.optimizers = optimizers(self.network)
        self.grower.follow(*self.optimizers, state="inherit")
        self.steps = 0

    def shard(self, network: nn.Module) -> None:
        WAYS_TO_SHARD[self.way](network, self.blocks(network))

    def stage(self, epoch: int) -> dict[str, Tensor]:
        """Train for a stage; return all tensors after the event and after the steps."""
        self.grower.step(epoch=epoch)
        found = {f"{name} at first": tensor for name, tensor in self.tensors().items()}
        for _ in range(2):
            batch = self.data[self.steps]
            if self.sharded and self.split and not any(isinstance(m, nn.BatchNorm2d) for m in self.network.modules()):
                batch = batch.chunk(dist.get_world_size())[dist.get_rank()]
            self.network.zero_grad()
            parts = batch.chunk(2) if self.way == "accumulated" else (batch,)
            for part in parts:
                if self.sharded and self.split:
                    self.network.set_requires_gradient_sync(part is parts[-1])  # type: ignore[operator]
                (self.output(part).square().mean() / len(parts)).backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.steps += 1
        return found | self.tensors()

    def output(self, x: Tensor) -> Tensor:
        out = self.network(x)
        logits: Tensor = getattr(out, "logits", out)
        return logits

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Copy the tensors of another run."""
        own = self.tensors(lambda tensor: tensor)
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def tensors(self, see: Callable[[Tensor], Tensor] = lambda t: whole(t).clone()) -> dict[str, Tensor]:
        """All parameters, buffers and moments, unsharded."""
        reshard(self.network)
        names: dict[Tensor, str] = {p: name for name, p in self.network.named_parameters()}
        state = [pair for optimizer in self.optimizers for pair in optimizer.state.items()]
        found = {f"{key} of {names[p]}": t for p, entries in state for key, t in entries.items()}
        found |= {**dict(self.network.named_parameters()), **dict(self.network.named_buffers())}
        return {name: see(tensor.detach()) for name, tensor in found.items() if isinstance(tensor, Tensor)}


def differences(one: dict[str, Tensor], other: dict[str, Tensor], bound: float) -> list[str]:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return [name for name in one if not close(one[name].double(), other[name].double(), bound)]


def close(one: Tensor, other: Tensor, bound: float) -> bool:
    """True if the largest difference is within a bound, relative to the largest entry if that is above 1."""
    return not one.numel() or float((one - other).abs().max()) <= bound * max(1.0, float(other.abs().max()))


def equals_one_process(case: str, way: str = "fsdp") -> None:
    """Compare with one process: to 1e-12, or to bfloat16's rounding after steps that compute in it (such as Muon's)."""
    run, plain = Run(case, True, way), Run(case, False)
    identities = (run.network, *run.optimizers, run.optimizers[0].param_groups[0])
    rough, found = CASES[case][2] is muon or way == "halves", dict[str, Tensor]()
    for epoch in range(3):
        if rough and epoch:
            plain.take(found)
        found, expected = run.stage(epoch), plain.stage(epoch)
        at_events = [{k: t for k, t in all.items() if k.endswith(" at first")} for all in (found, expected)]
        assert differences(at_events[0], at_events[1], 1e-12) == [], case
        assert differences(found, expected, 2e-2 if rough else 1e-12) == [], case
    if way != "halves":
        assert [e.parity_error_eval < 1e-12 for e in run.grower.events] == [
            e.parity_error_eval < 1e-12 for e in plain.grower.events
        ]
    assert any(map(is_piece, run.network.parameters()))
    assert identities == (run.network, *run.optimizers, run.optimizers[0].param_groups[0])
    if rough:
        return
    plain_state = {name: whole(t).clone() for name, t in run.grower.plain_state_dict().items()}
    finished = plain.grower.finish()
    assert differences(plain_state, dict(finished.state_dict()), 1e-12) == []
    run.grower.finish()
    reshard(run.network)
    ended = {name: whole(t) for name, t in run.network.state_dict().items()}
    assert differences(ended, dict(finished.state_dict()), 1e-12) == []
    assert run.output(run.data[0]).allclose(plain.output(run.data[0]), rtol=0, atol=1e-12)


def failed_event_leaves_everything(kind: str) -> None:
    run, undisturbed = Run("variance transfer", True), Run("variance transfer", True)
    for epoch in (0, 1):
        run.stage(epoch)
        undisturbed.stage(epoch)
    before, parameters = run.tensors(), list(run.network.parameters())
    method, grow = run.grower.method, type(run.grower.method).grow

    def wrong(expansion: Any) -> Any:
        grown = grow(method, expansion)
        return type(grown)(**{**vars(grown), "output_factor": 2.0})

    def fail() -> None:
        raise RuntimeError("stop")

    if kind == "parity":
        method.grow = wrong  # type: ignore[method-assign]
        with pytest.raises(ParityError):
            run.grower.step(epoch=2)
        del method.grow
    else:
        with pytest.raises(RuntimeError, match="stop"):
            run.grower.step(epoch=2, then=fail)
    assert differences(run.tensors(), before, 0.0) == []
    assert all(one is other for one, other in zip(run.network.parameters(), parameters, strict=True))
    assert differences(run.stage(2), undisturbed.stage(2), 0.0) == []


def save(run: Run, folder: Path) -> None:
    """Save a run by torch's asynchronous distributed checkpoint."""
    model, optimizer = get_state_dict(run.network, run.optimizers[0])
    dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "dcp").result()
    if dist.get_rank() == 0:
        torch.save((run.grower.state_dict(), run.steps), folder / "grower.pt")


def resumed(folder: Path) -> Run:
    """Load a run that `save` saved, possibly on another number of processes."""
    run = Run("multipliers", True)
    state, run.steps = torch.load(folder / "grower.pt", weights_only=True)
    run.grower.load_state_dict(state)
    model, optimizer = get_state_dict(run.network, run.optimizers[0])
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder / "dcp")
    set_state_dict(run.network, run.optimizers[0], model_state_dict=model, optim_state_dict=state["optimizer"])
    return run


def killed_in_an_event(folder: Path) -> None:
    run = Run("multipliers", True)
    for epoch in (0, 1):
        run.stage(epoch)
    save(run, folder)
    run.grower.step(epoch=2, then=lambda: dist.get_rank() and os.kill(os.getpid(), signal.SIGKILL))
    dist.barrier()


def resumed_equals_undisturbed(folder: Path) -> None:
    """Compare with an undisturbed run: bit for bit on equally many ranks, else to rounding."""
    ranks = dist.get_world_size()
    run, undisturbed = resumed(folder), Run("multipliers", ranks == 2)
    for epoch in (0, 1):
        undisturbed.stage(epoch)
    bound = 0.0 if ranks == 2 else 1e-12
    assert differences(run.tensors(), undisturbed.tensors(), bound) == []
    assert differences(run.stage(2), undisturbed.stage(2), bound) == []


def checked(rank: int, folder: Path, names: list[str], ranks: int = 2) -> None:
    store = f"file://{folder}/store{ranks}{names[0]}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    for name in names:
        if name in CASES:
            equals_one_process(name)
        elif name in WAYS_TO_SHARD:
            equals_one_process("variance transfer", name)
        elif name == "resumed":
            resumed_equals_undisturbed(folder)
        elif name == "killed":
            killed_in_an_event(folder)
        else:
            failed_event_leaves_everything(name)
    dist.destroy_process_group()


def test_growth_on_two_ranks_equals_that_of_one_process(cli: CommandLine, tmp_path: Path) -> None:
    cli.on_two_ranks(checked, tmp_path, ["variance transfer", "parity"])


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_methods_roll_back_and_checkpoints_on_two_ranks(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli.on_ranks(2, checked, tmp_path, [*ROWS, *WAYS_OF_TWO, "then"], limit_sec=900.0)
    assert outcome.code == 0, outcome.err


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", ["llama", "vit", "resnet20"])
def test_each_method_and_optimizer(network: str, optimizer: str, ranks: int, cli: CommandLine, tmp_path: Path) -> None:
    both = [name for name in (*TABLE, *DEEPER) if name.startswith(network)]
    names = [name for name in both if name.endswith(optimizer)]
    outcome = cli.on_ranks(ranks, checked, tmp_path, names, ranks, limit_sec=1200.0)
    assert outcome.code == 0, outcome.err


@pytest.mark.slow
def test_four_ranks_and_a_killed_run_resumed_by_one_two_and_four(cli: CommandLine, tmp_path: Path) -> None:
    assert cli.on_ranks(2, checked, tmp_path, ["killed"]).code
    for number, names in {1: ["resumed"], 2: ["resumed"], 4: ["resumed", "both on four", "fsdp"]}.items():
        outcome = cli.on_ranks(number, checked, tmp_path, names, number)
        assert outcome.code == 0, outcome.err


def elastic() -> None:
    """Train from the latest checkpoint and save one per stage; rank 1 dies once at each moment in DIES."""
    dist.init_process_group("gloo")
    first = len(list(Path().glob("checkpoint-*/grower.pt")))
    run = resumed(Path(f"checkpoint-{first - 1}")) if first else Run("multipliers", True)

    def perhaps_die(moment: str) -> None:
        mark = Path(moment)
        if dist.get_rank() == 1 and moment in os.environ.get("DIES", "") and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    for epoch in range(first, 3):
        run.grower.step(epoch=epoch, then=partial(perhaps_die, f"event to stage {epoch}"))
        run.stage(epoch)
        perhaps_die(f"training in stage {epoch}")
        save(run, Path(f"checkpoint-{epoch}"))
        dist.barrier()
    found = run.tensors()
    if dist.get_rank() == 0:
        torch.save(found, "end.pt")
    dist.destroy_process_group()


ELASTIC = "from tests.unit.grower.test_sharded import elastic\n\nelastic()\n"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_elastic_restarts_after_a_rank_is_killed_in_any_stage(tmp_path: Path) -> None:
    """Equals an undisturbed run: bit for bit on two ranks, to rounding if four ranks continue from a checkpoint."""
    moments = ["training in stage 0", "event to stage 1", "training in stage 2"]
    for name in ("undisturbed", "killed", "from 0", "from 1"):
        (tmp_path / name).mkdir()
    in_processes(ELASTIC, tmp_path / "undisturbed")
    options = (f"--max-restarts={len(moments)}", "--monitor-interval=0.1")
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    in_processes(ELASTIC, tmp_path / "killed", *options, DIES=", ".join(moments), **own_store)
    assert all((tmp_path / "killed" / moment).exists() for moment in moments)
    expected, found = (torch.load(tmp_path / name / "end.pt") for name in ("undisturbed", "killed"))
    assert differences(found, expected, 0.0) == []
    for stage in (0, 1):
        folder = tmp_path / f"from {stage}"
        for before in range(stage + 1):
            shutil.copytree(tmp_path / "killed" / f"checkpoint-{before}", folder / f"checkpoint-{before}")
        in_processes(ELASTIC, folder, ranks=4)
        assert differences(torch.load(folder / "end.pt"), expected, 1e-12) == []


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("GradMax computes new weights from data", {"method": GradMax()}),
    "averages": ("ema changes or copies whole tensors", {"parts": [Averages(0.9)]}),
    "nothing": ("has sharded no parameter", {"shard": lambda network: None}),
    "no function": ("must be a function", {"shard": "fsdp"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_methods_and_parts_raise_errors_at_once(case: str, mesh: Any) -> None:
    expected, settings = REFUSED[case]
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    about = {"method": PairGrowth(), "trigger": {0: 0.5, 1: 1.0}, "shard": fully_shard, **settings}
    with pytest.raises(UserError, match=expected):
        Grower(network, X, **about)


def test_optimizers_with_regions_and_averages_raise_errors(mesh: Any) -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    average = copy.deepcopy(network)
    grower = Grower(network, X, method=PairGrowth(), trigger={0: 0.5, 1: 1.0}, shard=fully_shard)
    with pytest.raises(UserError, match="rates for regions"):
        grower.follow(SGD(network.parameters(), lr=0.1))
    with pytest.raises(UserError, match="averages of a sharded network"):
        grower.follow(average)
    zero = type("DeepSpeedZeroOptimizer", (torch.optim.SGD,), {"__module__": "deepspeed.runtime.zero.stage3"})
    with pytest.raises(UserError, match="partitions parameters among processes"):
        grower.follow(zero(network.parameters(), lr=0.1))


def bytes_of_tensors() -> int:
    """Memory of all tensors in this process."""
    tensors = [
        each
        for each in gc.get_objects()
        # Fake tensors of other tests have no memory.
        if type(each) in (Tensor, nn.Parameter) and not each.is_meta
    ]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


@pytest.mark.parametrize("state", ["inherit", "reset"])
def test_an_event_needs_memory_for_a_few_tensors_at_any_depth(state: Any, mesh: Any) -> None:
    """Weights, moments and gradients are sharded, also after an event that failed."""
    network = nn.Sequential(*(nn.Linear(32, 32) for _ in range(40)))
    x, then = torch.randn(2, 32), list[int]()
    trigger = {0: 0.5, 1: 0.75, 2: 1.0}
    grower = Grower(network, x, method=PairGrowth(), trigger=trigger, shard=fully_shard, verbose=False)
    optimizer = torch.optim.AdamW(network.parameters())
    grower.follow(optimizer, state=state)
    grower.step(epoch=0)
    train(network, optimizer, x)
    reshard(network)
    output = network(x)
    reshard(network)

    def fail() -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        grower.step(epoch=1, then=fail)
    assert torch.equal(network(x), output)
    reshard(network)
    gc.collect()
    before = bytes_of_tensors()
    grower.step(epoch=1, then=lambda: then.append(bytes_of_tensors()))
    gc.collect()
    assert then[0] - max(before, bytes_of_tensors()) < 4 * 32 * 32 * 4
    optimizer.step()


@pytest.mark.parametrize("wrapper", [None, checkpoint_wrapper])
def test_a_seed_on_meta_is_drawn_in_pieces(wrapper: Any, mesh: Any) -> None:
    """The method's draws equal those of an unsharded seed bit for bit; modules initialise the rest."""

    def shard(network: Any) -> None:
        if wrapper is not None:
            network[0].blocks[1] = wrapper(network[0].blocks[1])
        fully_shard(network)

    drawn = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        with torch.device(device):
            network = nn.Sequential(Language(), nn.BatchNorm1d(5))
        trigger = {0: 0.25, 1: 0.5, 2: 1.0}
        grower = Grower(network, TOKENS[0, :, :5] % 12, method=PairGrowth(), trigger=trigger, shard=shard)
        tensors = network.state_dict()
        drawn.append({n.replace("_checkpoint_wrapped_module.", ""): whole(tensors[n]).clone() for n in tensors})
        optimizer = torch.optim.AdamW(network.parameters())
        grower.follow(optimizer)
        for epoch in range(3):
            grower.step(epoch=epoch)
            network(TOKENS[epoch, :, :5] % 12).square().mean().backward()
            optimizer.step()
    one, other = drawn
    assert differing(one, other) == ["0.head.weight", "0.table.weight"]
    assert 0.7 < float(other["0.table.weight"].std()) < 1.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
def test_meta_tensors_without_initialisation_raise_an_error(dtype: torch.dtype, mesh: Any) -> None:
    with torch.device("meta"):
        network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        network.register_buffer("scale", torch.ones(2, dtype=dtype))
    with pytest.raises(UserError, match=r"scale is on the meta device, without values, and Sequential has no reset"):
        Grower(network, X, method=PairGrowth(), trigger={0: 0.5, 1: 1.0}, shard=fully_shard)


def test_a_trained_network_grows_into_a_sharded_one(mesh: Any) -> None:
    """Growth equals that of an unsharded network, with Adam's moments."""
    grown = []
    for shard in (None, fully_shard):
        torch.manual_seed(0)
        small, wide = (nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Linear(n, 2)) for n in (8, 16))
        optimizer = torch.optim.AdamW(small.parameters())
        train(small, optimizer, X)
        expected = small(X)
        grower = Grower.from_trained(small, wide, X, optimizer=optimizer, shard=shard)
        grower.step(epoch=0)
        torch.testing.assert_close(wide(X), expected)
        train(wide, optimizer, X)
        reshard(wide)
        assert any(map(is_piece, wide.parameters())) == (shard is not None)
        moments = [entries["exp_avg"] for entries in optimizer.state.values()]
        grown.append([whole(tensor.detach()).clone() for tensor in (*wide.parameters(), *moments)])
    torch.testing.assert_close(*grown)


# Gloo's threads abort a process whose interpreter ends before they drop their tensors (pytorch pull request 179291).
AT_ONCE = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""


def in_processes(program: str, folder: Path, *options: str, ranks: int = 2, **environment: str) -> None:
    """Run a program with torchrun."""
    (folder / "sharded.py").write_text(program + AT_ONCE)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *options, "sharded.py"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def in_guide(words: str, page: str = "sharded") -> str:
    """Return the first program of a page of the guide that contains these words."""
    text = (ROOT / "notebooks" / "docs" / "pages" / "guide" / f"{page}.md").read_text(encoding="utf-8")
    return next(program for program in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if words in program)


@pytest.mark.slow
def test_the_guides_program_runs(tmp_path: Path) -> None:
    end = "assert 1.4e6 < sum(p.numel() for p in network.parameters()) < 1.5e6\n"
    in_processes(in_guide("dist.init_process_group") + end, tmp_path)
    assert (tmp_path / "checkpoint-2" / ".metadata").is_file()


ON_CPU = """
import torchtitan.tools.utils
from torch.distributed.fsdp import FSDPModule

torchtitan.tools.utils.device_type = "cpu"  # without an accelerator it is "cuda"
# Gloo has no sum with a factor.
FSDPModule.set_gradient_divide_factor = lambda module, factor: module.set_force_sum_reduction_for_comms(True)
"""
AS_ITS_TRAINER = """
import torch.distributed as dist
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC

dist.init_process_group("gloo")
parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
dims = ParallelDims.from_config(parallelism, dist.get_world_size())
with torch.device("meta"):
    model = spec.model.build()
settings = {"training": TrainingConfig(mixed_precision_param="float32"), "parallelism": parallelism}
settings |= {"compile_config": CompileConfig(), "ac_config": FullAC.Config(), "dump_folder": "dump"}
model = spec.parallelize_fn(model, parallel_dims=dims, **settings)
model.to_empty(device="cpu")
model.init_weights(buffer_device="cpu")
group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
optimizers = OptimizersContainer.Config(param_groups=[group]).build(model_parts=[model])
growers[0].follow(optimizers)
batch = torch.randint(2000, (2, 33), generator=torch.Generator().manual_seed(dist.get_rank()))
losses = []
for step in (0, 1, 2000, 2001):
    growers[0].step(step=step)
    logits = model(batch[:, :-1]).flatten(0, 1).float()
    losses.append(torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten()))
    optimizers.zero_grad()
    losses[-1].backward()
    optimizers.step()
assert len(growers[0].events) == 1 and losses[0] > losses[1] > losses[2] > losses[3]
assert {str(p.device) for p in model.parameters()} == {"cpu"} and growers[0].network is model
"""


@pytest.mark.slow
def test_a_model_of_torchtitan_grows(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    in_processes(ON_CPU + in_guide("def growing") + AS_ITS_TRAINER, tmp_path)


@pytest.mark.parametrize(("placement", "compared"), [(Shard(0), False), (Replicate(), True)])
def test_ranks_compare_only_pieces_that_two_of_them_have(placement: Any, compared: bool, mesh: Any) -> None:
    pieces = [distribute_tensor(torch.full((4, 2), value), mesh, [placement]) for value in (1.0, 2.0)]
    with CommDebugMode() as sent:
        _, sums = checksums([("one", pieces[0]), ("other", pieces[1]), ("another shape", pieces[0].reshape(8))])
    assert bool(sums[0] != sums[1]) == compared
    assert sums[0] != sums[2] and sent.get_total_counts() == 0
