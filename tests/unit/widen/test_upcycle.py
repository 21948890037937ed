"""Dense models become mixtures of experts, and mixtures get more experts, without a change of their outputs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.inspect.small_models import FirstOutput, inputs_of, small_model
from growlab.widen import more_experts, upcycle
from growlab.widen.folder import RECEIPT
from growlab.widen.upcycle import main
from tests.cases import differing

transformers = pytest.importorskip("transformers")
transformers.logging.disable_progress_bar()
DENSE = ("llama", "mistral", "qwen2", "qwen3")
SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


def by_turns(kinds: Sequence[str]) -> list[Any]:
    """Mark every other kind as slow."""
    return [pytest.param(kind, marks=[pytest.mark.slow] * (n % 2)) for n, kind in enumerate(kinds)]


def model_of(kind: str) -> Any:
    """Return a small model whose biases and gains differ from their initial values."""
    torch.manual_seed(0)
    model: Any = small_model(kind)[0].network
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def change(old: nn.Module, new: nn.Module) -> float:
    inputs = inputs_of(old)
    before, after = (FirstOutput(model.double(), list(inputs)) for model in (old, new))
    return relative_error(evaluate(before, tuple(inputs.values())), evaluate(after, tuple(inputs.values())))


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    tokens = torch.randint(3, 60, (4, 10), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    model.eval()


def copies_of(model: nn.Module) -> float:
    """Return the smallest relative distance between the last layers of two experts of one layer."""
    found = []
    for name, weight in model.named_parameters():
        if name.endswith("experts.down_proj"):
            flat = weight.detach().flatten(1)
            distances = torch.pdist(flat) / flat.norm(dim=1).mean()
            found.append(float(distances.min()))
    return min(found)


@pytest.mark.parametrize("kind", by_turns(DENSE))
def test_a_mixture_computes_what_the_dense_model_does_and_its_experts_separate(kind: str) -> None:
    dense = model_of(kind)
    mixture = upcycle(dense, experts=4, top_k=2)
    assert change(dense, mixture) < 1e-6
    assert copies_of(mixture) == 0
    train(mixture.float(), 5)
    assert copies_of(mixture) > 1e-4


@pytest.mark.parametrize("kind", by_turns(SPARSE))
def test_more_experts_compute_the_same_and_separate(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    mixture = model_of(kind)
    larger = more_experts(mixture, by=2)
    assert change(mixture, larger) < 1e-6
    assert larger.config.num_experts_per_tok == 2 * mixture.config.num_experts_per_tok
    noisy = copies_of(larger)
    assert noisy > 0.1 and "stay equal throughout training" not in caplog.text
    without = more_experts(mixture, by=3, noise=0)
    assert change(mixture, without) < 1e-6
    assert copies_of(without) == 0 and "stay equal throughout training" in caplog.text


@pytest.mark.parametrize("kind", by_turns(["llama", "qwen2"]))
def test_a_saved_model_becomes_a_mixture_and_generates_the_same(tmp_path: Path, kind: str) -> None:
    dense = model_of(kind)
    dense.save_pretrained(tmp_path / "dense")
    out = [str(tmp_path / name) for name in ("dense", "mixture", "larger")]
    assert main([out[0], "-o", out[1], "--experts", "4", "--top-k", "2"]) == 0
    assert main([out[1], "-o", out[2], "--more-experts", "2", "--noise", "0"]) == 0
    tokens = torch.randint(3, 60, (2, 6))
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = dense.generate(tokens, **settings)
    for folder in out[1:]:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(loaded.eval().generate(tokens, **settings), expected)
        receipt = json.loads((Path(folder) / RECEIPT).read_text())
        assert receipt["relative_error_float64"] < 1e-6
        assert receipt["num_params"] == sum(p.numel() for p in loaded.parameters())
        experts, chosen = receipt["experts"], receipt["experts_per_token"]
        for counts in receipt["tokens_per_expert"].values():
            assert len(counts) == experts and sum(counts) % chosen == 0 and sum(counts) > 0
    # The function creates the same weights as the command.
    again = upcycle(dense, experts=4, top_k=2).state_dict()
    assert not differing(transformers.AutoModelForCausalLM.from_pretrained(out[1]).state_dict(), again)


def test_types_of_the_file_stay(tmp_path: Path) -> None:
    dense = model_of("llama").bfloat16()
    dense.model.norm.float()
    dense.save_pretrained(tmp_path / "dense")
    assert main([str(tmp_path / "dense"), "-o", str(tmp_path / "mixture"), "--experts", "4"]) == 0
    tensors = load_file(tmp_path / "mixture" / "model.safetensors")
    assert tensors["model.norm.weight"].dtype == torch.float32
    assert torch.equal(tensors["model.norm.weight"], dense.model.norm.weight)
    others = {tensor.dtype for name, tensor in tensors.items() if name != "model.norm.weight"}
    assert others == {torch.bfloat16}


def test_upcycle_reports_bad_input_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_of("gpt2").save_pretrained(tmp_path / "gpt2")
    assert main([str(tmp_path / "gpt2"), "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: there is no mixture of experts of gpt2") and error.count("\n") == 1
    assert main([str(tmp_path / "gpt2"), "-o", str(tmp_path / "out"), "--more-experts", "2"]) == 2
    assert "no experts" in capsys.readouterr().err
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64, mlp_bias=True
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "biased")
    assert main([str(tmp_path / "biased"), "-o", str(tmp_path / "out")]) == 2
    assert "Mixtral has no biases" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
