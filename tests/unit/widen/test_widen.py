"""Widen saved models of transformers past their declared size: same outputs, same generated tokens, or an error."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from growlab.base.errors import UserError
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.inspect.small_models import FirstOutput, inputs_of
from growlab.widen.__main__ import main
from growlab.widen.folder import RECEIPT
from growlab.widen.sizes import PARTS, _for_more_layers, deepened, widened
from tests.unit.widen.test_upcycle import model_of

transformers = pytest.importorskip("transformers")
# Tests read messages from stderr, where saving a model would draw a progress bar.
transformers.logging.disable_progress_bar()

# Model type -> width and depth that are exact. Normalisations behind sums (BERT, BART) need whole factors.
CASES = {
    "llama": ("1.5", "2"),
    "gpt2": ("1.5", "2"),
    "qwen3": ("1.5", "2"),
    "opt": ("1.5", "2"),
    "gpt_neox": ("1.5", "2"),
    "phi3": ("1.5", "1"),
    "mistral": ("2", "1.5"),
    "bert": ("2", "1"),
    "bart": ("2", "1"),
    "t5": ("1.5", "1"),
    "vit": ("1.5", "2"),
    "mixtral": ("1.5", "2"),
    "qwen2_moe": ("1.5", "2"),
    "gemma": ("1.5", "2"),
    "gemma2": ("1.5", "2"),
    "gemma3_text": ("2", "2"),
    "gpt_neo": ("2", "2"),
    "smollm3": ("1.5", "2"),
    "olmo2": ("2", "1"),
    "falcon": ("1.5", "2"),
    "llama4_text": ("1.5", "2"),
    # ALiBi's slopes depend on the number of heads, so heads become wider.
    "bloom": ("2", "2"),
    "mpt": ("1.5", "2"),
    # A convolution with weight normalisation, and an embedding for masked frames that only training uses.
    "wav2vec2": ("2", "1"),
}
# The others are similar, and take seconds each.
QUICK = ("llama", "gpt2", "bloom", "wav2vec2")


def saved(folder: Path, model_type: str) -> nn.Module:
    """Save a small model whose biases and gains differ from their initial values."""
    model = model_of(model_type)
    if model.config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = 0
    model.save_pretrained(folder)
    return model


def around(model: nn.Module) -> tuple[FirstOutput, tuple[torch.Tensor, ...]]:
    inputs = inputs_of(model)
    return FirstOutput(model, list(inputs)), tuple(inputs.values())


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]
)
def test_a_wider_and_deeper_model_computes_the_same(tmp_path: Path, model_type: str) -> None:
    width, depth = CASES[model_type]
    old = saved(tmp_path / "old", model_type)
    assert main([str(tmp_path / "old"), "--width", width, "--depth", depth, "-o", str(tmp_path / "new")]) == 0
    new = type(old).from_pretrained(tmp_path / "new").eval()
    ratio = sum(p.numel() for p in new.parameters()) / sum(p.numel() for p in old.parameters())
    assert ratio > float(width) ** 1.5 * float(depth) ** 0.5
    narrow, probe = around(old)
    wide, _ = around(new)
    assert relative_error(evaluate(narrow, probe), evaluate(wide, probe)) <= 1e-5
    if new.can_generate():
        settings = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
        assert torch.equal(old.generate(probe[0], **settings), new.generate(probe[0], **settings))
    # Weights are rounded to the precision of the file; the receipt has the error in float64.
    receipt = json.loads((tmp_path / "new" / RECEIPT).read_text())
    assert receipt["relative_error_float64"] <= 1e-10
    assert receipt["num_params"] == sum(p.numel() for p in new.parameters())


def test_copies_are_the_default_and_differ_by_noise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path / "old", "llama")
    apart = {}
    for noise in ("0.1", "0"):
        out = tmp_path / noise
        assert main([str(tmp_path / "old"), "--width", "2", "--noise", noise, "-o", str(out)]) == 0
        assert ("stay equal throughout training" in caplog.text) == (noise == "0")
        receipt = json.loads((out / RECEIPT).read_text())
        assert (receipt["method"], receipt["noise_std"]) == ("hypercloning", float(noise))
        assert receipt["relative_error_float64"] <= 1e-10
        tensors = load_file(out / "model.safetensors")
        # Weights that read copies of the stream, and of hidden channels.
        read = [tensors[f"model.layers.0.mlp.{name}_proj.weight"].chunk(2, 1) for name in ("up", "down")]
        apart[noise] = [float((first - second).norm() / first.norm()) for first, second in read]
    assert apart["0"] == [0, 0] and min(apart["0.1"]) > 1e-3


def folder_of(tmp_path: Path, **changes: Any) -> Path:
    saved(tmp_path / "old", "llama")
    path = tmp_path / "old" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return tmp_path / "old"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(list(map(str, arguments))) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error
    return error


def test_widen_reports_bad_input_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = folder_of(tmp_path), tmp_path / "new"
    assert "nearest widths that fit: 1.5" in refusal(
        capsys, folder, "--width", 1.3, "--parts", "heads,stream", "-o", out
    )
    assert "num_hidden_layers 2 times 1.3" in refusal(capsys, folder, "--depth", 1.3, "-o", out)
    assert "narrower" in refusal(capsys, folder, "--width", 0.5, "-o", out)
    assert "nothing to do" in refusal(capsys, folder, "-o", out)
    assert "there are pairs, net2net, hypercloning, lemon" in refusal(
        capsys, folder, "--width", 2, "--method", "magic", "-o", out
    )
    for factor in ("--width", "--depth"):
        assert "there are stream, heads, mlp" in refusal(capsys, folder, factor, 2, "--parts", "x", "-o", out)
        assert f"{factor}: 'nan' is no number above 0" in refusal(capsys, folder, factor, "nan", "-o", out)
    assert "no config.json" in refusal(capsys, tmp_path, "--width", 2, "-o", out)
    assert "is not empty" in refusal(capsys, folder, "--width", 2, "-o", folder)
    assert not out.exists()


def test_a_folder_without_weights_or_of_an_unknown_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, model_type="no_such_type")
    assert "no_such_type" in refusal(capsys, folder, "--width", 2, "-o", tmp_path / "new")
    for architectures, message in (
        (None, "names no class under architectures; save"),
        (["Mine"], "which transformers "),
    ):
        folder = folder_of(tmp_path, model_type="llama", architectures=architectures)
        assert message in refusal(capsys, folder, "--width", 2, "-o", tmp_path / "new")
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(capsys, folder, "--width", 2, "-o", tmp_path / "new")


def test_a_tokenizer_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path)
    tokenizers = pytest.importorskip("tokenizers")
    for size, fits in ((40, True), (70, False)):
        words = {f"w{number}": number for number in range(size)}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
        transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
        out = tmp_path / f"new{size}"
        if fits:
            assert main([str(folder), "--width", "2", "--parts", "mlp", "-o", str(out)]) == 0
            assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
        else:
            error = refusal(capsys, folder, "--width", 2, "-o", out)
            assert "70 tokens, but the model embeds only 64" in error


@pytest.mark.slow
def test_inexact_factors_raise_an_error_with_alternatives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "old", "bert")
    error = refusal(capsys, tmp_path / "old", "--width", 1.5, "-o", tmp_path / "new")
    assert "a whole --width such as 2, or --parts mlp" in error
    error = refusal(capsys, tmp_path / "old", "--depth", 2, "-o", tmp_path / "new")
    assert "cannot begin as the identity" in error
    error = refusal(capsys, tmp_path / "old", "--width", 2, "--parts", "heads", "-o", tmp_path / "new")
    assert "divides its stream among its heads" in error
    assert main([str(tmp_path / "old"), "--width", "1.5", "--parts", "mlp", "-o", str(tmp_path / "new")]) == 0


def small(kind: str, name: str, folder: Path, **settings: Any) -> None:
    """Save an untrained model of a class, with 2 layers of 2 heads."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}
    model = getattr(transformers, f"{name}{kind}")(getattr(transformers, f"{name}Config")(**sizes, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)


@pytest.mark.slow
def test_errors_name_the_true_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audio = {
        **{"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 8},
        **{"num_conv_pos_embedding_groups": 2, "vocab_size": 20},
    }
    # Its positional convolution, followed by an activation, reads the stream before any normalisation.
    stable = {**audio, "do_stable_layer_norm": True, "feat_extract_norm": "layer"}
    small("ForCTC", "Wav2Vec2", tmp_path / "stable", **stable)
    error = refusal(capsys, tmp_path / "stable", "--width", 1.5, "-o", tmp_path / "new")
    assert "no positional convolution" in error and "a whole --width such as 2" in error
    # After a check in float64, inputs must be float32 again.
    error = refusal(capsys, tmp_path / "stable", "--width", 1.5, "--depth", 2, "-o", tmp_path / "new")
    assert "no positional convolution" in error
    small("Model", "Wav2Vec2", tmp_path / "base", **audio)
    error = refusal(capsys, tmp_path / "base", "--width", 2, "-o", tmp_path / "new")
    assert "(the network's output)" in error
    small("Model", "Llama", tmp_path / "llama", vocab_size=20)
    error = refusal(capsys, tmp_path / "llama", "--depth", 2, "-o", tmp_path / "new")
    assert "its output: save a model with a head" in error


def test_the_pooler_is_as_wide_as_the_stream(tmp_path: Path) -> None:
    small("ForSequenceClassification", "DebertaV2", tmp_path / "old", vocab_size=20)
    assert main([str(tmp_path / "old"), "--width", "2", "-o", str(tmp_path / "new")]) == 0


def test_heads_whose_positions_are_divided_by_their_size_raise_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.FalconConfig(alibi=True, **sizes)
    transformers.FalconForCausalLM(config).save_pretrained(tmp_path / "old")
    error = refusal(capsys, tmp_path / "old", "--width", 2, "-o", tmp_path / "new")
    assert "slopes depend on the number of heads" in error and "--parts mlp" in error


def test_a_composite_model_raises_an_error_that_names_its_sizes() -> None:
    config = transformers.Llama4Config()
    for change in (lambda: widened(config, 2, PARTS), lambda: deepened(config, 2)):
        with pytest.raises(UserError, match="sizes are in its text_config and vision_config"):
            change()
    assert deepened(config, 1).to_dict() == config.to_dict()


def test_a_model_that_becomes_no_wider_raises_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Swin keeps sizes in `embed_dim` and in lists, and computes `hidden_size` from them."""
    saved(tmp_path / "old", "swinv2")
    error = refusal(capsys, tmp_path / "old", "--width", 2, "-o", tmp_path / "new")
    assert "no tensor of Swinv2ForImageClassification becomes larger" in error
    assert not (tmp_path / "new").exists()


def test_other_files_are_copied_and_other_config_entries_stay(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, use_cache=True)
    (folder / "notes.txt").write_text("mine")
    assert main([str(folder), "--width", "1.5", "--method", "net2net", "-o", str(tmp_path / "new")]) == 0
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "new"))
    assert (tmp_path / "new" / "notes.txt").read_text() == "mine"
    differing = {name for name in before if before[name] != after.get(name)}
    assert differing == {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"}


@pytest.mark.parametrize("known", [True, False])
def test_code_in_a_folder_never_runs(
    known: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if its `auto_map` asks for it and the user would agree."""
    kinds = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    folder = folder_of(tmp_path, auto_map=kinds, **({} if known else {"model_type": "mine"}))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass MyConfig: pass\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["mine.MyTokenizer", None]}})
    )
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "y")
    error = refusal(capsys, folder, "--width", 2, "--parts", "mlp", "-o", tmp_path / "new")
    assert not (tmp_path / "ran").exists() and not asked
    assert "which growlab never runs" in error and "trust_remote_code" not in error


def pickled(folder: Path, shards: int = 1) -> None:
    """Put the weights of a folder into `pytorch_model.bin`, as older versions of transformers did."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    places = {name: f"pytorch_model-{number % shards}.bin" for number, name in enumerate(state)}
    for file in set(places.values()):
        torch.save({name: state[name] for name in state if places[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_pickled_file_is_read(tmp_path: Path, shards: int) -> None:
    old = saved(tmp_path / "old", "llama")
    pickled(tmp_path / "old", shards)
    assert main([str(tmp_path / "old"), "--width", "1.5", "-o", str(tmp_path / "new")]) == 0
    new = type(old).from_pretrained(tmp_path / "new").eval()
    (narrow, probe), (wide, _) = around(old), around(new)
    assert relative_error(evaluate(narrow, probe), evaluate(wide, probe)) <= 1e-5
    assert (tmp_path / "new" / "model.safetensors.index.json").exists() == (shards > 1)
    assert not list((tmp_path / "new").glob("*.bin*"))


def test_damaged_and_foreign_files_are_reported_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = folder_of(tmp_path), tmp_path / "new"
    complete = (folder / "model.safetensors").read_bytes()
    for content in (b"", b"nothing", complete[:100], complete[:-5], b"\xff" * 40):
        (folder / "model.safetensors").write_bytes(content)
        assert "model.safetensors" in refusal(capsys, folder, "--width", 2, "-o", out)
    (folder / "model.safetensors").unlink()
    for content in (b"", b"nothing", Path("x")):
        if isinstance(content, bytes):
            (folder / "pytorch_model.bin").write_bytes(content)
        else:
            torch.save({"mine": content}, folder / "pytorch_model.bin")
        error = refusal(capsys, folder, "--width", 2, "-o", out)
        assert "pytorch_model.bin" in error and "weights_only" not in error
    assert "could run code" in error
    for weight_map in ({"a": "../../secret"}, {"a": "missing.bin"}, None):
        (folder / "pytorch_model.bin").unlink(missing_ok=True)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert "index.json" in refusal(capsys, folder, "--width", 2, "-o", out)
    assert not out.exists()


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_shards_stay_shards_and_numbers_of_their_type(tmp_path: Path, dtype: torch.dtype) -> None:
    old = saved(tmp_path / "old", "llama").to(dtype)
    (tmp_path / "old" / "model.safetensors").unlink()
    old.save_pretrained(tmp_path / "old", max_shard_size="100KB")
    sizes = [path.stat().st_size for path in (tmp_path / "old").glob("*.safetensors")]
    assert main([str(tmp_path / "old"), "--width", "1.5", "-o", str(tmp_path / "new")]) == 0
    files = sorted((tmp_path / "new").glob("*.safetensors"))
    assert len(files) > 2 and all(path.stat().st_size <= max(sizes) + 8192 for path in files)
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    weight_map = {key: path.name for path in files for key in load_file(path)}
    assert weight_map == index["weight_map"] and weight_map.keys() == load_index(tmp_path / "old").keys()
    assert {t.dtype for path in files for t in load_file(path).values()} == {dtype}
    new, info = type(old).from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not any(info.values()) and new.dtype == dtype


def load_index(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize(
    ("name", "entries", "before", "after", "expected"),
    [
        ("no_rope_layers", [1, 1, 0], 3, 6, [1, 1, 1, 1, 0, 0]),
        ("layer_types", ["a", "b"], 2, 3, ["a", "a", "b"]),
        ("sliding_windows", [None, 8], 2, 4, [None, None, 8, 8]),
        ("attention_types", [[["global", "local"], 2]], 4, 8, [[[*"gg", *"ll", *"gg", *"ll"], 1]]),
        ("mlp_only_layers", [0, 2], 4, 8, [0, 1, 4, 5]),
        ("attn_layer_indices", [0, 1, 2], 3, 6, [0, 1, 2, 3, 4, 5]),
        ("intermediate_size", [96, 128], 2, 4, [96, 96, 128, 128]),
        ("image_size", [32, 32], 2, 4, None),
        ("mlp_only_layers", [], 2, 4, None),
        ("conv_kernel", [10, 3, 3], 2, 4, None),
    ],
)
def test_lists_with_an_entry_per_layer_are_extended(name, entries, before, after, expected) -> None:
    short = {"g": "global", "l": "local"}
    if name == "attention_types":
        expected = [[[short[one] for one in expected[0][0]], 1]]
    assert _for_more_layers(name, entries, {before: after}) == expected


_MEASURED = """
import sys, torch, transformers.models.llama.modeling_llama
import torch.export, torch._dynamo
from growlab.widen import __main__ as widen

def peak():
    # Not from getrusage, which also counts memory of the parent process.
    return 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])

before = peak()
assert widen.main(sys.argv[1:]) == 0
print("BYTES", peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it has /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_below_the_file_that_is_written(tmp_path: Path, dtype: torch.dtype) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(tmp_path / "old")
    command = [sys.executable, "-c", _MEASURED, str(tmp_path / "old"), "--width", "1.5", "-o", str(tmp_path / "new")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    size = (tmp_path / "new" / "model.safetensors").stat().st_size
    assert int(ended.stdout.split("BYTES")[1]) < 1.3 * size
