from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path

import pytest

from lore_torchrl.advisors.errors import (
    AuthenticationError,
    DeadlineError,
    QuotaError,
    RateLimitedError,
)
from lore_torchrl.configs import CHECKS, HealthConfig
from lore_torchrl.dreamer.health import HealthMonitor

# For each check: its settings, a row that is well, and one that is not.
CASES = {
    "entropy_collapse": (
        {},
        {"lore/entropy_wm": 0.05, "train/success": 0.9},
        {"lore/entropy_wm": 0.05, "train/success": 0.1},
    ),
    "kl_over_delta": (
        {"multiplier_max": 0.1},
        {"learner/lore_kl": 0.9, "lore/delta": 0.1, "lore/lambda": 0.05},
        {"learner/lore_kl": 0.9, "lore/delta": 0.1, "lore/lambda": 0.1},
    ),
    "beta_saturated": (
        {"beta_max": 2.0},
        {"lore/beta_mean": 1.0, "lore/beta_std": 0.0, "time/updates": 9.0},
        {"lore/beta_mean": 1.99, "lore/beta_std": 0.0, "time/updates": 9.0},
    ),
    "model_error": ({}, {"loss/model_reco": 8.0}, {"loss/model_reco": 25.0}),
    "value_overconfidence": (
        {},
        {"learner/return_high": 0.4, "train/return": 0.0},
        {"learner/return_high": 0.6, "train/return": 0.0},
    ),
    "no_reward": ({"no_reward_steps": 300}, {"train/return": 0.5}, {"train/return": 0.0}),
    "invalid_answers": ({}, None, None),
    "budget_burn": (
        {"budget_burn_share": 0.5},
        {"advice/calls": 9.0, "advice/budget_left": 1.0},
        {"advice/calls": 10.0, "advice/budget_left": 0.0},
    ),
    "nonfinite": ({}, {"loss/actor": 1.0}, {"loss/actor": math.nan}),
}
AT_ONCE = {"budget_burn", "nonfinite"}


def monitor(**settings) -> HealthMonitor:
    names = {"beta_max", "multiplier_max", "bonus_max"}
    of_run = {name: settings.pop(name) for name in names & settings.keys()}
    return HealthMonitor(HealthConfig(**settings), num_actions=7, total_steps=10_000, **of_run)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[1]])
def test_each_check_trips_on_what_it_is_named_for_and_only_after_patience(name):
    settings, well, ill = CASES[name]
    watch = monitor(**settings)
    step, found = 0, []
    for _ in range(6):
        step += 100
        metrics, findings = watch.observe(step, well)
        found += findings
    assert metrics[f"health/{name}"] == 0.0 and not found
    for count in range(1, 6):
        step += 100
        metrics, findings = watch.observe(step, ill)
        needed = 1 if name in AT_ONCE else 3 if name == "no_reward" else 4
        assert metrics[f"health/{name}"] == float(count >= needed)
        assert [finding.check for finding in findings] == [name] * (count == needed)
        found += findings
    assert len(found) == 1 and len(found[0].message) > 40
    # As where a resume has raised the budget.
    assert watch.observe(step + 100, well)[0][f"health/{name}"] == 0.0


def test_success_is_a_reward_where_it_returns_no_more_than_nothing():
    watch = monitor(no_reward_steps=300)
    free, costly = ({"train/return": 0.0, "train/success": share} for share in (0.1, 0.0))
    for step in (300, 600):
        assert watch.observe(step, free)[0]["health/no_reward"] == 0.0
    assert watch.observe(900, costly)[0]["health/no_reward"] == 1.0


def test_invalid_answers_are_counted_since_the_row_before():
    watch = monitor(patience=2)
    # Of 10 none failed; of 4 all; of 6 one; of 10 four; of 3 all; none was asked; of 10 none.
    rows = [(10, 0), (10, 4), (15, 5), (21, 9), (21, 12), (21, 12), (31, 12)]
    values = [
        watch.observe(100 * n, answered_and_failed(*row))[0].get("health/invalid_answers")
        for n, row in enumerate(rows)
    ]
    assert values == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def answered_and_failed(answered: float, failed: float) -> dict[str, float]:
    return {"advice/answered": float(answered), "advice/failed": float(failed)}


def test_an_outage_trips_it_though_few_questions_are_asked_and_none_costs_a_call():
    """One attempt in a row of the log, refunded, as of a server that is not there."""
    watch = monitor()
    rows = [{"advice/calls": 0.0, **answered_and_failed(0, n)} for n in range(1, 5)]
    found = [finding for n, row in enumerate(rows) for finding in watch.observe(512 * n, row)[1]]
    assert [finding.check for finding in found] == ["invalid_answers"]


def test_what_the_advisor_never_saw_is_no_failure_of_it():
    watch = monitor(patience=1)
    row = answered_and_failed(10, 40) | {"advice/error_not_recorded": 9.0}
    row |= {"advice/error_not_sent": 20.0, "advice/error_prompt_too_long": 10.0}
    assert watch.observe(512, row)[0]["health/invalid_answers"] == 0.0


def test_an_advisor_that_fails_until_no_call_is_left_is_told_at_once():
    """There may be no row with calls after it: 98 calls fit between two rows."""
    spent = answered_and_failed(8, 90) | {"advice/calls": 98.0, "advice/budget_left": 0.0}
    watch = monitor()
    metrics, findings = watch.observe(512, spent)
    assert (
        metrics["health/invalid_answers"] == 1.0 and "90 of the advisor's 98" in findings[0].message
    )
    assert watch.observe(1_024, spent)[0]["health/invalid_answers"] == 1.0
    assert not monitor().observe(512, spent | answered_and_failed(88, 10))[1]
    assert not monitor().observe(512, spent | {"advice/budget_left": 9.0})[1]


@pytest.mark.parametrize(("last", "burning"), [(150.0, 1.0), (250.0, 0.0)])
def test_a_budget_may_burn_between_two_rows(last, burning):
    row = {"advice/calls": 98.0, "advice/budget_left": 0.0, "advice/last_call_step": last}
    metrics, findings = monitor(budget_burn_share=0.02).observe(512, row)
    assert metrics["health/budget_burn"] == burning
    assert [f"by step {last:.0f} of 10,000" in f.message for f in findings] == [True] * int(burning)


def test_calls_that_last_until_late_are_no_burning():
    watch = monitor(budget_burn_share=0.02)
    watch.observe(500, {"advice/calls": 9.0, "advice/budget_left": 1.0})
    metrics, _ = watch.observe(5_000, {"advice/calls": 10.0, "advice/budget_left": 0.0})
    assert metrics["health/budget_burn"] == 0.0


def test_parameters_that_are_not_finite_are_found_too():
    metrics, findings = monitor().observe(100, {"health/nonfinite_parameters": 3.0})
    assert metrics["health/nonfinite"] == 1.0 and "3 parameters" in findings[0].message


def test_imagined_returns_are_compared_with_what_can_be_returned():
    watch = monitor(patience=1)
    assert "health/value_overconfidence" not in watch.observe(100, {"learner/return_high": 9.0})[0]
    # Of an episode that costs 200 the last part may cost nothing.
    verdicts = [
        watch.observe(200, {"learner/return_high": high, "train/return": -200.0})
        for high in (-300.0, 0.0, 0.6)
    ]
    assert [metrics["health/value_overconfidence"] for metrics, _ in verdicts] == [0.0, 0.0, 1.0]
    assert "-200" in verdicts[-1][1][0].message


def test_imagined_returns_may_hold_the_bonus_of_subgoals():
    row = {"learner/return_high": 0.9, "train/return": 0.0}
    for bonus, wrong in ((0.0, 1.0), (0.5, 0.0)):
        metrics, _ = monitor(patience=1, bonus_max=bonus).observe(100, row)
        assert metrics["health/value_overconfidence"] == wrong


@pytest.mark.parametrize("name", ["entropy_collapse", "no_reward"])
def test_without_advice_no_message_names_the_advisor(name):
    row = CASES[name][2]
    advised, stock = (
        monitor(patience=1, beta_max=beta_max).observe(10_000, row)[1][0].message
        for beta_max in (1.0, 0.0)
    )
    assert re.search(r"lore\.\w+\.\w+", advised)
    assert not re.search(r"lore\.\w+\.\w+|advice/|bandit/", stock) and "dreamer." in stock


def test_a_row_without_metrics_trips_nothing_and_mends_nothing():
    watch = monitor(patience=1)
    watch.observe(100, CASES["entropy_collapse"][2])
    assert watch.observe(200, {})[0]["health/entropy_collapse"] == 1.0


def test_every_check_can_be_switched_off():
    thresholds = [field.name for field in fields(HealthConfig)]
    off = dict.fromkeys(set(thresholds) - {"enabled", "stop", "patience", "nonfinite"})
    watch = monitor(nonfinite=False, patience=1, **off)
    ill = {}
    for case in CASES.values():
        ill |= case[2] or {}
    assert watch.observe(9_000, ill) == ({}, [])


def test_what_was_seen_survives_a_checkpoint():
    one, other = monitor(), monitor()
    for step in (100, 200, 300):
        one.observe(step, CASES["model_error"][1] | CASES["entropy_collapse"][2])
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    ill = CASES["model_error"][2] | CASES["entropy_collapse"][2]
    assert other.observe(400, ill) == one.observe(400, ill)
    assert other.state_dict() == one.state_dict()


def test_every_check_and_kind_of_failure_has_an_entry_in_the_documentation():
    page = Path(__file__).resolve().parents[2].joinpath("docs", "troubleshooting.md").read_text()
    for name in CASES:
        assert f"\n**`{name}`: " in page, name
    assert set(CHECKS) == set(CASES)
    for error in (DeadlineError, RateLimitedError, QuotaError, AuthenticationError):
        assert f"`{error.kind}`" in page, error
