from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from lore_torchrl.experiments import (
    Record,
    Study,
    advice_sources,
    read_csv,
    write_csv,
    write_report,
)
from lore_torchrl.experiments.figures import method_color, save_figures


@pytest.fixture
def no_pictures(monkeypatch):
    """Figures are saved as a line of text: drawing takes longer than all else."""
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: Path(path).write_text("drawn"))


def record(experiment="e", method="m", seed=0, success=(0.0, 1.0), calls=None):
    rows = [{"step": 100 * (n + 1), "eval/success": v} for n, v in enumerate(success)]
    if calls is not None:
        rows += [{"step": 100 * (n + 1), "advice/calls": v} for n, v in enumerate(calls)]
    return Record(experiment, method, seed, rows, seconds=12.0)


def study():
    return Study(
        [
            record(method="ours", success=(0.5, 1.0), calls=(30, 40)),
            record(method="ours", seed=1, success=(0.7, 1.0), calls=(30, 30)),
            record(method="stock", success=(0.1, 0.2)),
            record(method="stock", seed=1, success=(0.1, 0.4)),
        ],
        baseline="stock",
    )


def test_the_table_of_an_experiment():
    (table,) = study().tables()
    assert table.header[:4] == ("method", "seeds", "100 steps", "200 steps")
    assert table.header[4:] == ("normalized AUC", "over stock", "steps to 0.9 (seeds)", "calls")
    ours, stock = table.rows
    assert ours[:4] == ("ours", "2", "0.60 [0.50, 0.70]", "1.00 [1.00, 1.00]")
    # Extrapolated to step 0 as a constant: (0.5 + 0.75) / 2 = 0.625 and 0.775.
    assert ours[4] == "0.70 [0.62, 0.78]" and ours[6:] == ("200 (2 of 2)", "30-40")
    assert stock[:4] == ("stock", "2", "0.10 [0.10, 0.10]", "0.30 [0.20, 0.40]")
    assert stock[5].startswith("1.00 [") and stock[6:] == ("- (0 of 2)", "0")


def test_seeds_that_end_at_different_steps_have_no_common_area():
    short = record(method="ours", seed=1, success=(0.0, 0.5))
    runs = [record(method="ours", success=(0.0, 0.5, 0.95)), short]
    runs += [record(method="stock", seed=seed, success=(0.1, 0.2, 0.4)) for seed in (0, 1)]
    runs += [record(method="early", success=(0.5, 1.0))]
    study = Study(runs, baseline="stock")
    (table,) = study.tables()
    ours, stock, early = table.rows
    assert ours[3] == "0.50 [0.50, 0.50]" and ours[4:8] == ("-", "-", "-", "- (1 of 2)")
    assert study.steps_to("e", "ours").tolist() == [300.0, np.inf]
    assert stock[5] != "-" and early[5:7] == ("0.62", "-"), "an area over 200 steps, not 300"


def test_a_seed_that_was_evaluated_at_other_steps_keeps_its_own_curve():
    late = Record("e", "m", 1, [{"step": s, "eval/success": v} for s, v in ((130, 0.9), (200, 1))])
    study = Study([record(success=(0.9, 1.0)), late])
    assert study.steps_to("e", "m").tolist() == [100.0, 130.0]
    np.testing.assert_allclose(study.auc("e", "m"), [0.925, 0.9175])


def test_a_ratio_to_a_baseline_that_may_be_zero_has_no_upper_end():
    runs = [record(method="stock", seed=n, success=(v, v)) for n, v in enumerate((0, 0, 0.3))]
    runs += [record(method="ours", seed=n, success=(0.4, 0.4)) for n in range(3)]
    (table,) = Study(runs, baseline="stock").tables()
    assert re.fullmatch(r"4\.00 \[1\.\d\d, ∞\]", table.rows[1][5])


def test_a_method_that_did_not_log_the_metric_is_left_out():
    advised = [
        replace(run, rows=[{"step": 100, "eval/success": 0.5, "eval/advised/success": 0.75}])
        for run in study().runs("e", "ours")
    ]
    others = study().runs("e", "stock")
    (table,) = Study([*advised, *others], metric="eval/advised/success").tables()
    assert table.title == "e: held-out success with advice [95% interval]"
    assert [row[:3] for row in table.rows] == [("ours", "2", "0.75 [0.75, 0.75]")]
    (table,) = Study([*advised, *others]).tables()
    assert [row[0] for row in table.rows] == ["ours", "stock"]


def test_another_metric_is_compared_by_differences_where_it_is_negative(tmp_path, no_pictures):
    runs = [
        Record("e", method, 0, [{"step": 100, "eval/success": 0.0, "eval/return": value}])
        for method, value in (("ours", -2.0), ("stock", -5.0))
    ]
    write_csv(tmp_path / "curves.csv", runs)
    returns = Study(read_csv(tmp_path / "curves.csv"), "stock", metric="eval/return")
    (table,) = returns.tables()
    assert "held-out return" in table.title
    assert table.rows[0][2] == "-2.00"  # one seed, no interval
    assert table.header[4] == "minus stock" and table.rows[0][4] == "3.00"
    page = write_report(tmp_path / "report", returns, title="Returns")
    assert "held-out return" in page.read_text()
    # Scales of several experiments have no common mean, and no common threshold.
    others = [replace(run, experiment="f") for run in runs]
    together = Study([*runs, *others], "stock", metric="eval/return")
    assert together.tables()[-1].header == ("method", "P(above stock)")
    write_report(tmp_path / "both", together, title="Returns")
    assert (tmp_path / "report" / "profile.png").exists()
    assert not (tmp_path / "both" / "profile.png").exists()
    with pytest.raises(ValueError, match=r"No run logged 'eval/score'.*eval/return"):
        Study(runs, metric="eval/score")


def test_what_some_runs_did_not_log_leaves_the_others_compared(tmp_path, no_pictures):
    def run(experiment, method, value):
        row = {"step": 100, "eval/success": 0.5}
        return Record(
            experiment, method, 0, [row | ({} if value is None else {"eval/score": value})]
        )

    runs = [run("e", "ours", 2.0), run("e", "stock", 1.0), run("f", "ours", None)]
    runs += [run("f", "stock", float("nan")), run("g", "stock", 1.0)]
    scores = Study(runs, "stock", metric="eval/score")
    *_, together = scores.tables()
    assert together.rows == (("ours", "1.00"), ("stock", "0.50"))
    write_report(tmp_path / "all", scores, title="Scores")
    write_report(tmp_path / "one", Study(runs[2:4], metric="eval/score"), title="None at all")


def test_every_nth_evaluation_is_counted_from_the_last():
    many = Study([record(success=(0.0, 0.1, 0.2, 0.3, 0.4))])
    assert many.tables(every=2)[0].header[2:5] == ("100 steps", "300 steps", "500 steps")


def test_a_frontier_leaves_out_methods_whose_seeds_share_no_evaluation(tmp_path, no_pictures):
    runs = [record(method=f"ours {n}", calls=(n, n)) for n in (10, 25)]
    late = replace(runs[0], seed=1, rows=[{**row, "step": row["step"] + 1} for row in runs[0].rows])
    assert "frontier" in save_figures(tmp_path, Study(runs))
    assert "frontier" not in save_figures(tmp_path, Study([*runs, late]))


def test_several_experiments_are_compared_together():
    both = Study(
        [
            *study().records,
            record("f", "ours", success=(0.0, 0.0)),
            record("f", "stock", success=(0.0, 0.0)),
        ],
        baseline="stock",
    )
    together = both.tables()[-1]
    assert "together" in together.title
    # Better on one experiment, equal on the other.
    assert together.rows[0][2] == "0.75"


def test_every_method_of_a_study_has_a_color_of_its_own():
    files = sorted((Path(__file__).parents[2] / "configs/study").glob("*.yaml"))
    assert len(files) >= 5
    for file in files:
        number = len(OmegaConf.load(file).methods)
        assert len({method_color(method) for method in range(number)}) == number, file


def test_the_density_of_calls():
    steps, density = study().curves("e", "ours", "calls_per_1000")
    assert steps.tolist() == [100, 200] and density.tolist() == [[300, 100], [300, 0]]


def test_only_steps_that_all_seeds_logged_are_compared():
    uneven = Study([record(success=(0.1, 0.2, 0.3)), record(seed=1, success=(0.1, 0.2))])
    assert uneven.curves("e", "m", "eval/success")[0].tolist() == [100, 200]


def test_what_look_ups_found_is_told_in_fractions():
    names = ("cache_hits", "cache_shared_hits", "cache_misses")
    row = {"step": 1, **{f"advice/{n}": v for n, v in zip(names, (50, 30, 20), strict=True)}}
    np.testing.assert_allclose(advice_sources(Record("e", "m", 0, [row])), [0.5, 0.3, 0.2])
    assert advice_sources(record()) is None


def test_the_report_is_one_page_that_needs_nothing_else(tmp_path):
    page = write_report(tmp_path, study(), title="A <study>", command=["python", "x y"])
    text = page.read_text()
    assert "A &lt;study&gt;" in text and "0.60 [0.50, 0.70]" in text
    assert text.count("data:image/png;base64,") == 4
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    for name in ("curves", "over_time", "calls", "profile"):
        assert (tmp_path / f"{name}.png").stat().st_size > 3_000
        assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    tables = (tmp_path / "tables.md").read_text()
    assert "Command: `python 'x y'`" in tables and "| ours | 2 |" in tables


def test_curves_survive_the_csv(tmp_path):
    write_csv(tmp_path / "curves.csv", study().records)
    again = read_csv(tmp_path / "curves.csv")
    assert Study(again, "stock").tables() == study().tables()
    assert again[0].seconds == 12.0


def test_a_baseline_that_did_not_run_is_refused():
    with pytest.raises(ValueError, match="Name one of them"):
        Study([record()], baseline="stock")
    with pytest.raises(ValueError, match="finished run"):
        Study([])


def test_the_metric_of_a_report_is_in_its_csv(tmp_path, no_pictures):
    runs = [Record("e", "m", 0, [{"step": 100, "train/return": 3.5, "loss/actor": 1.0}])]
    page = write_report(tmp_path, Study(runs, metric="train/return"), title="t", command=[])
    assert page.exists()
    again = read_csv(tmp_path / "curves.csv")
    assert again[0].rows == [{"step": 100, "train/return": 3.5}]
    assert (
        Study(again, metric="train/return").tables() == Study(runs, metric="train/return").tables()
    )


@pytest.mark.parametrize(
    ("methods", "experiments"), [pytest.param(6, 1, marks=pytest.mark.slow), (18, 1), (2, 3)]
)
def test_legends_lie_inside_their_figures(methods, experiments, tmp_path, monkeypatch):
    found = Study(
        [
            record(f"experiment {e}", f"with a part of {m}", success=(0.1, 0.2), calls=(5, 9))
            for e in range(experiments)
            for m in range(methods)
        ]
    )
    seen = []

    def save(figure, path, **_):
        figure.draw_without_rendering()
        box, frame = figure.legends[0].get_window_extent(), figure.bbox
        plot = figure.axes[0].get_window_extent()
        inside = box.x0 >= 0 and box.x1 <= frame.x1 and box.y0 >= 0
        seen.append((Path(path).name, inside and plot.height > 100 and box.y1 < plot.y0))

    monkeypatch.setattr(Figure, "savefig", save)
    save_figures(tmp_path, found)
    assert len(seen) == 8 and all(fits for _, fits in seen), seen


def test_marks_of_several_experiments_are_named(tmp_path, monkeypatch):
    named, limits = {}, {}

    def save(figure, path, **_):
        named[Path(path).stem] = [text.get_text() for text in figure.legends[0].get_texts()]
        limits[Path(path).stem] = figure.axes[0].get_xlim()

    monkeypatch.setattr(Figure, "savefig", save)
    save_figures(tmp_path, Study([record("e", calls=(5, 9)), record("f", calls=(5, 90))]))
    assert named["calls"] == ["m", "e", "f"] and named["curves"] == ["m"]
    # No negative calls, and no mark on the edge.
    assert -1 < limits["calls"][0] < 0 and limits["calls"][1] > 90


def test_scores_that_need_no_steps_are_lines_across_their_own_experiment(tmp_path, monkeypatch):
    lines = {}

    def save(figure, path, **_):
        lines[Path(path).stem] = [
            {(line.get_label(), line.get_ydata()[0]) for line in axes.get_lines()}
            for axes in figure.axes
        ]

    monkeypatch.setattr(Figure, "savefig", save)
    references = [record("f", "random", success=(0.2,)), record("g", "planner", success=(1.0,))]
    runs = [record("e"), record("f")]
    found = Study(runs, references=references)
    save_figures(tmp_path, found)
    assert lines["curves"] == [{("m", 0.0)}, {("m", 0.0), ("random", 0.2)}]
    assert [table.rows for table in found.tables()] == [t.rows for t in Study(runs).tables()]


def test_methods_of_several_budgets_have_a_frontier(tmp_path, monkeypatch):
    drawn, across = {}, {}

    def save(figure, path, **_):
        drawn[Path(path).stem] = [
            [(bar.get_label(), bar.lines[0].get_xydata().tolist()) for bar in axes.containers]
            for axes in figure.axes
        ]
        across[Path(path).stem] = [
            {line.get_label(): line.get_ydata()[0] for line in axes.get_lines()}
            for axes in figure.axes
        ]

    monkeypatch.setattr(Figure, "savefig", save)
    few = {"calls": (5, 10), "success": (0.0, 0.5)}
    many = {"calls": (5, 25), "success": (0.0, 1.0)}
    runs = [record("e", "LoRe 25", **many), record("e", "LoRe 10", **few), record("e", "stock")]
    save_figures(tmp_path, Study(runs))
    assert drawn["frontier"] == [[("LoRe", [[10.0, 0.5], [25.0, 1.0]])]]
    for row in (row for run in runs for row in run.rows if "eval/success" in row):
        row["eval/return"] = row["eval/success"] / 2
    save_figures(tmp_path, Study(runs))
    assert drawn["frontier"][1] == [("LoRe", [[10.0, 0.25], [25.0, 0.5]])]
    assert [lines["stock"] for lines in across["frontier"]] == [1.0, 0.5]
    assert not any("LoRe 10" in lines for lines in across["frontier"])
    # A method may have no run in another experiment yet.
    more = [record("f", "LoRe 25", **many), record("f", "LoRe 10", **few)]
    assert "frontier" in save_figures(tmp_path, Study([*runs, *more]))
    drawn.clear()
    # As many calls, or a name that stands alone: there is none.
    save_figures(tmp_path, Study([record("e", f"half {n}", **many) for n in (0, 1)]))
    save_figures(tmp_path, Study([record("e", "LoRe 25", **many), record("e", "stock")]))
    assert "frontier" not in drawn


# ---- names and files of others ----

ODD = (
    "a|b\n| c |",
    "<script>alert(1)</script>",
    "`rm`",
    "x$y$",
    r"$\frac$",
    "**bold** [x](http://y)",
    "_u",
)


def odd_study() -> Study:
    return Study([record(experiment="e|$x$", method=name, calls=(3, 4)) for name in ODD], ODD[0])


def test_names_of_any_text_stand_in_the_tables_as_themselves(tmp_path, no_pictures):
    page = write_report(tmp_path, odd_study(), title="A | <b>\nC", command=["a`b", "c\nd", "|"])
    text = (tmp_path / "tables.md").read_text()
    for table in odd_study().tables():
        found = next(part for part in text.split("\n\n") if part.startswith("| method"))
        text = text.replace(found, "", 1)
        lines = found.strip().split("\n")
        assert len(lines) == 2 + len(table.rows), "a row is a line"
        columns = {len(re.findall(r"(?<!\\)\|", line)) - 1 for line in lines}
        assert columns == {len(table.header)}, "a cell stays in its column"
    assert "<" not in text and not re.search(r"(?<!\\)`(?!`)rm", text) and "](" not in text
    assert text.startswith("# A \\| &lt;b> C\n") and "`` python" not in text
    assert "Command: `` 'a`b' 'c d' '|' ``" in text
    assert "<script>alert" not in page.read_text() and "<b>" not in page.read_text()
    assert {run.method for run in read_csv(tmp_path / "curves.csv")} == set(ODD)


@pytest.fixture
def run_script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    import report

    def run(*words):
        monkeypatch.setattr("sys.argv", ["report.py", *map(str, words)])
        report.main()

    return run


def test_the_script_reports_on_several_sources_together(tmp_path, run_script, capsys, no_pictures):
    write_csv(tmp_path / "stock.csv", [record(method="stock", seed=n) for n in range(2)])
    write_csv(tmp_path / "ours.csv", [record(method="ours", seed=n) for n in range(3)])
    run_script(tmp_path / "stock.csv", tmp_path / "ours.csv", "--baseline", "stock")
    printed = capsys.readouterr().out
    assert "| stock | 2 |" in printed and "| ours | 3 |" in printed
    assert f"report {tmp_path}/report_eval_success/report.html" in printed


def test_the_script_says_what_is_wrong_without_a_traceback(tmp_path, run_script):
    (tmp_path / "run.json").write_text("{")
    (tmp_path / "done").touch()
    with pytest.raises(SystemExit, match=r"Cannot report: .*run\.json is damaged"):
        run_script(tmp_path)
