from __future__ import annotations

import json
import pickle
from functools import partial

import pytest
import torch
from advice_toy import (
    N_ACTIONS,
    Act,
    Corridor,
    Describe,
    Know,
    assert_aligned,
    make_env,
    make_service,
)
from tensordict import TensorDict
from torchrl.data import MultiCategorical, MultiOneHot
from torchrl.envs import (
    ParallelEnv,
    SerialEnv,
    TransformedEnv,
)
from torchrl.envs.utils import check_env_specs

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.advisors.errors import NotFiniteError
from lore_torchrl.service import AdviceService, AdviceStore, CallBudget, Cooldown
from lore_torchrl.transforms import AdviceTransform


@pytest.mark.parametrize("batched", [SerialEnv, partial(ParallelEnv, mp_start_method="fork")])
def test_specs_hold_on_batched_environments(batched):
    with make_service(calls_per_step=2) as service:
        env = make_env(service, batched=batched)
        try:
            check_env_specs(env)
            rollout = env.rollout(6, Act(), break_when_any_done=False)
        finally:
            env.close()
    assert_aligned(rollout), assert_aligned(rollout["next"])
    assert rollout["next", "llm_mask"].any()
    assert rollout["llm_prior_logits"].dtype == torch.float32
    assert rollout["llm_mask"].shape == (2, 6, 1) and rollout["llm_mask"].dtype == torch.bool


def test_an_environment_without_a_batch():
    with make_service() as service:
        env = TransformedEnv(Corridor(), AdviceTransform(service, Describe(), require_key=None))
        check_env_specs(env)
        rollout = env.rollout(3, Act())
    assert rollout["llm_prior_logits"].shape == (3, N_ACTIONS)
    assert rollout["llm_mask"].all()
    assert_aligned(rollout), assert_aligned(rollout["next"])


def test_a_batch_of_two_dimensions():
    with make_service(calls_per_step=4) as service:
        inner = [lambda n=n: Corridor(n, 3 + n) for n in range(4)]
        env = TransformedEnv(
            SerialEnv(2, [lambda: SerialEnv(2, inner[:2]), lambda: SerialEnv(2, inner[2:])]),
            AdviceTransform(service, Describe(), require_key=None),
        )
        check_env_specs(env)
        rollout = env.rollout(9, Act(), break_when_any_done=False)
    assert rollout["llm_mask"].shape == (2, 2, 9, 1) and rollout["llm_mask"].all()
    assert_aligned(rollout), assert_aligned(rollout["next"])


def test_text_and_one_hot_actions():
    class Read(Describe):
        in_keys = ("mission", "observation")

        def observe(self, row, observation, action, *, reset):
            self.diary.append((row, observation["mission"], action))

    for lengths in ((3,), (3, 3)):
        describer = Read()
        with make_service() as service:
            env = make_env(
                service,
                lengths=lengths,
                describer=describer,
                worker={"onehot": True, "text": True},
                require_key=None,
            )

            def act(td):
                action = torch.zeros(*td.batch_size, N_ACTIONS, dtype=torch.int64)
                action[..., 1] = 1
                return td.set("action", action)

            env.rollout(1, act)
        rows = range(len(lengths))
        assert describer.diary == [
            *((row, f"corridor {row} from 0", None) for row in rows),
            *((row, f"corridor {row} from 1", 1) for row in rows),
        ]


def test_text_of_an_environment_without_a_batch():
    class Read(Describe):
        in_keys = ("mission",)

        def observe(self, row, observation, action, *, reset):
            self.diary.append(observation["mission"])

        def cache_key(self, row, observation):
            return observation["mission"].split()[1]

    describer = Read()
    with make_service() as service:
        env = TransformedEnv(
            Corridor(3, text=True), AdviceTransform(service, describer, require_key=None)
        )
        env.rollout(2, Act())
    assert describer.diary == [f"corridor 3 from {position}" for position in range(3)]


def test_a_resumed_service_goes_on_alike():
    def fresh():
        return make_service(cooldown=Cooldown(5), total=6)

    with fresh() as service:
        env = make_env(service, lengths=(4, 30))
        env.rollout(4, Act(), break_when_any_done=False)
        state = json.loads(json.dumps(service.state_dict()))
        service.advisor.asked.clear()
        expected = env.rollout(9, Act(), break_when_any_done=False)
    with fresh() as resumed:
        resumed.load_state_dict(state)
        env = make_env(resumed, lengths=(4, 30))
        assert (env.rollout(9, Act(), break_when_any_done=False) == expected).all()
    assert resumed.advisor.asked == service.advisor.asked
    timed = {"latency_p50_s": 0.0, "latency_p95_s": 0.0}
    assert resumed.stats() | timed == service.stats() | timed


def test_a_clone_shares_the_service_and_no_rows():
    with make_service() as service:
        transform = AdviceTransform(service, Describe(), require_key=None)
        env = TransformedEnv(Corridor(), transform)
        env.reset()
        clone = transform.clone()
        assert clone.service is service and clone.parent is None
        assert not env.state_dict()
        assert TransformedEnv(Corridor(), clone).rollout(2, Act())["llm_mask"].all()
        assert env.step(Act()(env.reset()))["next", "llm_mask"].all()


def test_a_pickle_spends_from_the_same_ledger(tmp_path):
    budget = CallBudget(2, store=AdviceStore(tmp_path / "advice.sqlite"))
    with AdviceService(Know(), budget=budget) as service:
        transform = AdviceTransform(service, Describe(), require_key=None)
        copy = pickle.loads(pickle.dumps(transform))
    with copy.service:
        rollout = TransformedEnv(Corridor(), copy).rollout(3, Act())
    assert rollout["llm_mask"].flatten().tolist() == [True, True, False]
    assert budget.remaining == 0


class TwoActions(Describe):
    actions = ("left", "right")


class NoActions(Describe):
    actions = ()


class OtherKey(Describe):
    def request(self, row, observation):
        return AdviceRequest("Somewhere.", self.actions, "another key")


class OtherActions(Describe):
    def request(self, row, observation):
        return AdviceRequest("Somewhere.", ("left",), self.cache_key(row, observation))


class ReversedActions(Describe):
    def request(self, row, observation):
        return AdviceRequest("Somewhere.", self.actions[::-1], self.cache_key(row, observation))


class FailsAt(Describe):
    """Describes corridors 0 and 1, and fails at one observation of corridor 1."""

    def __init__(self, method):
        super().__init__()
        self.method = method

    def _fail(self, method, observation):
        if method == self.method and int(observation["observation"][0]) == 102:
            raise ValueError("cannot read 102")

    def observe(self, row, observation, action, *, reset):
        self._fail("observe", observation)
        super().observe(row, observation, action, reset=reset)

    def cache_key(self, row, observation):
        self._fail("cache_key", observation)
        return super().cache_key(row, observation)

    def abstract_state(self, row, observation):
        self._fail("abstract_state", observation)
        return self.cache_key(row, observation)

    def request(self, row, observation):
        self._fail("request", observation)
        return AdviceRequest("Somewhere.", self.actions, self.cache_key(row, observation))


@pytest.mark.parametrize("method", ["observe", "cache_key", "abstract_state", "request"])
def test_a_describer_that_fails_later_costs_the_advice_of_that_step(method):
    with make_service(calls_per_step=2) as service:
        env = make_env(service, describer=FailsAt(method), require_key=None, lengths=(9, 9))
        rollout = env.rollout(3, auto_reset=True)
        masks = torch.cat([rollout["llm_mask"], rollout["next", "llm_mask"][:, -1:]], 1)[..., 0]
        # What was not observed is missing from the memory for the rest of the episode.
        after = method != "observe"
        assert masks.tolist() == [[True] * 4, [True, True, False, after]]
        assert service.errors == {"describer": 1}
        assert service.budget.remaining == 994 - after


def test_a_row_that_was_not_observed_has_advice_again_after_its_reset():
    with make_service(calls_per_step=2) as service:
        env = make_env(service, describer=FailsAt("observe"), require_key=None, lengths=(9, 5))
        masks = env.rollout(8, auto_reset=True, break_when_any_done=False)["llm_mask"][1, :, 0]
        assert masks.tolist() == [True, True, False, False, False, True, True, False]


class Unable(Describe):
    def cache_key(self, row, observation):
        raise NotFiniteError("cannot read")


def test_a_describer_that_fails_at_once_ends_the_run_whatever_it_raises():
    with (
        make_service() as service,
        pytest.raises(RuntimeError, match=r"Unable failed.* cannot read"),
    ):
        make_env(service, describer=Unable(), require_key=None).reset()


class NoRequest(Describe):
    def request(self, row, observation):
        return None


class KeyOf(Describe):
    def __init__(self, key):
        super().__init__()
        self.key = key

    def cache_key(self, row, observation):
        return self.key


class NoSuchEntry(Describe):
    in_keys = ("image",)


def test_bad_input_is_named():
    service = make_service()
    with pytest.raises(TypeError, match="Know"):
        AdviceTransform(Know(), Describe())
    with pytest.raises(ValueError, match=r"actions=\(\)"):
        AdviceTransform(service, NoActions())
    with pytest.raises(ValueError, match=r"2 actions.* has 3"):
        make_env(service, describer=TwoActions()).reset()
    with pytest.raises(ValueError, match="another key"):
        make_env(service, describer=OtherKey(), require_key=None).reset()
    for describer in (OtherActions(), ReversedActions()):
        with pytest.raises(ValueError, match="read as about other actions"):
            make_env(service, describer=describer, require_key=None).reset()
    with pytest.raises(TypeError, match=r"NoRequest.request\(\) must return .*, got None"):
        make_env(service, describer=NoRequest(), require_key=None).reset()
    for key in (None, ("a", 1), 7):
        with pytest.raises(TypeError, match=r"cache_key\(\) must return a str, got"):
            make_env(service, describer=KeyOf(key)).reset()
    with pytest.raises(KeyError, match="image"):
        make_env(service, describer=NoSuchEntry()).reset()
    with pytest.raises(RuntimeError, match="worker"):
        make = lambda: TransformedEnv(Corridor(), AdviceTransform(service, Describe()))  # noqa: E731
        SerialEnv(2, make).reset()
    with pytest.raises(NotImplementedError, match="replay buffer"):
        AdviceTransform(service, Describe())(TensorDict({"observation": torch.zeros(1)}))
    service.close()


def test_a_single_key_may_be_a_plain_string():
    class OneKey(Describe):
        in_keys = "observation"

    with make_service() as service:
        env = make_env(service, describer=OneKey(), require_key=None, lengths=(9,))
        assert env.transform.in_keys == ["observation"]
        assert env.rollout(3, Act())["llm_mask"].all()


@pytest.mark.parametrize("spec", [MultiOneHot([2, 1]), MultiCategorical([2, 1])])
def test_several_choices_at_once_are_named(spec):
    env = Corridor()
    env.action_spec = spec
    with make_service() as service, pytest.raises(ValueError, match="several choices at once"):
        TransformedEnv(env, AdviceTransform(service, Describe())).reset()


def test_an_action_that_is_no_index_is_named():
    env = make_env(make_service())
    td = env.reset()
    td["action"] = torch.rand(2, 2)
    with pytest.raises(ValueError, match="2 numbers of float32"):
        env.transform._step(td, td.set("reward", torch.zeros(2, 1)))
