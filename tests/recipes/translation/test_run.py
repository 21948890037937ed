"""A run: BLEU during and after training, and the same BLEU from fairseq-generate."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from growlab.recipes.translation.sentence_pairs import extra_module
from tests.command_line import CommandLine
from tests.whole_runs import read_results, table

SMALL = (
    *("experiment=transformer_multi30k", "trainer.accelerator=cpu", "num_threads=1", "data.subwords=none"),
    *("growth=pairs", "data.batch_tokens=200", "model.dropout=0", "objective.bleu_every_n_epochs=2"),
    *("model.embedding_features=32", "model.features=32", "model.hidden_features=64"),
    *("model.encoder_layers=1", "model.decoder_layers=1", "optimizer.lr=0.01", "probe_size=4"),
    *("schedule.total_epochs=4", "schedule.num_stages=2", "schedule.epochs=[2,2]", "schedule.widths=[0.5,1]"),
    "schedule.learning_rate.warmup_steps=30",
)


@pytest.fixture(scope="module")
def run(cli: CommandLine, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    cache = {"XDG_CACHE_HOME": str(path / "cache")}
    cli.done(*SMALL, f"data.root={folder}", "hydra.run.dir=run", cwd=path, environment=cache)
    return path


def test_a_run_reports_bleu_with_its_signature(run: Path):
    results = read_results(run / "run")
    assert 0 <= results["test_bleu"] <= 100 and 0 <= results["test_tokenised_bleu"] <= 100
    assert "tok:13a" in results["test_bleu_signature"] and "version:" in results["test_bleu_signature"]
    assert "tok:none" in results["test_tokenised_bleu_signature"]
    assert results["test_perplexity"] > 1 and results["parity_max_error"] < 1e-4
    bleu = [row["val_bleu"] for row in table(run / "run/metrics.csv")]
    assert [bool(cell) for cell in bleu] == [False, True, False, True]
    # Better than by chance, after growing.
    assert float(bleu[-1]) > 5


def test_translations_are_written_with_their_sources_and_references(run: Path, folder: Path):
    header, *rows = [line.split("\t") for line in (run / "run/translations.tsv").read_text().splitlines()]
    assert header == ["source", "reference", "translation"]
    sources, references, found = map(list, zip(*rows, strict=True))
    assert sources == (folder / "test.de").read_text().splitlines()
    assert references == (folder / "test.en").read_text().splitlines()
    score = read_results(run / "run")["test_bleu"]
    assert extra_module("sacrebleu").corpus_bleu(found, [references]).score == pytest.approx(score)


@pytest.mark.slow
def test_fairseq_generate_gives_the_same_translations(run: Path, folder: Path):
    """From the checkpoint and data in fairseq's format."""
    (prepared,) = (run / "cache/growlab/translation").glob("*/growlab.json")
    arguments = (
        *(str(prepared.parent), "--path", "run/fairseq.pt", "--gen-subset", "test", "--beam", "5", "--cpu"),
        *("--max-len-a", "1.2", "--max-len-b", "10", "--source-lang", "de", "--target-lang", "en"),
        # By default this fork omits a last batch that is no multiple of 8.
        *("--scoring", "sacrebleu", "--required-batch-size-multiple", "1"),
    )
    # In a new process, since its use of Hydra conflicts with growlab's.
    command = "from fairseq_cli.generate import cli_main; cli_main()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", command, *arguments],
        cwd=run,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("H-"):
            name, _, text = line.split("\t")
            found[int(name[2:])] = text
    references = (folder / "test.en").read_text().splitlines()
    assert sorted(found) == list(range(len(references)))
    metric = extra_module("sacrebleu.metrics").BLEU()
    score = metric.corpus_score([found[index] for index in sorted(found)], [references]).score
    results = read_results(run / "run")
    assert score == pytest.approx(results["test_bleu"], abs=1e-9)
    assert f"BLEU = {results['test_bleu']:.2f} " in done.stdout
