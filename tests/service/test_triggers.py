from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lore_torchrl.service import Novelty, StepSignals, TDErrorSpike


def travelled(part):
    return json.loads(json.dumps(part.state_dict()))


def visit(novelty, situations):
    novelty.update(StepSignals([1.0] * len(situations), situations=situations))


def feel(spike, td_errors, resets=None):
    spike.update(StepSignals([1.0] * len(td_errors), resets, td_errors=td_errors))


# ---- novelty ----


@pytest.mark.parametrize(
    ("threshold", "visits"), [(0.0, 50), (0.1, 50), (0.5, 3), (0.6, 2), (0.99, 1)]
)
def test_a_situation_is_novel_for_its_first_visits(threshold, visits):
    novelty = Novelty(threshold)
    due = []
    for _ in range(50):
        visit(novelty, ["door"])
        due.append(novelty.due(0))
    assert due == [True] * visits + [False] * (50 - visits)


def test_rows_share_the_count_and_a_row_that_stays_is_not_counted():
    novelty = Novelty(0.6)
    visit(novelty, ["door", "door", "door"])
    assert [novelty.due(row) for row in range(3)] == [True, True, False]
    visit(novelty, [None, None, "key"])
    assert [novelty.due(row) for row in range(3)] == [True, True, True]
    novelty.serve(0)
    assert not novelty.due(0)
    visit(novelty, ["door", "key", None])
    assert [novelty.due(row) for row in range(3)] == [False, True, True]


def test_novelty_forgets_what_was_seen_longest_ago():
    novelty = Novelty(0.9)
    novelty.max_keys = 2
    for key in ("a", "b", "a", "c"):
        visit(novelty, [key])
    visit(novelty, ["a"])
    assert not novelty.due(0)
    visit(novelty, ["b"])
    assert novelty.due(0)


# ---- TD-error spikes ----


def make_spike(high=3.0, low=1.0, *, warmup=4, decay=0.99):
    spike = TDErrorSpike(high, low)
    spike.warmup, spike.decay = warmup, decay
    return spike


def spikes(values, **config):
    spike = make_spike(**config)
    on = []
    for value in values:
        feel(spike, [value])
        on.append(spike.due(0))
    return on


CALM = [0.9, 1.1, -0.9, -1.1]  # mean 1, standard deviation 0.1


def test_a_spike_needs_more_than_its_warmup():
    assert spikes([*CALM[:3], 99.0]) == [False] * 4
    assert spikes([*CALM, 1.31])[-1]
    assert spikes([*CALM, -1.31])[-1]
    assert not spikes([*CALM, 1.29])[-1]


def test_a_spike_ends_at_the_lower_threshold_only():
    # After so many values the averages hardly move.
    values = [*CALM * 250, 1.32, 1.25, 1.15, 1.05, 1.25, 1.32]
    assert spikes(values, decay=0.9999)[-6:] == [True, True, True, False, False, True]


def test_the_unknown_leaves_a_row_as_it_is_and_a_reset_ends_it():
    spike = make_spike()
    for value in CALM:
        feel(spike, [value, None])
    feel(spike, [9.0, 9.0])
    state = travelled(spike)
    for unknown in (None, math.nan, math.inf):
        feel(spike, [unknown, unknown])
    assert travelled(spike) == state
    feel(spike, [None, None], resets=[False, True])
    assert (spike.due(0), spike.due(1)) == (True, False)


def test_the_usual_follows_the_signal():
    on = spikes([*CALM * 10, *[5.0, 5.2] * 200], decay=0.9)
    assert on[40] and not any(on[-100:])


def test_a_constant_signal_does_not_spike_at_its_first_move_and_no_number_breaks_it():
    assert not any(spikes([2.0] * 50 + [2.05]))
    on = spikes([*CALM, 1e308, -1e308, *CALM * 200], decay=0.9)
    assert on[4] and not on[-1]


# ---- all of them ----

values = st.one_of(st.none(), st.floats(-10, 10))
rows_of_values = st.lists(st.lists(values, min_size=2, max_size=2), max_size=40)


def play(part, seen):
    """Show one step's values to a trigger and return what is due."""
    if isinstance(part, Novelty):
        visit(part, [None if value is None else str(round(value)) for value in seen])
    else:
        feel(part, seen, resets=[False, seen[0] is None])
    due = [part.due(row) for row in range(2)]
    if due[0] and hasattr(part, "serve"):
        part.serve(0)
    return due


@pytest.mark.parametrize(
    "fresh",
    [
        lambda: Novelty(0.6),
        lambda: make_spike(1.0, 0.5, decay=0.8, warmup=3),
    ],
)
@settings(max_examples=40, deadline=None)
@given(run=rows_of_values, cut=st.integers(1, 40))
def test_a_resumed_trigger_goes_on_the_same(fresh, run, cut):
    part = fresh()
    resumed = None
    for n, seen in enumerate(run):
        if n == cut:
            resumed = fresh()
            resumed.load_state_dict(travelled(part))
        expected = play(part, seen)
        if resumed is not None:
            assert play(resumed, seen) == expected
            assert travelled(resumed) == travelled(part)
