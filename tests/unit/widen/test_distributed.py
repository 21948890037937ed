"""A checkpoint of torch.distributed.checkpoint, read as that of a wider network, equals a growth event."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from growlab import Grower, HyperCloning, PairGrowth, UserError
from growlab.base.pieces import reshard, whole
from growlab.widen import WidenedReader
from growlab.widen.__main__ import main
from growlab.widths import trace

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own
X = torch.arange(12).view(2, 6) * 5 % 32


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def llama(factor: int, tied: bool = False) -> Any:
    sizes: Any = {"hidden_size": 16 * factor, "intermediate_size": 24 * factor, "num_hidden_layers": 2}
    heads: Any = {"num_attention_heads": 2 * factor, "num_key_value_heads": factor, "head_dim": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=32, use_cache=False, tie_word_embeddings=tied))


def adam(network: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=2e-3)


def saved(folder: Path, tied: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    small = llama(1, tied)
    optimizer = adam(small)
    for step in range(2):
        optimizer.zero_grad()
        small((X + step) % 32).logits.square().mean().backward()
        optimizer.step()
    model, state = get_state_dict(small, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder / "small")
    small.config.architectures = ["LlamaForCausalLM"]
    small.config.save_pretrained(folder)
    return small, optimizer


def load(network: Any, optimizer: Any, **where: Any) -> None:
    model, moments = get_state_dict(network, optimizer)
    state = {"model": model, "optimizer": moments}
    dcp.load(state, **where)
    set_state_dict(network, optimizer, model_state_dict=model, optim_state_dict=state["optimizer"])
    reshard(network)


def tensors(network: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {f"{k} of {n}": t for n, p in network.named_parameters() for k, t in optimizer.state[p].items()}
    found |= dict(network.named_parameters())
    return {name: whole(tensor.detach()) for name, tensor in found.items()}


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_widened_checkpoint_equals_a_growth_event(tied: bool, tmp_path: Path) -> None:
    """Load directly into a wider sharded network, and through a wider folder."""
    small, optimizer = saved(tmp_path, tied)
    expected = small(X).logits.detach()
    wide = llama(2, tied)
    method = HyperCloning(noise_std=0.1)
    grower = Grower.from_trained(small, wide, X, optimizer=optimizer, method=method, state="inherit")
    grower.step(epoch=0)
    grown = tensors(wide, optimizer)
    sharded = llama(2, tied)
    graph = trace(sharded, X)
    fully_shard(sharded)
    reader = WidenedReader(tmp_path / "small", sharded, graph, graph.full_widths, method)
    other = adam(sharded)
    load(sharded, other, storage_reader=reader)
    assert other.param_groups[0]["lr"] == 2e-3
    torch.testing.assert_close(tensors(sharded, other), grown, rtol=0, atol=0)
    torch.testing.assert_close(sharded(X).logits.detach(), expected)
    assert main([str(tmp_path), "--dcp", str(tmp_path / "small"), "--width", "2", "-o", str(tmp_path / "out")]) == 0
    plain = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path / "out"))
    third = adam(plain)
    load(plain, third, checkpoint_id=tmp_path / "out")
    torch.testing.assert_close(tensors(plain, third), grown, rtol=0, atol=0)


def test_widened_reader_rejects_invalid_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, False)
    wide = llama(2)
    graph = trace(wide, X)
    for method, folder, message in (
        (PairGrowth(), tmp_path / "small", "only while a Grower trains"),
        (HyperCloning(), tmp_path / "none", "no folder of torch"),
    ):
        with pytest.raises(UserError, match=message):
            WidenedReader(folder, wide, graph, graph.full_widths, method)
    arguments = [str(tmp_path), "--dcp", str(tmp_path / "small"), "-o", str(tmp_path / "out")]
    assert main([*arguments, "--depth", "2"]) == 2 and "takes --width alone" in capsys.readouterr().err
