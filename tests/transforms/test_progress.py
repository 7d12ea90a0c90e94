from __future__ import annotations

import itertools
import random

import pytest
import torch
from chain import LEFT, RIGHT, STATES, STAY, ChainDescriber, chain_env, play, progress_set
from torchrl.envs import check_env_specs

from lore_torchrl import keys
from lore_torchrl.transforms import ProgramFeatures, ProgressShaping

pytest.importorskip("pydantic_monty")

GAMMA = 0.9
# A program that rewards standing still, one of noise, one that leads to the pit, an honest one.
ADVERSARIES = {
    "still": "return 1.0 if n == 2 else 0.0",
    "noise": "return (n * 7919 % 13) / 13",
    "pit": "return 1.0 - n / 6",
    "constant": "return 0.7",
    "honest": "return n / 5",
}


def shaping(body: str, **settings) -> ProgressShaping:
    about = {"gamma": GAMMA, "episode_budget": 100.0} | settings
    return ProgressShaping(progress_set(body), ChainDescriber(), **about)


def shaped_by(steps) -> torch.Tensor:
    return (steps["next", "reward"] - steps["next", keys.RAW_REWARD]).squeeze(-1)


def test_each_step_is_paid_the_discounted_change_of_the_potential():
    steps, _ = play(chain_env(shaping("return n / 5"), rows=2), RIGHT, STAY, RIGHT, LEFT)
    phi = torch.tensor([1, 2, 2, 3, 2]) / 5
    expected = (GAMMA * phi[1:] - phi[:-1]).expand(2, 4)
    torch.testing.assert_close(shaped_by(steps), expected)
    assert steps["next", keys.RAW_REWARD].abs().sum() == 0
    assert keys.raw_reward(steps["next"]) is steps["next", keys.RAW_REWARD]


def test_the_potential_is_zero_where_an_episode_terminates_and_stays_where_it_is_cut():
    env = chain_env(shaping("return n / 5"), max_steps=3)
    ended, _ = play(env, LEFT)
    assert ended["next", "terminated"].all()
    torch.testing.assert_close(shaped_by(ended)[0, -1], torch.tensor(-0.2))
    won, _ = play(chain_env(shaping("return n / 5")), *[RIGHT] * 4)
    assert won["next", keys.RAW_REWARD][0, -1] == 1
    torch.testing.assert_close(won["next", "reward"][0, -1, 0], torch.tensor(1 - 0.8))
    cut, _ = play(env, RIGHT, RIGHT, STAY)
    assert cut["next", "truncated"][0, -1] and not cut["next", "terminated"][0, -1]
    torch.testing.assert_close(shaped_by(cut)[0, -1], torch.tensor(GAMMA * 0.6 - 0.6))


@pytest.mark.parametrize("budget", [0.1, 0.5, 1.3, 4.0, 1e3])
@pytest.mark.parametrize("body", [*ADVERSARIES.values(), "return 0.9 if n != 2 else 1 / 0"])
def test_the_discounted_shaping_of_an_episode_telescopes(body, budget):
    actions = [RIGHT, STAY, LEFT, RIGHT, RIGHT, LEFT, RIGHT, RIGHT, RIGHT]
    env = chain_env(shaping(body, episode_budget=budget), max_steps=20)
    steps, _ = play(env, *actions)
    assert steps["next", "terminated"][0, -1]
    start = shaping(body).programs.sandbox
    phi = start.run(progress_set(body).used[0].program, {"n": 1})
    total = (shaped_by(steps)[0] * GAMMA ** torch.arange(len(actions))).sum()
    expected = torch.tensor(-min(phi, budget)).float()
    torch.testing.assert_close(total, expected, atol=1e-6, rtol=0)


def transitions(body: str | None):
    """Reward, next state and end of every state and action, as the environment gives them."""
    found = {}
    env = chain_env(*([] if body is None else [shaping(body)]), max_steps=50)
    for state, action in itertools.product(range(1, STATES - 1), range(3)):
        steps, _ = play(env, *[RIGHT] * (state - 1), action)
        last = steps[0, -1]["next"]
        found[state, action] = tuple(
            last[key].item() for key in ("reward", "observation", "terminated")
        )
    return found


def best_actions(table) -> dict[int, set[int]]:
    values = dict.fromkeys(range(STATES), 0.0)
    for _ in range(300):
        scores = {
            pair: reward + (0.0 if ended else GAMMA * values[following])
            for pair, (reward, following, ended) in table.items()
        }
        for state in range(1, STATES - 1):
            values[state] = max(scores[state, action] for action in range(3))
    return {s: {a for a in range(3) if scores[s, a] > values[s] - 1e-5} for s in range(1, 5)}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_optimal_policies_are_those_of_the_raw_reward(name):
    raw = best_actions(transitions(None))
    assert raw == {state: {RIGHT} for state in range(1, 5)}
    assert best_actions(transitions(ADVERSARIES[name])) == raw


@pytest.mark.parametrize("name", ADVERSARIES)
@pytest.mark.parametrize("budget", [0.3, 2.5])
def test_no_episode_is_paid_more_than_its_budget_and_no_cycle_gains(name, budget):
    stream = random.Random(name)
    transform = shaping(ADVERSARIES[name], episode_budget=budget, gamma=1.0)
    env = chain_env(transform, max_steps=20)
    for _ in range(3):
        actions = [stream.choice((LEFT, STAY, RIGHT, RIGHT)) for _ in range(20)]
        steps, _ = play(env, *actions)
        first = int(steps["next", "done"][0, :, 0].float().argmax())
        paid = shaped_by(steps)[0, : first + 1]
        assert paid.abs().sum() <= budget + 1e-6
        # Never more than from the least potential to the largest; at a terminal state nothing
        # is left of it.
        assert paid.cumsum(0).max() <= 1.0
        if steps["next", "terminated"][0, first]:
            assert paid.sum() <= 1e-6


def test_a_constant_potential_never_gains():
    steps, _ = play(chain_env(shaping("return 0.7")), *[STAY] * 8)
    assert (shaped_by(steps) <= 0).all()
    still, _ = play(chain_env(shaping("return 0.7", gamma=1.0)), *[STAY] * 7)
    assert shaped_by(still).abs().sum() == 0


def test_where_the_program_fails_its_potential_is_zero():
    env = chain_env(shaping("return n / 5 if n != 2 else 1 / 0", gamma=1.0))
    steps, _ = play(env, RIGHT, RIGHT, RIGHT)
    torch.testing.assert_close(shaped_by(steps)[0], torch.tensor([-0.2, 0.6, 0.2]))


def test_rows_have_their_own_episodes():
    transform = shaping("return n / 5", gamma=1.0)
    env = chain_env(transform, rows=2)
    td = env.reset()
    paid = []
    for actions in ([LEFT, RIGHT], [RIGHT, RIGHT], [RIGHT, LEFT]):
        td["action"] = torch.tensor(actions)
        stepped, td = env.step_and_maybe_reset(td)
        paid.append(shaped_by(stepped))
    expected = torch.tensor([[-0.2, 0.2, 0.2], [0.2, 0.2, -0.2]])
    torch.testing.assert_close(torch.stack(paid, 1), expected)
    assert transform.episodes == 1
    assert transform.stats()["shaping_paid"] == pytest.approx(0.2)


@pytest.mark.parametrize(("score", "weight"), [(None, 1.0), (0.5, 0.5), (-0.5, 0.0)])
def test_the_score_weighs_the_potential(score, weight):
    transform = shaping("return n / 5", gamma=1.0)
    transform.programs.used[0].score = score
    steps, _ = play(chain_env(transform), RIGHT, RIGHT)
    torch.testing.assert_close(shaped_by(steps).flatten(), torch.full((2,), 0.2 * weight))


def test_a_potential_that_falls_as_returns_rise_stops_shaping():
    transform = shaping("return (5 - n) / 5")
    env = chain_env(transform)
    for episode in range(16):
        steps, _ = play(env, *([RIGHT] * 4 if episode % 2 else [RIGHT, LEFT, LEFT]))
    assert transform.programs.used[0].score < 0.0
    steps, _ = play(env, RIGHT, RIGHT)
    assert shaped_by(steps).abs().sum() == 0


def test_bandit_and_score_read_the_raw_reward():
    transform = shaping("return n / 5")
    seen = []
    transform.programs.observe = lambda used, block, value: seen.append(value)
    env = chain_env(transform)
    play(env, *[RIGHT] * 4, *[LEFT])
    assert seen == [1.0, 0.0]


def test_an_episode_with_a_reward_that_is_no_number_tells_nothing():
    transform = shaping("return n / 5")
    play(chain_env(transform), RIGHT)
    transform._rewards[0] = [float("nan")]
    transform.programs.observe = lambda *told: pytest.fail(f"told {told}")
    transform._end(0)
    assert transform.programs.used[0].episodes == 0


def test_specs_hold_with_features_before_it():
    features = ProgramFeatures(features_set(), ChainDescriber())
    env = chain_env(features, shaping("return n / 5"), rows=2)
    check_env_specs(env)
    assert env.reward_key == "reward"


def features_set():
    from lore_torchrl.sandbox import Program, ProgramSet

    return ProgramSet(
        [Program("features", "def compute_features(obs):\n    return {'n': obs['n'] / 5}")]
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ProgressShaping(features_set(), ChainDescriber()), "programs of progress"),
        (lambda: ProgressShaping(progress_set("return 0.0"), object()), "program_view"),
    ],
)
def test_bad_settings_fail_at_once(build, message):
    with pytest.raises(ValueError, match=message):
        build()
