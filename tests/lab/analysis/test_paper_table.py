"""Tables with published values, paired comparisons, and Markdown, LaTeX and CSV."""

import csv
import io

import pytest
from scipy.stats import ttest_rel

from growlab.base.errors import UserError
from growlab.lab.analysis import load_runs
from growlab.lab.analysis.grid import Grid
from growlab.lab.analysis.paired import compare_pairs, paired_table
from growlab.recipes.papers.paper_table import paper_table, published, published_for

from .fake_runs import FIXED, rows_of, write_run


def test_published_values_have_distinct_keys_and_plausible_numbers():
    keys = [(p.model, p.data, p.growth, p.lr_adapt, p.optimizer, frozenset(p.overrides)) for p in published()]
    repeated = [p for p, key in zip(published(), keys, strict=True) if keys.count(key) > 1]
    assert len(set(keys)) == len(keys) - 2 > 70
    assert [(p.table, p.value, p.std) for p in repeated] == [
        *(("Table 6", 91.62, 0.12), ("Table 6", 92.0, 0.1)),
        *(("Table 11", 91.95, 0.09), ("Table 12", 91.62, 0.12)),
    ]
    assert {p.metric for p in published()} == {"accuracy", "BLEU"}
    for one in published():
        # A fixed-size network costs 100 %, a grown one between a half and all of it.
        assert one.cost_percent is None or (one.cost_percent == 100) == (one.growth == "none")
        assert one.cost_percent is None or 50 < one.cost_percent <= 100
        assert one.std is None or 0 < one.std < 0.5


@pytest.mark.parametrize(
    "growth, lr_adapt, overrides, value",
    [
        ("ours", "stagewise_norm", [], 92.53),
        ("ours", "stagewise_norm", ["data.batch_size=256", "schedule.total_epochs=16"], 92.53),
        ("none", "none", [], 92.62),
        ("none", "none", ["schedule.equal_flops=true"], None),
        ("ours", "none", ["growth.rule=constraint"], 91.93),
        ("ours", "none", ["growth.output_multiplier=false"], None),
        ("random", "none", [], None),
    ],
)
def test_a_published_value_is_found_for_the_same_method_only(tmp_path, growth, lr_adapt, overrides, value):
    write_run(tmp_path, growth=growth, lr_adapt=lr_adapt, overrides=overrides)
    (run,) = load_runs(tmp_path)
    found = published_for(run.group)
    assert (found and found.value) == value


@pytest.fixture(scope="module")
def table_2(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("table2")
    for model, base in (("resnet20", 0.92), ("vgg11", 0.91)):
        for seed, shift in enumerate((-0.001, 0.0, 0.001)):
            common = {"model": model, "seed": seed, "epochs": 160, "overrides": [f"model={model}"]}
            folder = tmp_path / f"{model}{seed}"
            write_run(folder / "ours", **common, cost_percent=53.0, test_accuracy=base + 0.005 + shift)
            net2net = {"growth": "net2net", "lr_adapt": "none"}
            write_run(folder / "n2n", **common, **net2net, cost_percent=53.0, test_accuracy=base + shift)
            write_run(folder / "fixed", **common, **FIXED, cost_percent=100.0, test_accuracy=base + 0.006)
    return tmp_path


def test_rows_are_methods_and_columns_networks_with_published_values(table_2):
    text = paper_table(rows_of(table_2)).csv()
    lines = {line["method"]: line for line in csv.DictReader(io.StringIO(text))}
    assert list(lines) == ["fixed-size", "ours + stagewise_norm", "net2net"]
    ours = lines["ours + stagewise_norm"]
    assert ours["resnet20 cost % (published)"] == "53.0 (54.9)"
    assert ours["resnet20 accuracy %"] == "92.50 ± 0.10 (3)"
    assert ours["resnet20 published"] == "92.53 ± 0.11" and ours["resnet20 difference"] == "−0.03"
    assert ours["vgg11 published"] == "92.34 ± 0.15" and ours["vgg11 difference"] == "−0.84"
    assert lines["fixed-size"]["vgg11 cost % (published)"] == "100.0 (100.0)"
    grid = paper_table(rows_of(table_2))
    assert "reproduction" not in grid.caption
    # The best grown method is bold, and no fixed-size one.
    bold = {line[0]: [cell for cell in line if cell.startswith("**")] for line in grid.rows}
    assert bold["fixed-size"] == bold["net2net"] == []
    scores = ("**92.50 ± 0.10 (3)**", "**92.53 ± 0.11**", "**91.50 ± 0.10 (3)**", "**92.34 ± 0.15**")
    assert bold["ours + stagewise_norm"] == [*scores]


def test_networks_without_published_values_have_fewer_columns(tmp_path):
    write_run(tmp_path / "a", model="resnet20")
    write_run(tmp_path / "b", model="mlp8", overrides=["model=mlp8"])
    grid = paper_table(rows_of(tmp_path))
    assert "ours trained for 16 epochs, the published for 160" in grid.caption
    assert grid.groups == [("", 1), ("mlp8", 2), ("resnet20", 4)]
    own = ["cost % (published)", "accuracy %", "published", "difference"]
    assert grid.header == ["method", "cost %", "accuracy %", *own]
    assert all(len(line) == 7 for line in grid.rows)
    assert "| mlp8 cost % | mlp8 accuracy % | resnet20 cost % (published) |" in grid.markdown()


def test_pairs_share_a_network_and_unmeasured_methods_are_optional(table_2):
    for one in compare_pairs(rows_of(table_2)):
        assert one.row.group.model == one.against.group.model
    assert len(compare_pairs(rows_of(table_2))) == 6
    names = [line[0] for line in paper_table(rows_of(table_2), unmeasured=True).rows]
    assert "FireFly (Table 2)" in names and "Ours (Table 2)" not in names
    assert not [name for name in names if "Table 3" in name]


def test_a_paired_comparison_is_over_equal_seeds_with_students_interval(tmp_path):
    ours, pairs = (0.81, 0.83, 0.84), (0.80, 0.81, 0.83)
    for seed in range(3):
        write_run(tmp_path / f"ours{seed}", seed=seed, lr_adapt="none", test_accuracy=ours[seed])
        write_run(tmp_path / f"pairs{seed}", seed=seed, lr_adapt="none", growth="pairs", test_accuracy=pairs[seed])
    write_run(tmp_path / "extra", seed=7, lr_adapt="none", test_accuracy=0.99)
    (comparison,) = compare_pairs(rows_of(tmp_path))
    assert (comparison.row.method, comparison.against.method) == ("ours", "pairs")
    assert comparison.differences == pytest.approx((0.01, 0.02, 0.01))
    expected = ttest_rel(ours, pairs).confidence_interval(0.95)
    assert comparison.interval() == pytest.approx((expected.low, expected.high))
    (line,) = paired_table([comparison]).rows
    assert line[:4] == ["ours", "pairs", "3", "+1.33"]
    low, high = (100 * bound for bound in comparison.interval())
    assert line[4] == f"{low:+.2f} to {high:+.2f}".replace("-", "−")
    wide = comparison.interval(0.5)
    (line,) = paired_table([comparison], 0.5).rows
    assert low < 0 < 100 * wide[0] and line[3] == "**+1.33**"
    (named,) = compare_pairs(rows_of(tmp_path), against="ours")
    assert named.mean == pytest.approx(-comparison.mean)


def test_pairs_with_one_or_no_common_seed_have_no_interval(tmp_path):
    write_run(tmp_path / "a", seed=0, test_accuracy=0.82)
    write_run(tmp_path / "b", seed=0, growth="pairs", test_accuracy=0.81)
    write_run(tmp_path / "c", seed=1, growth="random", test_accuracy=0.80)
    lines = {(line[0], line[1]): line[2:] for line in paired_table(compare_pairs(rows_of(tmp_path))).rows}
    ours, pairs, random = (f"{name} + stagewise_norm" for name in ("ours", "pairs", "random"))
    assert lines[ours, pairs] == ["1", "+1.00", "one seed: no interval"]
    assert lines[ours, random] == ["0", "", "no common seed"]
    with pytest.raises(UserError, match="no method net2net"):
        compare_pairs(rows_of(tmp_path), against="net2net")


def test_a_grid_is_markdown_latex_or_csv():
    grid = Grid(
        header=["method", "cost %", "acc"],
        rows=[["a_b", "1.0", "**2 ± 1**"], ["c|d", "−3", ""]],
        caption="50 % of # & more.",
        groups=[("", 1), ("net", 2)],
    )
    lines = grid.markdown().splitlines()
    assert lines[0] == "| method | net cost % |   net acc |" and len({len(line) for line in lines[:4]}) == 1
    assert r"c\|d" in lines[3] and lines[-1] == "50 % of # & more."
    latex = grid.latex()
    assert r" & \multicolumn{2}{c}{net} \\" in latex
    assert r"a\_b & 1.0 & \textbf{2 $\pm$ 1} \\" in latex and r"c|d & $-$3 &  \\" in latex
    assert r"\caption{50 \% of \# \& more.}" in latex
    # Every row of the table has as many columns as its preamble.
    body = latex.split(r"\midrule")[1].split(r"\bottomrule")[0]
    assert all(line.count(" & ") == 2 for line in body.strip().splitlines())
    rows = list(csv.reader(io.StringIO(grid.csv())))
    assert rows == [["method", "net cost %", "net acc"], ["a_b", "1.0", "2 ± 1"], ["c|d", "−3", ""]]
