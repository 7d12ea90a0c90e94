"""Sequences are drawn as often as the formulas say, from all streams, and after a resume too."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from lore_torchrl.configs import SamplingConfig
from lore_torchrl.dreamer.replay import ReplayState, build_replay
from lore_torchrl.replay.sampling import record_weights

LENGTH, DRAWS = 3, 25
#: Of each stream: episodes as rewards of their records; the last one is still running.
STREAMS = [
    [[0, 0, 1], [0, 0, 0, 0], [0, 2], [0, 0]],
    [[0, 0, 0], [0, -1, 0, 0, 0], [0, 1, 0]],
]
KINDS = ("success", "advantage")


def records(streams=STREAMS, running=1) -> TensorDict:
    parts = []
    for stream, episodes in enumerate(streams):
        for number, rewards in enumerate(episodes):
            n = len(rewards)
            is_init, done = torch.zeros(2, n, 1, dtype=torch.bool)
            is_init[0] = True
            done[-1] = number < len(episodes) - running
            reward = torch.tensor(rewards, dtype=torch.float32).unsqueeze(-1)
            after = {"reward": reward, "done": done, "terminated": done, "truncated": ~done & False}
            index = torch.full((n,), stream)
            parts.append(TensorDict(env_index=index, is_init=is_init, next=after, batch_size=[n]))
    return torch.cat(parts)


def replay_of(kind, capacity=40, **settings):
    sampling = SamplingConfig(kind=kind, **settings)
    sizes = {"num_envs": 2, "buffer_size": 2 * capacity, "batch_size": 100, "seq_len": LENGTH - 1}
    return build_replay(**sizes, seed=3, sampling=sampling)


def all_weights(replay):
    return torch.cat([m.sampler.weights.of(m.sampler)[1] for m in (replay[0], replay[1])])


def expected_weights(kind, streams, temperature, ratio):
    """What each record weighs, stream by stream; written down once more, in plain Python."""
    done = [rewards for episodes in streams for rewards in episodes[:-1]]
    mean = sum(map(sum, done)) / len(done)
    scores = [math.exp(abs(sum(rewards) - mean) / temperature) for rewards in done]
    if kind == "success":
        of = [ratio if sum(rewards) > 0 else 1.0 for rewards in done]
    else:
        of = [s / sum(scores) / len(rewards) for s, rewards in zip(scores, done, strict=True)]
    average = sum(w * len(r) for w, r in zip(of, done, strict=True)) / sum(map(len, done))
    left = iter(of)
    return [
        [w for e in episodes[:-1] for w in [next(left)] * len(e)] + [average] * len(episodes[-1])
        for episodes in streams
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_are_drawn_by_the_mean_weight_of_their_records(kind):
    replay = replay_of(kind, temperature=0.4, ratio=5.0)
    replay.extend(records())
    sample = [replay.sample().reshape(-1, LENGTH) for _ in range(DRAWS)]
    index = torch.cat([part["index"] for part in sample])
    assert (index["index"].diff(dim=1) == 1).all()
    assert (index["buffer_ids"] == index["buffer_ids"][:, :1]).all()
    weights = expected_weights(kind, STREAMS, 0.4, 5.0)
    windows = [[sum(w[i : i + LENGTH]) for i in range(len(w) - LENGTH + 1)] for w in weights]
    total = sum(map(sum, windows))
    for stream, each in enumerate(windows):
        starts = index["index"][:, 0][index["buffer_ids"][:, 0] == stream]
        found = torch.bincount(starts, minlength=len(each)) / len(index)
        expected = torch.tensor(each) / total
        # Five standard deviations of a frequency.
        bound = 5 * (expected * (1 - expected) / len(index)).sqrt()
        assert ((found - expected).abs() < bound).all()


def test_an_episode_is_drawn_with_the_softmax_of_its_absolute_advantage():
    reward, is_init, done = (
        records([[[0, 3], [0, 0, 0, 0], [0, -2, 0]]], running=0).get(key).flatten()
        for key in (("next", "reward"), "is_init", ("next", "done"))
    )
    found = record_weights(reward, is_init, done, is_init, kind="advantage", temperature=2.0)
    returns = torch.tensor([3.0, 0.0, -2.0])
    expected = torch.softmax((returns - returns.mean()).abs() / 2.0, 0)
    sums = torch.stack([part.sum() for part in found.split([2, 4, 3])])
    torch.testing.assert_close(sums, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_no_number_counts_as_zero(kind, bad):
    first = torch.tensor([True, False, True, False])
    found, expected = (
        record_weights(torch.tensor([0.0, 1.0, 0.0, last]), first, ~first, first, kind=kind)
        for last in (bad, 0.0)
    )
    assert torch.equal(found, expected) and found.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_before_an_episode_has_ended_all_are_drawn_alike(kind):
    reward, start = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([True, False, False])
    found = record_weights(reward, start, torch.zeros(3).bool(), start, kind=kind)
    assert torch.equal(found, torch.ones(3))


# The other stream is too short for a sequence, or begins within an episode.
@pytest.mark.parametrize("other", [[[0, 0]], [[0] * 4, [0] * 4, [0] * 2]])
def test_streams_that_wrapped_around(other):
    replay = replay_of("success", capacity=7, ratio=1e6)
    replay.extend(records([[[0, 0, 1], [0, 0, 0, 0], [0, 1, 0]], other], running=0))
    drawn = replay.sample().reshape(-1, LENGTH)
    first = drawn["env_index"][:, 0] == 0
    assert first.all() == (len(other) == 1)
    # The success fills slots 0 to 2 of the second lap, the failure before it 3 to 6.
    slots = {tuple(row) for row in drawn["index"]["index"][first].tolist()}
    assert slots == {(5, 6, 0), (6, 0, 1), (0, 1, 2)}


def test_uniform_is_the_stock_sampler_bitwise():
    stock = build_replay(num_envs=2, buffer_size=80, batch_size=100, seq_len=LENGTH - 1, seed=3)
    uniform = replay_of("uniform")
    for replay in (stock, uniform):
        replay.extend(records())
    assert (stock.sample() == uniform.sample()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_replay_draws_what_the_saved_one_would_have(kind):
    saved, restored = replay_of(kind), replay_of(kind)
    saved.extend(records())
    saved.sample()
    ReplayState(restored).load_state_dict(ReplayState(saved).state_dict())
    restored.set_rng(torch.Generator().set_state(saved._rng.get_state()))
    assert (saved.sample() == restored.sample()).all()
    before = torch.get_rng_state()
    for replay in (saved, restored):
        replay.extend(records([[[0, 5, 0]], [[0]]]))
    assert (saved.sample() == restored.sample()).all()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_on_steps_ends_an_episode_and_a_resume_does_not(kind):
    cut, limited = replay_of(kind), replay_of(kind)
    for replay in (cut, limited):
        replay.extend(records())
    running = all_weights(cut)
    cut.end_streams(truncated_key=None)
    limited.end_streams()
    for replay in (cut, limited):
        replay[0].sampler.weights.stale = True
    assert torch.equal(all_weights(cut), running)
    assert not torch.equal(all_weights(limited), running)


def test_a_written_record_changes_the_weights():
    replay = replay_of("success", ratio=1e6)
    replay.extend(records([[[0, 0, 0]], [[0, 0, 0]]], running=0))
    assert replay.sample()["env_index"].float().mean().sub(0.5).abs() < 0.2
    replay.extend(records([[], [[0, 0, 1]]], running=0))
    assert replay.sample()["env_index"].eq(1).all()
