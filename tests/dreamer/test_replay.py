from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from lore_torchrl import keys
from lore_torchrl.configs import DreamerConfig
from lore_torchrl.dreamer.checkpoint import RunCheckpoint
from lore_torchrl.dreamer.hooks import DreamerReplayHook
from lore_torchrl.dreamer.replay import (
    ReplayState,
    build_replay,
    stream_records,
    write_back_latents,
)


def batch(num_envs=2, num_steps=5, starts=((0, 0), (0, 3), (1, 2))) -> TensorDict:
    """Each observation is a number of its own: 100 * env + time, next 100 * env + time + 1."""
    env = 100.0 * torch.arange(num_envs).reshape(-1, 1, 1)
    step = torch.arange(num_steps).reshape(1, -1, 1)
    observation = env + step
    is_init = torch.zeros(num_envs, num_steps, 1, dtype=torch.bool)
    for row, time in starts:
        is_init[row, time] = True
    ends = torch.zeros_like(is_init)
    for row, time in starts:
        if time:
            ends[row, time - 1] = True
    return TensorDict(
        {
            "observation": observation,
            "action": torch.ones(num_envs, num_steps, 3, dtype=torch.long),
            "is_init": is_init,
            "state": torch.ones(num_envs, num_steps, 4),
            "belief": torch.ones(num_envs, num_steps, 6),
            keys.PRIOR_LOGITS: observation.expand(-1, -1, 3).clone(),
            "unwanted": observation.clone(),
            "next": {
                "observation": observation + 1,
                "reward": torch.ones(num_envs, num_steps, 1),
                "done": ends,
                "terminated": ends.clone(),
                "truncated": torch.zeros_like(ends),
                keys.PRIOR_LOGITS: (observation + 1).expand(-1, -1, 3).clone(),
            },
        },
        [num_envs, num_steps],
    )


def test_each_episode_starts_with_its_first_observation():
    records = stream_records(batch(), ("observation", keys.PRIOR_LOGITS))
    first = records[records["env_index"] == 0]
    # Two episodes of three and two transitions, each behind its reset record.
    assert first["next", "observation"].flatten().tolist() == [0, 1, 2, 3, 3, 4, 5]
    assert first["is_init"].flatten().tolist() == [True, False, False, False, True, False, False]
    assert first["action"][:, 0].tolist() == [0, 1, 1, 1, 0, 1, 1]
    assert first["next", "reward"].flatten().tolist() == [0, 1, 1, 1, 0, 1, 1]
    assert first["next", "done"].flatten().tolist() == [False, False, False, True] + [False] * 3
    assert records.get("unwanted", None) is None


def test_without_truncated_it_is_an_end_that_is_not_terminated():
    given = batch()
    given["next", "terminated"][0] = False
    given["next"].pop("truncated")
    records = stream_records(given)["next"]
    assert torch.equal(records["truncated"], records["done"] & ~records["terminated"])
    assert records["truncated"].any() and records["terminated"].any()
    assert "truncated" not in given["next"]


def test_advice_stays_with_its_observation():
    records = stream_records(batch(), ("observation", keys.PRIOR_LOGITS))
    observed = records["next", "observation"]
    assert torch.equal(records["next", keys.PRIOR_LOGITS], observed.expand(-1, 3))


def test_a_stream_that_goes_on_gets_no_reset_record():
    records = stream_records(batch(starts=()))
    assert not records["is_init"].any()
    assert len(records) == 10


def filled(capacity=40, batch_size=3, seq_len=4):
    replay = build_replay(
        num_envs=2, buffer_size=2 * capacity, batch_size=batch_size, seq_len=seq_len, seed=1
    )
    replay.extend(stream_records(batch(num_steps=10)))
    return replay


def test_samples_are_runs_of_one_stream():
    replay = filled()
    for _ in range(20):
        sample = replay.sample().reshape(3, 5)
        assert (sample["env_index"] == sample["env_index"][:, :1]).all()
        observed = sample["next", "observation"].squeeze(-1)
        resets = sample["is_init"].squeeze(-1)
        step = observed[:, 1:] - observed[:, :-1]
        assert torch.equal(step, (~resets[:, 1:]).float())


def test_the_share_of_sequences_with_a_reward_is_counted_between_rows():
    rewarded = batch(num_steps=10)
    rewarded["next", "reward"][1] = -1.0
    replay = build_replay(num_envs=2, buffer_size=80, batch_size=3, seq_len=4, seed=1)
    replay.extend(stream_records(rewarded))
    hook = DreamerReplayHook(replay, DreamerConfig(batch_size=3, seq_len=4))
    hook._trainer, hook._owed = SimpleNamespace(_stop_training=False), 20
    assert hook.stats() == {}
    drawn = torch.stack([hook.sample(TensorDict())["env_index"][:, 0] for _ in range(20)])
    resumed = DreamerReplayHook(replay, DreamerConfig(batch_size=3, seq_len=4))
    resumed.load_state_dict(hook.state_dict())
    share = (drawn == 0).float().mean().item()
    assert 0 < share < 1
    for each in (hook, resumed):
        assert each.stats() == {"replay/rewarded": pytest.approx(share)} and each.stats() == {}


def test_a_shaped_reward_is_not_counted():
    shaped = batch(num_steps=10)
    shaped["raw_reward"] = torch.zeros_like(shaped["next", "reward"])
    shaped["next", "raw_reward"] = torch.zeros_like(shaped["next", "reward"])
    replay = build_replay(num_envs=2, buffer_size=80, batch_size=3, seq_len=4, seed=1)
    replay.extend(stream_records(shaped, ("observation", "raw_reward")))
    hook = DreamerReplayHook(replay, DreamerConfig(batch_size=3, seq_len=4))
    hook._trainer, hook._owed = SimpleNamespace(_stop_training=False), 1
    assert (hook.sample(TensorDict())["next", "reward"] > 0).any()
    assert hook.stats() == {"replay/rewarded": 0.0}


def test_latents_are_written_where_the_next_record_starts():
    replay = filled()
    sample = replay.sample().reshape(3, 5)
    # The posterior of a record is named after the observation that it has seen.
    seen = sample["next", "observation"][:, :-1]
    context = TensorDict(
        {"state": seen.expand(-1, -1, 4).clone(), "belief": seen.expand(-1, -1, 6).clone()}, [3, 4]
    )
    write_back_latents(replay, sample, context)
    for member in range(2):
        stored = replay[member][:]
        touched = stored["state"][:, 0] != 1
        touched &= ~stored["is_init"].squeeze(-1) | (stored["state"][:, 0] != 0)
        index = touched.nonzero().flatten()
        for i in index.tolist():
            assert stored["state"][i, 0] == stored["next", "observation"][i - 1, 0]
    written = sum(int((replay[m][:]["belief"][:, 0] > 1).sum()) for m in range(2))
    assert written > 0


def test_the_later_of_two_overlapping_sequences_wins():
    replay = filled(batch_size=8)
    sample = replay.sample().reshape(8, 5)
    order = torch.arange(8.0).reshape(8, 1, 1)
    context = TensorDict(
        {"state": order.expand(8, 4, 4).clone(), "belief": order.expand(8, 4, 6).clone()}, [8, 4]
    )
    write_back_latents(replay, sample, context)
    last: dict[tuple[int, int], int] = {}
    index = sample["index"][:, 1:]
    for row in range(8):
        for member, slot in zip(
            index["buffer_ids"][row].tolist(), index["index"][row].tolist(), strict=True
        ):
            last[member, slot] = row
    assert len(last) < 32, "the sample should overlap for this test to say anything"
    for (member, slot), row in last.items():
        assert replay[member][:]["state"][slot, 0] == row


def test_too_small_a_buffer_is_refused():
    with pytest.raises(ValueError, match="buffer_size=10"):
        build_replay(num_envs=4, buffer_size=10, batch_size=2, seq_len=16)


def full(capacity=15):
    """A replay whose streams have begun again at their first slot."""
    replay = filled(capacity=capacity)
    replay.extend(stream_records(batch(num_steps=10)))
    assert [len(replay[member]) for member in range(2)] == [capacity] * 2
    return replay


@pytest.mark.parametrize("make", [filled, full])
def test_a_restored_replay_goes_on_as_the_saved_one(tmp_path, make):
    saved, restored = make(), build_like(make)
    RunCheckpoint(replay=ReplayState(saved)).save(tmp_path / "checkpoint")
    RunCheckpoint(replay=ReplayState(restored)).load(tmp_path / "checkpoint")
    generator = saved._rng.get_state()
    for replay in (saved, restored):
        replay.set_rng(torch.Generator().set_state(generator))
        replay.extend(stream_records(batch(num_steps=5)))
    for member in range(2):
        assert_close(restored[member][:], saved[member][:], rtol=0, atol=0)
    for _ in range(5):
        assert_close(restored.sample(), saved.sample(), rtol=0, atol=0)


def build_like(make):
    capacity = 40 if make is filled else 15
    return build_replay(num_envs=2, buffer_size=2 * capacity, batch_size=3, seq_len=4, seed=9)


def test_only_what_is_filled_is_saved(tmp_path):
    sizes = []
    for capacity in (40, 4_000):
        replay = filled(capacity=capacity)
        RunCheckpoint(replay=ReplayState(replay)).save(tmp_path / str(capacity))
        records = sum(len(replay[member]) for member in range(2))
        found = (tmp_path / str(capacity)).rglob("*.memmap")
        # The writers' generations have their full length.
        sizes.append(sum(file.stat().st_size for file in found) - 2 * 8 * capacity)
    assert (
        sizes[0]
        == sizes[1]
        == records
        * sum(value[0].numel() * value.element_size() for value in replay[0][:].values(True, True))
    )


def test_a_replay_that_nothing_was_written_to_is_restored_empty(tmp_path):
    RunCheckpoint(replay=ReplayState(build_like(filled))).save(tmp_path / "checkpoint")
    restored = build_like(filled)
    RunCheckpoint(replay=ReplayState(restored)).load(tmp_path / "checkpoint")
    assert [len(restored[member]) for member in range(2)] == [0, 0]
