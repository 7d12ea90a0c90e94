"""What is learnt from advice ends after so many trusted updates."""

from __future__ import annotations

import pytest
import torch

from lore_torchrl.objectives import Annealing


@pytest.mark.parametrize(
    ("after", "steps", "shares"),
    [
        (2, 2, [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]),
        (0, 4, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        (3, 0, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_whole_then_falling_then_none(after, steps, shares):
    annealing, found = Annealing(after=after, steps=steps), []
    for _ in shares:
        found.append(annealing().item())
        annealing.count(1.0)
    assert found == shares


def test_an_update_counts_by_its_trust():
    annealing = Annealing(after=0, steps=1)
    annealing.count(torch.tensor(0.25))
    annealing.count(torch.tensor(0.0))
    assert annealing() == 0.75


def test_it_goes_on_where_it_was_saved_and_reads_checkpoints_from_before():
    first, second = Annealing(after=1, steps=4), Annealing(after=1, steps=4)
    first.count(3.0)
    second.load_state_dict(first.state_dict())
    assert second() == first() == 0.5
    second.load_state_dict({})
    assert second() == 0.5


def test_it_may_begin_never_but_not_end_never():
    assert Annealing(after=float("inf"), steps=4)() == 1.0
    with pytest.raises(ValueError, match="anneal_after=None"):
        Annealing(after=1, steps=float("inf"))


@pytest.mark.parametrize("settings", [{"after": -1, "steps": 1}, {"after": 1, "steps": -1}])
def test_negative_lengths_are_refused(settings):
    with pytest.raises(ValueError, match=r"anneal_(after|steps) must not be negative, got -1"):
        Annealing(**settings)
