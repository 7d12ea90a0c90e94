from __future__ import annotations

import math

import pytest
import torch
from replays import make_replay
from tensordict import TensorDict

from lore_torchrl import keys
from lore_torchrl.replay import EpisodeReturns

NAN = math.nan
RETURN = ("next", keys.RETURN)
RESET = (0.0, "reset")


def records(*streams):
    """Records of several streams: a reward, or a reward and ``reset``, ``end`` or ``limit``.

    The critic's value of the state acted in is ten times the record's place in its stream.
    """
    rows = [
        (stream, 10.0 * place, *(row if isinstance(row, tuple) else (row, "")))
        for stream, rows in enumerate(streams)
        for place, row in enumerate(rows)
    ]
    stream, value, reward, kind = (list(column) for column in zip(*rows, strict=True))

    def where(*kinds):
        return torch.tensor([name in kinds for name in kind]).unsqueeze(-1)

    return TensorDict(
        {
            "env_index": torch.tensor(stream),
            "is_init": where("reset"),
            "value": torch.tensor(value).unsqueeze(-1),
            "next": {
                "reward": torch.tensor(reward).unsqueeze(-1),
                "done": where("end", "limit"),
                "terminated": where("end"),
            },
        },
        [len(rows)],
    )


def make_returns():
    return EpisodeReturns(lambda rows: rows["value"], gamma=0.5)


def store(returns, replay, *streams):
    rows = returns.prepare(records(*streams))
    returns.write(replay, rows, replay.extend(rows))


def stored(replay, stream=0):
    return replay[stream][:][RETURN].flatten().tolist()


def expect(found, *expected):
    assert found == pytest.approx(expected, nan_ok=True)


def test_a_terminated_episode():
    returns, replay = make_returns(), make_replay(12)
    store(returns, replay, [RESET, 1.0, 2.0, (4.0, "end")])
    # The reset record's row holds what the whole episode returned: 1 + 2 / 2 + 4 / 4.
    expect(stored(replay), 3.0, 4.0, 4.0, 0.0)


def test_rewards_in_double_precision():
    returns, replay = make_returns(), make_replay(12)
    rows = records([RESET, 1.0, 2.0, (4.0, "end")])
    rows["next", "reward"] = rows["next", "reward"].double()
    rows = returns.prepare(rows)
    assert rows[keys.IMITATION_WEIGHT].dtype == torch.float32
    returns.write(replay, rows, replay.extend(rows))
    expect(stored(replay), 3.0, 4.0, 4.0, 0.0)


def test_a_truncated_episode_goes_on_behind_its_limit():
    returns, replay = make_returns(), make_replay(12)
    store(returns, replay, [RESET, 1.0, 2.0, (4.0, "limit")])
    # The last state acted in is worth 30: the reward of that step is part of it.
    expect(stored(replay)[:3], 1 + 0.5 * (2 + 0.5 * 30), 2 + 0.5 * 30, 30.0)


def test_an_episode_of_one_step():
    returns, replay = make_returns(), make_replay(12)
    store(returns, replay, [RESET, (4.0, "end"), RESET, (4.0, "limit")])
    expect(stored(replay)[:3], 4.0, 0.0, 30.0)


def test_what_has_not_ended_is_unknown():
    returns, replay = make_returns(), make_replay(12)
    store(returns, replay, [RESET, 1.0, (2.0, "end"), RESET, 5.0, 6.0])
    expect(stored(replay), 2.0, 2.0, 0.0, NAN, NAN, NAN)


def test_streams_are_kept_apart():
    returns, replay = make_returns(), make_replay(12)
    store(returns, replay, [RESET, 1.0, 2.0], [RESET, (8.0, "end"), RESET])
    store(returns, replay, [(4.0, "end"), RESET], [2.0, (4.0, "end")])
    expect(stored(replay), 3.0, 4.0, 4.0, 0.0, NAN)
    expect(stored(replay, 1), 8.0, 0.0, 4.0, 4.0, 0.0)


def test_an_episode_over_several_batches():
    returns, replay = make_returns(), make_replay(12)
    for batch in ([RESET], [1.0], [2.0, 4.0]):
        store(returns, replay, batch)
    expect(stored(replay), NAN, NAN, NAN, NAN)
    store(returns, replay, [(8.0, "end"), RESET, 16.0])
    expect(stored(replay), 4.0, 6.0, 8.0, 8.0, 0.0, NAN, NAN)


def test_rows_written_anew_are_left_alone():
    returns, replay = make_returns(), make_replay(capacity=4, members=1)
    store(returns, replay, [RESET, 1.0, 2.0, 4.0])
    store(returns, replay, [8.0, (16.0, "end")])  # takes the slots of the first two
    expect(stored(replay), 16.0, 0.0, 4 + 8 / 2 + 16 / 4, 8 + 16 / 2)
    assert replay[0][:]["next", "reward"].flatten().tolist() == [8.0, 16.0, 2.0, 4.0]
    store(returns, replay, [RESET, 1.0, 2.0, 4.0, 8.0, (16.0, "end")])  # longer than the buffer
    expect(sorted(stored(replay)), 0.0, 12.0, 16.0, 16.0)


def test_an_endless_episode_holds_no_more_rows_than_replay():
    returns, replay = make_returns(), make_replay(capacity=4, members=1)
    for _ in range(5):
        store(returns, replay, [1.0, 2.0, 4.0])
    assert len(returns._open[0]) == 4


def test_an_episode_that_a_resume_cut_off_stays_unknown():
    returns, replay = make_returns(), make_replay(12)
    store(returns, replay, [RESET, 1.0, 2.0])
    store(returns, replay, [RESET, 4.0, (8.0, "end")])
    expect(stored(replay), NAN, NAN, NAN, 8.0, 8.0, 0.0)


def test_nothing_but_the_return_is_written():
    returns, replay = make_returns(), make_replay(12)
    rows = records([RESET, 1.0, (2.0, "end")])
    prepared = returns.prepare(rows.clone())
    assert prepared[RETURN].shape == (3, 1) and prepared[RETURN].isnan().all()
    returns.write(replay, prepared, replay.extend(prepared))
    kept = replay[0][:].select(*rows.keys(True, True))
    assert (kept == rows).all()


@pytest.mark.parametrize("gamma", [-0.1, 1.5])
def test_bad_discount(gamma):
    with pytest.raises(ValueError, match=rf"gamma must lie in \[0, 1\], got {gamma}"):
        EpisodeReturns(lambda rows: rows["value"], gamma=gamma)
