import asyncio
import copy
import json
import math
from collections import Counter
from pathlib import Path

import pytest

from lore_torchrl import configs
from lore_torchrl.advisors.base import Advice, AdviceRequest, Advisor
from lore_torchrl.advisors.errors import DeadlineError, Usage
from lore_torchrl.advisors.flawed import StaleAdvisor, TruncatedAdvisor, TurningAdvisor
from lore_torchrl.advisors.modes import ChatSettings, LogprobsMode
from lore_torchrl.advisors.prompt import PromptTemplate
from lore_torchrl.advisors.recorded import model_name
from lore_torchrl.advisors.scripted import ScriptedAdvisor

ROOT = Path(__file__).resolve().parents[2]
ACTIONS = ("a", "b", "c", "d")


def planner(request):
    """Best is the action that the key names, worst the one after it."""
    if request.cache_key not in ACTIONS:
        return None
    best = ACTIONS.index(request.cache_key)
    return [1.0 if i == best else -1.0 if i == (best + 1) % 4 else 0.0 for i in range(4)]


def questions(keys):
    return [AdviceRequest(f"at {key}", ACTIONS, key) for key in keys]


def ask(advisor, keys):
    return asyncio.run(advisor.advise(questions(keys)))


def said(advisor, keys):
    """Return the actions advised, as text; a dash for no answer."""
    return "".join(
        "-" if answer is None else ACTIONS[answer.logits.index(max(answer.logits))]
        for answer in ask(advisor, keys)
    )


class Costly:
    """A planner behind a price, an error at ``x``, and what a chat advisor shows."""

    cache_prefix = "model:"
    model = "some-model"

    def __init__(self):
        self.closed = 0

    async def advise(self, requests):
        return [self._answer(request.cache_key) for request in requests]

    def _answer(self, key):
        if key == "x":
            return DeadlineError("late")
        return Advice((0.0, 1.0), usage=Usage(prompt_tokens=len(key)), raw=key)

    async def aclose(self):
        self.closed += 1


# ---- stale ----


@pytest.mark.parametrize(("lag", "expected"), [(1, "aabcd"), (2, "ababc"), (9, "abcda")])
@pytest.mark.parametrize("batches", [["abcda"], ["ab", "c", "da"], list("abcda")])
def test_stale_answers_belong_to_the_question_lag_before(lag, expected, batches):
    advisor = StaleAdvisor(ScriptedAdvisor(planner), lag=lag)
    assert isinstance(advisor, Advisor)
    assert "".join(said(advisor, keys) for keys in batches) == expected


def test_stale_silence_is_late_too():
    assert said(StaleAdvisor(ScriptedAdvisor(planner)), "a?b") == "aa-"


def test_stale_errors_pass_and_do_not_count():
    late = ask(StaleAdvisor(Costly()), ["b", "x", "ccc"])
    assert late[0].raw == "b" and late[2].raw == "b"
    assert isinstance(late[1], DeadlineError)


def test_stale_answers_cost_what_was_asked_now():
    answers = ask(StaleAdvisor(Costly()), ["b", "ccc"])
    assert [one.usage.prompt_tokens for one in answers] == [1, 3]


# ---- truncated ----


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.8, 1.0])
def test_truncated_keeps_the_share_and_at_least_one(keep):
    even = ScriptedAdvisor(lambda request: [0.0] * 4, sharpness=1e-6)
    answers = ask(TruncatedAdvisor(even, keep=keep, seed=3), "a" * 3000)
    counts = Counter(sum(logit > math.log(2e-4) for logit in one.logits) for one in answers)
    for kept in range(5):
        share = math.comb(4, kept) * keep**kept * (1 - keep) ** (4 - kept)
        expected = 0.0 if kept == 0 else share + (kept == 1) * (1 - keep) ** 4
        assert counts[kept] / 3000 == pytest.approx(expected, abs=0.03)
    # Each action as often as any other, also where only one stays.
    for action in range(4):
        gone = sum(one.logits[action] < math.log(2e-4) for one in answers) / 3000
        assert gone == pytest.approx(1 - keep - (1 - keep) ** 4 / 4, abs=0.03)


def test_truncated_looks_as_a_chat_answer_with_a_short_list():
    logits = (1.0, 2.0, 0.5, -0.3)

    class Fixed:
        async def advise(self, requests):
            return [Advice(logits, raw="raw") for _ in requests]

    total = sum(map(math.exp, logits))
    seen = set()
    for answer in ask(TruncatedAdvisor(Fixed(), seed=1), "a" * 60):
        kept = [i for i, one in enumerate(answer.logits) if one > math.log(2e-4)]
        top = [{"token": "ABCD"[i], "logprob": logits[i] - math.log(total)} for i in kept]

        async def post(path, body, top=top):
            position = {**top[0], "top_logprobs": top}
            return {"choices": [{"message": {}, "logprobs": {"content": [position]}}]}

        mode = LogprobsMode(ChatSettings(model="m"), PromptTemplate("default", "logprobs"))
        chat = asyncio.run(mode.ask(post, questions("a")[0]))
        assert answer.logits == pytest.approx(chat.logits)
        assert answer.confidence == pytest.approx(chat.confidence)
        assert answer.raw == "raw"
        seen.add(tuple(kept))
    assert len(seen) > 8


def test_truncated_stands_enormous_logits():
    class Sure:
        async def advise(self, requests):
            return [Advice((1e4, -1e4, -1e4)) for _ in requests]

    answers = ask(TruncatedAdvisor(Sure()), "a" * 40)
    assert {one.confidence for one in answers} == {0.0, 1.0}
    for one in answers:
        assert sum(map(math.exp, one.logits)) == pytest.approx(1.0, abs=1e-3)


def test_truncated_passes_silence_and_errors():
    assert ask(TruncatedAdvisor(ScriptedAdvisor(planner)), "?") == [None]
    assert isinstance(ask(TruncatedAdvisor(Costly()), "x")[0], DeadlineError)


def test_truncation_and_scripted_errors_are_independent_at_one_seed():
    both = Counter()
    for seed in range(400):
        inner = ScriptedAdvisor(planner, competence=0.5, seed=seed)
        right = ask(copy.deepcopy(inner), "a")[0].logits[0] > 0
        cut = ask(TruncatedAdvisor(inner, seed=seed), "a")[0].logits[0] < math.log(2e-4)
        both[right, cut] += 1
    of_right = both[True, True] / (both[True, True] + both[True, False])
    of_wrong = both[False, True] / (both[False, True] + both[False, False])
    assert of_right == pytest.approx(of_wrong, abs=0.12)


# ---- turning ----


@pytest.mark.parametrize(
    ("turn_after", "expected"), [(None, "abcda"), (0, "bcdab"), (3, "abcab"), (9, "abcda")]
)
@pytest.mark.parametrize("batches", [["abcda"], ["ab", "cd", "a"], ["a", "bcda"]])
def test_turning_changes_sides_after_so_many(turn_after, expected, batches):
    good, bad = ScriptedAdvisor(planner), ScriptedAdvisor(planner, competence=-1.0)
    advisor = TurningAdvisor(good, bad, turn_after=turn_after)
    assert isinstance(advisor, Advisor)
    assert "".join(said(advisor, keys) for keys in batches) == expected


def test_turning_counts_questions_that_are_still_under_way():
    class Slow(ScriptedAdvisor):
        async def advise(self, requests):
            await asyncio.sleep(0)
            return await super().advise(requests)

    async def at_once():
        advisor = TurningAdvisor(
            Slow(planner), ScriptedAdvisor(planner, competence=-1.0), turn_after=2
        )
        return await asyncio.gather(*(advisor.advise(questions("a")) for _ in range(4)))

    answers = [batch[0].logits.index(3.0) for batch in asyncio.run(at_once())]
    assert answers == [0, 0, 1, 1]


# ---- all ----


def all_wrapped(inner, seed):
    return [
        StaleAdvisor(inner(seed), lag=2),
        TruncatedAdvisor(inner(seed), seed=seed),
        TurningAdvisor(inner(seed), inner(seed + 1), turn_after=7),
        StaleAdvisor(TruncatedAdvisor(TurningAdvisor(inner(seed), inner(seed), turn_after=7))),
    ]


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("asked", ["", "a?", "abcdabcd?a"])
def test_a_resumed_wrapper_continues_equal(index, asked):
    def inner(seed):
        return ScriptedAdvisor(planner, competence=0.3, seed=seed)

    first, again, other = (all_wrapped(inner, seed)[index] for seed in (5, 5, 9))
    assert ask(first, asked) == ask(again, asked)
    state = json.loads(json.dumps(first.state_dict()))
    later = "cb?ad" * 8
    expected = ask(first, later)
    ask(other, "dd")
    other.load_state_dict(state)
    assert ask(other, later) == expected


def test_a_state_without_the_wrapped_advisors_is_enough():
    for wrapped in all_wrapped(lambda seed: Costly(), 0):
        ask(wrapped, "ab")
        wrapped.load_state_dict(json.loads(json.dumps(wrapped.state_dict())))
        assert ask(wrapped, "a")[0].raw


def test_wrappers_show_what_they_wrap():
    for wrapped in all_wrapped(lambda seed: Costly(), 0):
        assert wrapped.model == "some-model" and model_name(wrapped) == "some-model"
        assert wrapped.cache_prefix.endswith("model:") and wrapped.cache_prefix != "model:"
        assert not hasattr(wrapped, "prompt_hash")
        asyncio.run(wrapped.aclose())
        assert copy.copy(wrapped).model == "some-model"
    prefixes = {wrapped.cache_prefix for wrapped in all_wrapped(lambda seed: Costly(), 0)}
    assert len(prefixes) == 4
    truncated = {TruncatedAdvisor(Costly(), seed=seed).cache_prefix for seed in (0, 1)}
    assert len(truncated) == 2


def test_turning_closes_both_and_shows_whose_turn_it_is():
    before, after = Costly(), Costly()
    after.model = "other-model"
    advisor = TurningAdvisor(before, after, turn_after=1)
    assert advisor.model == "some-model"
    ask(advisor, "a")
    assert advisor.model == "other-model"
    asyncio.run(advisor.aclose())
    assert (before.closed, after.closed) == (1, 1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda a: StaleAdvisor(a, lag=0), "lag=0 is impossible"),
        (lambda a: StaleAdvisor(a, lag=1.5), "lag=1.5 is impossible"),
        (lambda a: StaleAdvisor("planner"), "advisor='planner'"),
        (lambda a: TruncatedAdvisor(a, keep=-0.1), "keep=-0.1 is impossible"),
        (lambda a: TruncatedAdvisor(a, keep=float("nan")), "keep=nan is impossible"),
        (lambda a: TruncatedAdvisor(None), "advisor=None"),
        (lambda a: TurningAdvisor(a, a, turn_after=-1), "turn_after=-1 is impossible"),
        (lambda a: TurningAdvisor(a, "other"), "after='other'"),
        (lambda a: TurningAdvisor("other", a), "before='other'"),
    ],
)
def test_bad_settings_fail_with_the_value(build, message):
    with pytest.raises(ValueError, match=message):
        build(ScriptedAdvisor(planner))


# ---- configuration ----


def compose(*overrides):
    hydra = pytest.importorskip("hydra")
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    GlobalHydra.instance().clear()
    configs.register_configs()
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return OmegaConf.to_object(hydra.compose("advise", overrides=list(overrides)).advisor)


SCRIPTED = configs.ScriptedAdvisorConfig


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["advisor=adversarial"], SCRIPTED(competence=-1.0, confidence=1.0)),
        (["advisor=random"], SCRIPTED(competence=0.0, confidence=1.0)),
        (
            ["advisor=overconfident"],
            SCRIPTED(competence=0.25, sharpness=10.0, confidence=1.0),
        ),
        (["advisor=stale"], configs.StaleAdvisorConfig(lag=1, advisor=SCRIPTED())),
        (["advisor=truncated"], configs.TruncatedAdvisorConfig(keep=0.5, advisor=SCRIPTED())),
        (["advisor=turns"], configs.TurningAdvisorConfig(turn_after=None)),
        (
            ["advisor=turns", "advisor.turn_after=5", "advisor.after.competence=-0.5"],
            configs.TurningAdvisorConfig(turn_after=5, after=SCRIPTED(competence=-0.5)),
        ),
        (
            ["advisor=stale", "advisor.lag=3", "advisor@advisor.advisor=truncated"],
            configs.StaleAdvisorConfig(lag=3, advisor=configs.TruncatedAdvisorConfig()),
        ),
    ],
)
def test_each_choice_composes(overrides, expected):
    assert compose(*overrides) == expected


def test_a_stale_chat_advisor_composes():
    config = compose("advisor=stale", "advisor@advisor.advisor=vllm", "advisor.advisor.model=m")
    assert isinstance(config.advisor, configs.ChatAdvisorConfig) and config.advisor.model == "m"


def test_build_advisor_hands_planner_and_seed_to_nested_classes():
    pytest.importorskip("hydra")
    from lore_torchrl.dreamer.advice import build_advisor
    from lore_torchrl.envs.minigrid import MiniGridPlanner

    config = compose("advisor=stale", "advisor@advisor.advisor=truncated")
    first, again, other = (
        build_advisor(config, planner=MiniGridPlanner(), seed=seed) for seed in (3, 3, 4)
    )
    assert isinstance(first, StaleAdvisor) and isinstance(first.advisor, TruncatedAdvisor)
    assert isinstance(first.advisor.advisor.planner, MiniGridPlanner)
    for level in (lambda a: a.advisor, lambda a: a.advisor.advisor):
        states = [json.dumps(level(one).state_dict()["random"]) for one in (first, again, other)]
        assert states[0] == states[1] != states[2]
    turns = build_advisor(
        compose("advisor=turns", "advisor.turn_after=2"), planner=MiniGridPlanner(), seed=0
    )
    assert (turns.before.competence, turns.after.competence, turns.turn_after) == (1.0, -1.0, 2)
    scripted = build_advisor(compose("advisor=scripted"), planner=MiniGridPlanner(), seed=3)
    assert scripted.state_dict() == ScriptedAdvisor(planner, seed=3).state_dict()
