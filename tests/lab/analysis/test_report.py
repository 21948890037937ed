"""The HTML report of runs: content, figures drawn by its script, errors."""

import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from growlab.lab.analysis.report import main, page, print_results, write_run_report
from growlab.lab.analysis.results import load_runs

RESULTS = Path(__file__).parents[3] / "notebooks" / "results"


def runs_of(text: str) -> list[dict]:
    """Parse the runs in a page."""
    line = next(line for line in text.splitlines() if line.startswith("const RUNS = "))
    return json.loads(line.removeprefix("const RUNS = ").removesuffix(";"))


def test_a_page_contains_the_values_of_the_runs_files() -> None:
    (run,) = load_runs(RESULTS / "digits" / "ours_s0")
    (shown,) = runs_of(page([run]))
    assert shown["facts"]["test accuracy"] == pytest.approx(run.results["test_accuracy"], rel=1e-5)
    assert shown["curves"]["train_loss"] == pytest.approx(list(run.curve("train_loss")), rel=1e-5)
    assert shown["events"] == run.growth_epochs and len(shown["receipts"]) == len(run.events) == 4
    assert shown["receipts"][0]["groups_widened"] == 12
    assert shown["widths"]["conv1"] == [stage["widths"]["conv1"] for stage in run.results["stages"]]
    stages = run.results["stages"]
    flops = [stage["flops_per_sample"] for stage in stages for _ in range(stage["epochs"])]
    assert shown["curves"]["cost"][-1] == pytest.approx(100)
    assert shown["curves"]["cost"][0] == pytest.approx(100 * flops[0] / sum(flops), rel=1e-5)
    rates = run.rates
    rows = rates[(rates.parameter == "conv1.weight") & (rates.region == 2)]
    regions = shown["regions"]["conv1.weight"]["2"]
    assert set(regions["step"]) <= set(rows.step) and regions["step"][-1] == rows.step.iloc[-1]
    assert regions["rate_factor"][-1] == pytest.approx(rows.rate_factor.iloc[-1], rel=1e-5)


def test_a_page_is_self_contained() -> None:
    text = page(load_runs(RESULTS / "digits"))
    assert not re.search(r"""(src|href)\s*=|@import|url\(""", text)
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}


def test_runs_of_one_name_are_distinguished_by_their_folder(tmp_path: Path) -> None:
    results = json.loads((RESULTS / "digits" / "fixed_s0" / "results.json").read_text())
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(results))
    names = [run["name"] for run in runs_of(page(load_runs(tmp_path)))]
    assert len(set(names)) == 2 and all(name in shown for name, shown in zip(("one", "other"), names, strict=True))


def dom(text: str, folder: Path, whole: bool = False) -> str:
    """HTML that a page's script creates: the part about all runs, or, if `whole`, of each run too."""
    (path := folder / "page.html").write_text(text)
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium here")
    command = [chromium, "--headless", "--no-sandbox", f"--user-data-dir={path.parent}", "--dump-dom", f"file://{path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return done.stdout.partition("</script>")[0].partition("<nothing>" if whole else "One run")[0]


def test_curves_are_drawn_for_runs_with_the_metric(tmp_path: Path) -> None:
    first, second = load_runs([RESULTS / "digits" / "ours_s0", RESULTS / "digits" / "fixed_s0"])
    one = page([second]).partition("const RUNS = ")[2].partition("\n")[0]
    both = page([first, second])
    # Give the second run another metric.
    other = one.replace('"val_accuracy"', '"val_rmse"')[1:-2]
    drawn = dom(both.replace(one[1:-2], other), tmp_path)
    assert drawn.count("<path") == 1 and "NaN" not in drawn and "val rmse" in drawn


def test_accuracy_is_in_percent_and_widths_are_drawn(tmp_path: Path) -> None:
    (run,) = load_runs(RESULTS / "digits" / "ours_s0")
    drawn = dom(page([run]), tmp_path, whole=True)
    assert "val accuracy (%)" in drawn and ">80</text>" in drawn
    # Full, kept and new width, for each group and stage.
    assert drawn.count("<rect") == 3 * len(run.groups) * len(run.results["stages"])


def test_a_curve_of_one_point_is_a_dot(tmp_path: Path) -> None:
    # Runs are in the order of their paths.
    folder = shutil.copytree(RESULTS / "digits" / "fixed_s0", tmp_path / "runs" / "a")
    shutil.copytree(RESULTS / "digits" / "ours_s0", tmp_path / "runs" / "b")
    metrics = (folder / "metrics.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(metrics[:2]), encoding="utf-8")
    drawn = dom(page(load_runs(tmp_path / "runs")), tmp_path)
    paths = re.findall(r'<path[^>]* d="([^"]+)"[^>]*stroke-linecap="round"', drawn)
    assert len(paths) == 2 and "NaN" not in drawn
    assert [bool(re.fullmatch(r"M\S+ \S+h0", one)) for one in paths] == [True, False]


def test_a_constant_curve_of_large_numbers_is_drawn(tmp_path: Path) -> None:
    folder = shutil.copytree(RESULTS / "digits" / "fixed_s0", tmp_path / "runs" / "a")
    rows = "".join(f"{epoch},{21 * epoch},0,25557032\n" for epoch in range(1, 4))
    (folder / "metrics.csv").write_text(f"epoch,step,stage,num_params\n{rows}", encoding="utf-8")
    drawn = dom(page(load_runs(tmp_path / "runs")), tmp_path)
    ((first, *others),) = [
        re.findall(r"[ML]\S+ (\S+?)(?=[ML]|$)", d) for d in re.findall(r'<path[^>]* d="([^"]+)"', drawn)
    ]
    # Between the margins of a picture of 340 points.
    assert "NaN" not in drawn and others == [first] * 2 and 10 < float(first) < 298


def test_seeds_of_a_method_share_its_colour(tmp_path: Path) -> None:
    folders = [RESULTS / "digits" / name for name in ("ours_s0", "ours_s1", "fixed_s0", "fixed_s1")]
    drawn = dom(page(load_runs(folders)), tmp_path)
    shades = re.findall(r'<path[^>]* stroke="([^"]+)"', drawn)
    assert sorted(shades) == ["#0072B2", "#0072B2", "var(--ink)", "var(--ink)"]
    legend = re.findall(r"<span><i[^>]*></i>([^<]*)</span>", drawn)
    assert sorted(legend) == ["fixed-size (2 seeds)", "ours + stagewise_norm (2 seeds)"]


def test_the_command_writes_the_page_or_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "page.html"
    assert main([str(RESULTS / "digits"), "-o", str(output)]) == 0
    runs = list((RESULTS / "digits").glob("*/results.json"))
    assert len(runs_of(output.read_text())) == len(runs) and capsys.readouterr().out == f"{output}\n"
    assert main([str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("error: there is no folder")


def test_a_run_writes_its_page_and_figures(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("results.json", "metrics.csv", "growth.json"):
        (run / name).write_bytes((RESULTS / "digits" / "ours_s0" / name).read_bytes())
    assert write_run_report(run) == run / "report.html"
    assert runs_of((run / "report.html").read_text())[0]["regions"] == {}
    assert (run / "figures" / "learning_curves.png").exists()


@pytest.mark.parametrize(
    ("folder", "unit", "scale"), [("isotropic_digits/width2_s0", "kFLOPs", 1e3), ("digits/ours_s0", "MFLOPs", 1e6)]
)
def test_flops_of_small_networks_are_printed_in_thousands(folder: str, unit: str, scale: float) -> None:
    results = json.loads((RESULTS / folder / "results.json").read_text(encoding="utf-8"))
    text = io.StringIO()
    print_results(results, RESULTS / folder, Console(file=text, highlight=False))
    rows = [line.strip("│┃").split("│") for line in text.getvalue().splitlines() if line.startswith("│")]
    assert unit in text.getvalue()
    shown = [float(row[4].replace(",", "")) for row in rows]
    assert shown == [round(stage["flops_per_sample"] / scale, 2) for stage in results["stages"]]
    assert min(shown) > 0
