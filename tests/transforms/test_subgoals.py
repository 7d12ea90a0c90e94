from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from advice_toy import Corridor, Describe, make_service
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.envs import Compose, SerialEnv, TransformedEnv
from torchrl.envs.utils import check_env_specs

from lore_torchrl import keys
from lore_torchrl.advisors.base import Advice
from lore_torchrl.control import AdviceBandit, AdviceObserver
from lore_torchrl.sandbox import Program, ProgramSet
from lore_torchrl.transforms import AdviceTransform, ProgramSubgoals, SubgoalBonus

WAIT = TensorDictModule(lambda mask: torch.full(mask.shape[:-1], 1), ["llm_mask"], ["action"])


class Named(Describe):
    """A corridor's places, by their names."""

    subgoals = ("begin", "middle", "late")

    def reached(self, row, observation):
        at = int(observation["observation"][0]) % 100
        return {
            name
            for name, places in zip(self.subgoals, ((0,), (2,), (3, 5)), strict=True)
            if at in places
        }


class Names:
    """Names for each place what ``said`` holds, else nothing."""

    def __init__(self, **said):
        self.said = {int(place[1:]): name for place, name in said.items()}

    async def advise(self, requests):
        places = [int(request.cache_key) % 100 for request in requests]
        return [Advice((0.0, 0.0, 3.0), subgoal=self.said.get(place, "")) for place in places]


def build(advisor, *, lengths=(4,), **settings):
    advise = AdviceTransform(
        make_service(advisor, calls_per_step=9), Named(), require_key=None, subgoals=True
    )
    worlds = [partial(Corridor, number, length) for number, length in enumerate(lengths)]
    bonus = SubgoalBonus(Named(), **settings)
    return TransformedEnv(SerialEnv(len(lengths), worlds), Compose(advise, bonus)), bonus


def play(env, steps):
    return env.rollout(steps, WAIT, break_when_any_done=False)


def rewards(batch, row=0):
    return batch["next", "reward"][row, :, 0].tolist()


def test_a_subgoal_is_paid_once_an_episode_and_less_each_time():
    env, bonus = build(Names(p0="middle"))
    batch = play(env, 12)
    paid = [0.1, 0.1 / 2**0.5, 0.1 / 3**0.5]
    assert rewards(batch) == pytest.approx(
        [value for one in paid for value in (0.0, one, 0.0, 1.0)]
    )
    assert bonus.counts.tolist() == [0.0, 3.0, 0.0]
    assert bonus.stats() == pytest.approx({"reached": 3.0, "bonus": sum(paid) / 12, "faults": 0})


class Failing(Named):
    """Cannot say what is reached, from its n-th question on."""

    def __init__(self, n, says):
        super().__init__()
        self.left, self.says = n, says

    def reached(self, row, observation):
        self.left -= 1
        return self.says() if self.left < 0 else super().reached(row, observation)


def odd():
    raise KeyError("odd")


@pytest.mark.parametrize(("says", "error"), [(odd, KeyError), (lambda: None, TypeError)])
def test_where_the_describer_fails_nothing_is_reached_and_the_run_goes_on(says, error, caplog):
    env, bonus = build(Names(p0="middle"))
    bonus.describer = Failing(4, says)
    with caplog.at_level("WARNING", logger="torchrl"):
        batch = play(env, 12)
    assert rewards(batch) == pytest.approx([0.0, 0.1, 0.0, 1.0] + [0.0, 0.0, 0.0, 1.0] * 2)
    assert bonus.stats()["faults"] == 16 - 4 - 1 and caplog.text.count("is reached where") == 1
    env, bonus = build(Names(p0="middle"))
    bonus.describer = Failing(0, says)
    with pytest.raises(error):
        play(env, 12)


class Began(Named):
    """``begin`` is true at places 0 and 3."""

    def reached(self, row, observation):
        return {"begin"} & super().reached(row, observation) or (
            {"begin"} if int(observation["observation"][0]) % 100 == 3 else set()
        )


def test_a_reset_of_another_row_closes_no_subgoal():
    # A SerialEnv's partial reset shows the rows that go on as they began.
    env, bonus = build(Names(p2="begin"), lengths=(1, 6))
    bonus.describer = Began()
    assert rewards(play(env, 6), row=1) == pytest.approx([0.0, 0.0, 0.1, 0.0, 0.0, 1.0])


def test_an_environment_without_a_batch_is_paid_too():
    advise = AdviceTransform(
        make_service(Names(p0="middle"), calls_per_step=9), Named(), require_key=None, subgoals=True
    )
    env = TransformedEnv(Corridor(0, 4), Compose(advise, SubgoalBonus(Named())))
    batch = env.rollout(4, WAIT, break_when_any_done=False)
    assert batch["next", "reward"].flatten().tolist() == pytest.approx([0.0, 0.1, 0.0, 1.0])


def test_a_subgoal_that_was_reached_is_not_paid_again():
    # Named again where it is true, and where it is true no more: it will be at 5.
    env, _ = build(Names(p0="late", p3="late", p4="late"), lengths=(6,))
    assert rewards(play(env, 6)) == pytest.approx([0.0, 0.0, 0.1, 0.0, 0.0, 1.0])


def test_it_is_open_until_it_is_reached_or_another_is_named():
    batch = play(build(Names(p0="middle", p2="late"), lengths=(6,))[0], 6)
    places = batch[keys.SUBGOAL][0]
    middle, late, none = torch.tensor([[0.0, 1, 0], [0, 0, 1], [0, 0, 0]])
    expected = torch.stack((middle, middle, late, none, none, none))
    assert torch.equal(places, expected)
    reached = torch.stack((none, middle, late, none, late, none))
    assert torch.equal(batch["next", keys.REACHED][0], reached)


@pytest.mark.parametrize("name", ["fly to the moon", "begin", ""])
def test_what_is_unknown_or_true_already_is_no_subgoal(name):
    batch = play(build(Names(p0=name))[0], 4)
    assert not batch[keys.SUBGOAL].any() and rewards(batch) == [0.0, 0.0, 0.0, 1.0]


def test_an_episode_pays_no_more_than_its_budget():
    env, _ = build(Names(p0="middle", p2="late"), scale=0.4, episode_budget=0.5)
    batch = play(env, 8)
    second = 0.4 / 2**0.5
    expected = [0.0, 0.4, 0.1, 1.0, 0.0, second, 0.5 - second, 1.0]
    assert rewards(batch) == pytest.approx(expected)


def test_a_reset_forgets_the_subgoal_of_its_row_alone():
    # The first row ends before its subgoal; the second goes on through that reset.
    said = Names(p0="late")
    said.said[1] = "middle"
    env, _ = build(said, lengths=(1, 6))
    batch = play(env, 4)
    late, middle = torch.eye(3)[2], torch.eye(3)[1]
    assert torch.equal(batch[keys.SUBGOAL][0], late.expand(4, 3))
    assert torch.equal(batch[keys.SUBGOAL][1, :2], torch.stack((late, middle)))
    assert rewards(batch, 1) == pytest.approx([0.0, 0.1, 0.0, 0.0])


def test_the_raw_reward_is_kept():
    batch = play(build(Names(p0="middle"))[0], 4)
    assert batch["next", keys.RAW_REWARD][0, :, 0].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert torch.equal(keys.raw_reward(batch["next"]), batch["next", keys.RAW_REWARD])
    unshaped = batch["next"].exclude(keys.RAW_REWARD)
    assert torch.equal(keys.raw_reward(unshaped), batch["next", "reward"])


def test_the_bandit_is_told_of_the_raw_reward():
    told = []

    class Told(AdviceBandit):
        def observe(self, advised, segment_return, ended):
            told.extend(segment_return[ended].tolist())

    batch = play(build(Names(p0="middle"))[0], 4)
    batch.update(
        TensorDict({keys.KL: torch.ones(1, 4, 1), keys.COEFFICIENT: torch.ones(1, 4, 1)}, [1, 4])
    )
    batch["next", "step_count"] = torch.arange(1, 5).view(1, 4, 1)
    AdviceObserver(Told())(batch)
    assert told == [1.0]


def test_counts_go_on_where_they_were_saved():
    env, bonus = build(Names(p0="middle"))
    play(env, 4)
    other, restored = build(Names(p0="middle"))
    other.transform.load_state_dict(env.transform.state_dict())
    assert rewards(play(other, 4))[1] == pytest.approx(0.1 / 2**0.5)
    assert torch.equal(restored.counts, bonus.counts + torch.tensor([0.0, 1.0, 0.0]))


def test_the_entries_fit_their_specs():
    check_env_specs(build(Names(p0="middle"), lengths=(3, 4))[0])


def test_without_the_channel_nothing_is_written():
    env = TransformedEnv(
        SerialEnv(1, Corridor), AdviceTransform(make_service(), Named(), require_key=None)
    )
    batch = play(env, 4)
    assert not {keys.SUBGOAL, keys.REACHED, keys.RAW_REWARD} & set(batch["next"].keys())


class _Seen(Named):
    """A program sees the place."""

    def program_view(self, row, observation):
        return {"at": int(observation["observation"][0]) % 100}


def test_programs_name_further_subgoals_and_a_failing_one_reaches_none():
    pytest.importorskip("pydantic_monty")
    code = "def reached(obs):\n    return {'end': 1 // (5 - obs['at']) == 1, 'middle': False}"
    program = Program("subgoals", code, checks={"names": ["end", "middle"]})
    programs = ProgramSet([program], max_failures=1)
    describer = ProgramSubgoals(_Seen(), programs)
    assert describer.subgoals == ("begin", "middle", "late", "end")
    assert describer.actions == Named.actions and pickle.loads(pickle.dumps(describer)).subgoals
    places = [{"observation": torch.tensor([float(at)])} for at in range(6)]
    assert describer.request(0, places[0]).subgoals == describer.subgoals
    true = [describer.reached(0, place) for place in places]
    assert true == [{"begin"}, set(), {"middle"}, {"late"}, {"end"}, {"late"}]
    assert programs.used[0].retired and describer.reached(0, places[4]) == set()


def test_a_program_that_was_never_checked_names_nothing():
    pytest.importorskip("pydantic_monty")
    with pytest.raises(ValueError, match="judged"):
        ProgramSubgoals(_Seen(), ProgramSet([Program("subgoals", "def reached(obs): pass")]))
    with pytest.raises(ValueError, match="got progress"):
        ProgramSubgoals(_Seen(), ProgramSet([Program("progress", "def progress(obs): pass")]))


def test_a_describer_without_subgoals_is_refused():
    with pytest.raises(TypeError, match=r"lore\.subgoal\.enabled=false"):
        SubgoalBonus(Describe())
    with pytest.raises(ValueError, match="subgoals=True"):
        AdviceTransform(make_service(), Describe(), subgoals=True)
