"""Steps with a positive gain are drawn from all streams of replay, in proportion to it."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from lore_torchrl import keys
from lore_torchrl.dreamer.replay import build_replay
from lore_torchrl.replay import ImitationSampler

STREAMS, STEPS = 2, 10


def filled(gains: dict[tuple[int, int], float]):
    """Two streams of ten records; those that are named, by stream and step, have gained."""
    replay = build_replay(num_envs=STREAMS, buffer_size=100, batch_size=2, seq_len=4)
    stream = torch.arange(STREAMS).repeat_interleave(STEPS)
    step = torch.arange(STEPS).repeat(STREAMS)
    places = zip(stream.tolist(), step.tolist(), strict=True)
    weight = torch.tensor([gains.get(place, 0.0) for place in places])
    column = (10.0 * stream + step).unsqueeze(-1)
    entries = {
        "env_index": stream,
        "state": column,
        "belief": column + 0.5,
        "action": column.long(),
        "observation": column.expand(-1, 100),
        keys.IMITATION_WEIGHT: weight.unsqueeze(-1),
    }
    replay.extend(TensorDict(entries, [STREAMS * STEPS]))
    return replay


def test_steps_are_drawn_in_proportion_to_what_they_gained_and_then_weigh_alike():
    replay = filled({(0, 3): 0.1, (1, 0): 0.2, (1, 9): 0.3})
    drawn = ImitationSampler(replay, num_steps=6000).sample()
    assert drawn.shape == (6000,) and "observation" not in drawn
    steps, counts = drawn["state"].unique(return_counts=True)
    assert steps.tolist() == [3.0, 10.0, 19.0]
    torch.testing.assert_close(counts / 1000, torch.tensor([1.0, 2.0, 3.0]), rtol=0.1, atol=0)
    assert torch.equal(drawn["belief"], drawn["state"] + 0.5)
    assert torch.equal(drawn["action"], drawn["state"].long())
    assert drawn[keys.IMITATION_WEIGHT].eq(1).all()


def test_where_nothing_has_gained_they_have_no_weight():
    drawn = ImitationSampler(filled({}), num_steps=5).sample()
    assert drawn.shape == (5,) and not drawn[keys.IMITATION_WEIGHT].any()


def test_the_stream_is_its_own_and_goes_on_where_it_was():
    replay = filled({(0, step): 0.5 for step in range(STEPS)})
    first, second = (ImitationSampler(replay, num_steps=8, seed=3) for _ in "ab")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first.sample()
    assert torch.equal(torch.get_rng_state(), before)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.sample()["state"], second.sample()["state"])


def test_a_size_that_is_not_positive_is_named():
    with pytest.raises(ValueError, match="num_steps must be positive, got 0"):
        ImitationSampler(filled({}), num_steps=0)
