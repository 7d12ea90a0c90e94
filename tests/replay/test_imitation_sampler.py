"""Steps with a gain are drawn evenly from all streams of replay, and from nowhere else."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from lore_torchrl import keys
from lore_torchrl.dreamer.replay import build_replay, write_back_latents
from lore_torchrl.replay import ImitationSampler
from lore_torchrl.replay.imitation_sampler import empty_steps

STREAMS, STEPS, LENGTH = 2, 10, 5


def filled(gains: list[tuple[int, int]]):
    """Two streams of two episodes; what is named, by stream and step, has a gain."""
    replay = build_replay(num_envs=STREAMS, buffer_size=100, batch_size=2, seq_len=4)
    stream = torch.arange(STREAMS).repeat_interleave(STEPS)
    step = torch.arange(STEPS).repeat(STREAMS)
    weight = torch.tensor(
        [(s, t) in gains for s, t in zip(stream.tolist(), step.tolist(), strict=True)]
    )
    column = (10.0 * stream + step).unsqueeze(-1)
    entries = {
        "env_index": stream,
        "state": column,
        "belief": column + 0.5,
        "is_init": (step % LENGTH == 0).unsqueeze(-1),
        "action": column.long(),
        "observation": column.expand(-1, 100),
        keys.IMITATION_WEIGHT: 0.1 * weight.float().unsqueeze(-1),
    }
    replay.extend(TensorDict(entries, [STREAMS * STEPS]))
    return replay


def test_only_steps_with_a_gain_are_drawn_each_as_often():
    drawn = ImitationSampler(filled([(0, 3), (1, 0), (1, 9)]), num_steps=3000).sample()
    assert drawn.shape == (3000,) and not {"observation", "is_init"} & set(drawn.keys())
    steps, counts = drawn["state"].unique(return_counts=True)
    assert steps.tolist() == [3.0, 10.0, 19.0]
    assert counts.min() > 900, "evenly"
    assert torch.equal(drawn["belief"], drawn["state"] + 0.5)
    assert torch.equal(drawn["action"], drawn["state"].long())
    assert drawn[keys.IMITATION_WEIGHT].eq(0.1).all()


def test_without_gains_they_have_no_weight():
    drawn = ImitationSampler(filled([]), num_steps=5).sample()
    assert drawn.shape == (5,) and not drawn[keys.IMITATION_WEIGHT].any()


def test_a_replay_without_returns_is_refused():
    replay = filled([(0, 3)])
    for stream in range(STREAMS):
        del replay[stream].storage._storage[keys.IMITATION_WEIGHT]
    with pytest.raises(KeyError, match=r"lore\.returns\(\)\.prepare\(records\) before"):
        ImitationSampler(replay, num_steps=5).sample()


def test_the_limit_grows_with_the_episodes_that_gained():
    lucky = [(0, 1), (0, 4), (0, 5), (1, 9)]  # of three episodes
    for pseudocount, limit in ((5.0, 3 / 8), (0.0, 1.0)):
        sampler = ImitationSampler(filled(lucky), num_steps=5, pseudocount=pseudocount)
        found = sampler.sample()[keys.IMITATION_LIMIT]
        torch.testing.assert_close(found, torch.full((5, 1), limit))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_steps": 0},
        {"num_steps": 1, "pseudocount": -1.0},
        {"num_steps": 1, "pseudocount": float("inf")},
    ],
)
def test_what_is_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        ImitationSampler(filled([]), **wrong)


def test_what_the_learner_is_compiled_on_has_the_same_entries():
    replay = filled([(0, 3)])
    drawn = ImitationSampler(replay, num_steps=5).sample()
    empty = empty_steps(replay[0].storage[:], 5)
    assert {k: (v.shape, v.dtype) for k, v in empty.items()} == {
        k: (v.shape, v.dtype) for k, v in drawn.items()
    }


def test_the_stream_is_its_own_and_goes_on_where_it_was():
    replay = filled([(0, step) for step in range(STEPS)])
    first, second = (ImitationSampler(replay, num_steps=8, seed=3) for _ in "ab")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first.sample()
    assert torch.equal(torch.get_rng_state(), before)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.sample()["state"], second.sample()["state"])


def test_what_an_update_found_is_drawn_next():
    """A pipeline's own loop: beside the batch go in draws, back into replay go the new weights."""
    replay = filled([])
    sampler = ImitationSampler(replay, num_steps=16)
    drawn = replay.sample().reshape(2, 5)
    batch = sampler.extend(drawn[:, :-1].exclude("index", "index_generation"))
    assert batch[keys.IMITATION].shape == (2, 4, 2)
    assert not batch[keys.IMITATION, keys.IMITATION_WEIGHT].any()
    context = batch.select("state", "belief")
    # The last posterior's record is not of the batch, and keeps its own weight.
    context[keys.IMITATION_WEIGHT] = torch.ones(2, 4, 1)
    write_back_latents(replay, drawn, context)
    found = sampler.sample()
    gained = drawn[:, 1:-1]["action"].reshape(-1)
    assert found[keys.IMITATION_WEIGHT].eq(1).all()
    assert set(found["action"].reshape(-1).tolist()) <= set(gained.tolist())


def test_another_buffer_is_refused():
    single = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    with pytest.raises(TypeError, match=r"got TensorDictReplayBuffer.*imitation_ratio=0"):
        ImitationSampler(single, num_steps=4)
