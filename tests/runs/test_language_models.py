"""Language models of transformers: built from sizes, grown in runs, and saved for `from_pretrained`."""

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from growlab import parts
from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.growth import PairGrowth
from growlab.lab.analysis.results import open_run
from growlab.lab.networks.language_models import CausalModel, plain_model
from growlab.widths import trace
from tests.command_line import CommandLine
from tests.whole_runs import Left, Whole, assert_resumes, whole_run

transformers = pytest.importorskip("transformers")
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_key_value_heads": 2}


def model(type: str = "llama", **settings) -> CausalModel:
    torch.manual_seed(0)
    return CausalModel(**{"vocabulary_size": 61, "context": 12, "type": type, "end_of_text": 0, **TINY, **settings})


@pytest.mark.parametrize(
    ("type", "settings"),
    [
        ("llama", {"config": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}}),
        ("qwen3", {}),
        ("mistral", {"num_key_value_heads": None}),
        ("gemma2", {}),
        ("gpt2", {"num_key_value_heads": None, "config": {"resid_pdrop": 0.0}}),
        ("gpt_neox", {"num_key_value_heads": None, "intermediate_size": None}),
        ("bloom", {"num_key_value_heads": None, "intermediate_size": None}),
        ("bert", {"num_key_value_heads": None}),
    ],
)
def test_a_model_has_the_sizes_asked_for_and_sees_no_later_token(type: str, settings: dict) -> None:
    network = model(type, **settings).eval()
    config = network.network.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 3, 4)
    assert config.vocab_size == 61 and config.eos_token_id == 0
    if settings.get("intermediate_size", 48) and type != "gpt2":
        assert config.intermediate_size == 48
    for name, value in settings.get("config", {}).items():
        assert getattr(config, name) == value
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))
    later = tokens.clone()
    later[:, 6:] = (later[:, 6:] + 7) % 61
    with torch.no_grad():
        one, two = network(tokens), network(later)
    assert one.shape == (2, 12, 61)
    torch.testing.assert_close(one[:, :6], two[:, :6])
    assert not torch.equal(one[:, 6:], two[:, 6:])


def test_attention_is_scaled_dot_product_attention() -> None:
    assert model().network.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("type", "settings", "message"),
    [
        ("llamma", {}, "no model type 'llamma'; nearest are llama"),
        ("vit", {}, "model.type=vit is no causal language model"),
        ("llama", {"config": {"rope_tetha": 1.0}}, "llama has no entry rope_tetha"),
        ("bloom", {}, "bloom has no intermediate_size to choose: set model.intermediate_size=null"),
    ],
)
def test_impossible_models_are_refused_in_a_sentence(type: str, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        model(type, **settings)
    assert str(error.value).count("\n") == 0


def test_without_transformers_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.auto", None)
    with pytest.raises(UserError, match="transformers is not installed: pip install"):
        model()


@pytest.mark.parametrize(
    ("type", "last"),
    [("llama", 0), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("llama", 1), ("gpt2", 1), ("qwen3", 0)))],
    ids=["llama_smaller", "llama_grown", "gpt2_grown", "qwen3_smaller"],
)
def test_from_pretrained_loads_a_grown_model_which_generates_the_same(type: str, last: int, tmp_path: Path) -> None:
    """At full size, and at the size of the seed: half of the width, without the blocks not inserted yet."""
    network = model(type, num_key_value_heads=None if type == "gpt2" else 2, num_hidden_layers=4).double()
    tokens = torch.randint(61, (3, 12), generator=torch.Generator().manual_seed(1))
    grower = Grower(network, tokens, method=PairGrowth(), trigger={0: 0.5, 1: 1.0}, parts=[parts.Depth("auto")], seed=0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    for epoch in range(last + 1):
        grower.step(epoch=epoch)
    if last:
        grower.anneal(1.0)
        grower.finish()
    else:
        network.eval()
    network.save_pretrained(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, network.eval()(tokens), rtol=1e-10, atol=1e-10)
    full = network.network.config
    expected = (full.hidden_size, 4) if last else (16, loaded.config.num_hidden_layers)
    assert (loaded.config.hidden_size, loaded.config.num_hidden_layers) == expected
    assert loaded.config.num_hidden_layers == 4 or not last
    prompt = tokens[:1, :4]
    written = prompt
    with torch.no_grad():
        for _ in range(6):
            written = torch.cat([written, network(written)[:, -1:].argmax(-1)], 1)
    generated = loaded.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert generated.tolist() == written.tolist()


@pytest.mark.slow  # tracing takes longer than the test
@pytest.mark.parametrize(("tied", "stream"), [pytest.param(True, False, marks=pytest.mark.slow), (False, True)])
def test_a_narrower_gemma_is_saved_correctly_or_refused(tied: bool, stream: bool, tmp_path: Path) -> None:
    """Gemma scales embeddings by sqrt(hidden_size), and queries by a setting of their own."""
    network = model("gemma2", config={"tie_word_embeddings": tied, "query_pre_attn_scalar": 8}).double()
    tokens = torch.randint(61, (3, 12), generator=torch.Generator().manual_seed(1))
    full_widths = trace(network, tokens).full_widths
    narrow = {name: width // 2 if stream or "mlp" in name else width for name, width in full_widths.items()}
    grower = Grower(network, tokens, method=PairGrowth(), trigger={0: narrow, 1: full_widths}, seed=0)
    grower.step(epoch=0)
    network.eval()
    if stream:
        # The factor on embeddings would change with the width of the stream.
        with pytest.raises(UserError, match="no configuration of gemma2 describes the final network"):
            network.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        return
    network.save_pretrained(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, network(tokens), rtol=1e-5, atol=1e-6)
    full, sizes = network.network.config, loaded.config
    assert (sizes.head_dim, sizes.query_pre_attn_scalar) == (full.head_dim, full.query_pre_attn_scalar)
    assert sizes.intermediate_size == full.intermediate_size // 2


def test_layers_that_differ_have_no_configuration() -> None:
    network = model()
    layer = network.network.model.layers[0].mlp
    layer.gate_proj, layer.up_proj = (torch.nn.Linear(32, 40, bias=False) for _ in range(2))
    layer.down_proj = torch.nn.Linear(40, 32, bias=False)
    with pytest.raises(UserError, match="no configuration of llama describes the final network"):
        plain_model(network)


# Runs ----------------------------------------------------------------------------------------------------

WORDS = ("growing", "networks", "from", "small", "seeds", "keeps", "what", "they", "compute", "exactly")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        words = random.Random(number).choices(WORDS, k=60)
        (folder / f"{number}.txt").write_text(" ".join(words) + ".\n")
    return folder


@pytest.fixture(scope="session")
def llama(text: Path) -> tuple[str, ...]:
    """Eleven steps with evaluation every third step and at the event, which grows width and depth."""
    return (
        *("experiment=llama_text", f"data.path={text}", "data.vocab_size=280", "data.validation_fraction=0.05"),
        *("data.context=16", "data.batch_size=8", "data.test_fraction=0.05"),
        *("model.hidden_size=16", "model.intermediate_size=24", "model.num_key_value_heads=2"),
        *("model.num_hidden_layers=3", "optimizer.lr=0.01", "schedule.budget=null", "trainer=cpu"),
        *("schedule.steps=[4,7]", "schedule.eval_every_n_steps=3", "log_every_n_steps=2"),
        *("schedule.widths=[0.5,1]", "norm_anneal_fraction=0.9"),
    )


@pytest.fixture(scope="session")
def grown(cli: CommandLine, llama: tuple[str, ...]) -> Whole:
    return whole_run(cli, *llama, "ema.decay=0.9")


def test_a_run_leaves_a_folder_that_transformers_loads(grown: Whole, text: Path) -> None:
    assert f"{text}: split by documents: train " in grown.err
    left = grown.left
    assert left.results["metric"] == {"name": "bits_per_byte", "higher_is_better": False}
    assert 0 < left.results["test_bits_per_byte"] < 8
    (event,) = left.growth["events"]
    assert event["parity_error_eval"] < 1e-5
    folder = grown.folder / "pretrained"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("growing networks keeps what they compute", return_tensors="pt").input_ids
    sizes = {**TINY, "hidden_size": 16, "intermediate_size": 24}
    tied = {"tie_word_embeddings": True}
    made = CausalModel(len(tokenizer), 16, "llama", tokenizer.eos_token_id, tied, **sizes).eval()
    made.load_state_dict(left.weights, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, made(tokens))
    assert tokenizer.decode(tokens[0]) == "growing networks keeps what they compute"
    one, two = (m.generate(tokens[:, :4], max_new_tokens=8, do_sample=False).tolist() for m in (loaded, made.network))
    assert one == two


def test_a_run_in_steps_is_evaluated_and_grows_at_steps(grown: Whole) -> None:
    left = grown.left
    assert [int(row["step"]) for row in left.metrics] == [3, 4, 6, 9, 11]
    assert [event["step"] for event in left.growth["events"]] == [4]
    assert [stage["steps"] for stage in left.results["stages"]] == [4, 7]
    assert (left.results["steps"], left.results["tokens"]) == (11, 11 * 8 * 16)
    assert [int(row["step"]) for row in left.steps] == [2, 4, 6, 8, 10]
    assert all(float(row["loss"]) > 0 and float(row["grad_norm"]) > 0 for row in left.steps)
    assert "step 11/11" in grown.err
    assert open_run(grown.folder).results["epochs"] == left.results["epochs"]


def test_trained_weights_and_their_average_have_separate_folders(grown: Whole) -> None:
    found = []
    for file, folder in (("model.pt", "pretrained"), ("model_ema.pt", "pretrained_ema")):
        kept = torch.load(grown.folder / file, weights_only=True)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(grown.folder / folder).state_dict()
        assert {f"network.{name}" for name in loaded} == kept.keys()
        assert all(torch.equal(kept[f"network.{name}"], tensor) for name, tensor in loaded.items())
        transformers.AutoTokenizer.from_pretrained(grown.folder / folder)
        found.append(loaded["model.norm.weight"])
    assert not torch.equal(*found)


@pytest.mark.slow  # compiling takes most of a minute for each size of the network
@pytest.mark.timeout(900)
def test_a_compiled_run_trains_the_same_and_leaves_the_same_folder(
    cli: CommandLine, uninterrupted: Callable[..., Left], llama: tuple[str, ...], tmp_path: Path
) -> None:
    cli.done(*llama, "compile=true", "hydra.run.dir=run", cwd=tmp_path, limit_sec=600.0)
    left, plain = Left.by(tmp_path / "run"), uninterrupted(*llama)
    assert left.results["test_bits_per_byte"] == pytest.approx(plain.results["test_bits_per_byte"], rel=1e-3)
    assert left.weights.keys() == plain.weights.keys()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "pretrained").state_dict()
    assert all(torch.equal(left.weights[f"network.{name}"], tensor) for name, tensor in loaded.items())


def test_resuming_inside_an_epoch_is_exact(
    cli: CommandLine, grown: Whole, llama: tuple[str, ...], tmp_path: Path
) -> None:
    """After the growth event, in the second of three parts of a pass."""
    (event,) = grown.left.growth["events"]
    checkpoint = grown.checkpoints[event["step"] + 1]
    assert_resumes(cli, tmp_path, (*llama, "ema.decay=0.9"), checkpoint, grown.left)


@pytest.mark.slow
def test_half_precision_and_accumulation(
    cli: CommandLine, grown: Whole, llama: tuple[str, ...], tmp_path: Path
) -> None:
    more = ("trainer.precision=bf16-mixed", "trainer.accumulate_grad_batches=2", "hydra.run.dir=run")
    cli.done(*llama, *more, cwd=tmp_path)
    left = Left.by(tmp_path / "run")
    # The schedule counts optimizer steps, not batches.
    assert left.checkpoint["global_step"] == grown.left.checkpoint["global_step"]
    assert float(left.metrics[-1]["val_loss"]) < float(left.metrics[0]["val_loss"])
    assert (tmp_path / "run" / "pretrained" / "model.safetensors").exists()


def test_data_and_objective_of_other_kinds_are_refused(
    cli: CommandLine, llama: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = cli(*llama, "objective=classification", cwd=tmp_path)
    assert outcome.code == 2 and "Traceback" not in outcome.err
    assert "tokens go with objective=tokens and model=transformers or model=gpt" in outcome.err
