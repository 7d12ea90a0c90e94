from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest

from lore_torchrl import configs

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: configs.EnvConfig(num_envs=0), "env.num_envs=0"),
        (lambda: configs.EnvConfig(num_envs=1001), "env.num_envs=1001"),
        (lambda: configs.EvaluationConfig(episodes=1001), "evaluation.episodes=1001"),
        (lambda: configs.EnvConfig(max_steps=0), "env.max_steps=0"),
        (lambda: configs.ScriptedAdvisorConfig(competence=2), "competence=2"),
        (lambda: configs.ScriptedAdvisorConfig(sharpness=0), "sharpness=0"),
        (lambda: configs.ScriptedAdvisorConfig(confidence=1.5), "confidence=1.5"),
        (lambda: configs.StaleAdvisorConfig(lag=0), "lag=0"),
        (lambda: configs.TruncatedAdvisorConfig(keep=1.5), "keep=1.5"),
        (lambda: configs.TurningAdvisorConfig(turn_after=-1), "turn_after=-1"),
        (lambda: configs.RecordedAdvisorConfig(missing="ask"), "missing='ask'"),
        (lambda: configs.LocalAdvisorConfig(max_tokens=1), "max_tokens=1"),
        (lambda: configs.LocalAdvisorConfig(max_sequences=0), "max_sequences=0"),
        (lambda: configs.ChatAdvisorConfig(mode="guess"), "mode='guess'"),
        (
            lambda: configs.ChatAdvisorConfig(mode="decisions"),
            "mode='decisions' is impossible: choose",
        ),
        (lambda: configs.ChatAdvisorConfig(server="gemini"), "server='gemini'"),
        (lambda: configs.ChatAdvisorConfig(votes=0), "votes=0"),
        (lambda: configs.ChatAdvisorConfig(deadline_s=0), "deadline_s=0"),
        (lambda: configs.CallsConfig(budget=-1), "budget=-1"),
        (lambda: configs.CallsConfig(calls_per_step=0), "calls_per_step=0"),
        (lambda: configs.CallsConfig(min_beta=1.5), "min_beta=1.5"),
        (lambda: configs.CallsConfig(cooldown=-1), "cooldown=-1"),
        (lambda: configs.CallsConfig(no_reward_steps=0), "no_reward_steps=0"),
        (lambda: configs.CallsConfig(timeout_s=0), "timeout_s=0"),
        (lambda: configs.CallsConfig(timeout_s=float("inf")), "timeout_s=inf"),
        (lambda: configs.CallsConfig(mode="eager"), "mode='eager'"),
        (lambda: configs.CallsConfig(max_in_flight=0), "max_in_flight=0"),
        (lambda: configs.CallsConfig(drain_s=-1), "drain_s=-1"),
        (lambda: configs.CallsConfig(max_cost=0), "max_cost=0"),
        (lambda: configs.CallsConfig(ttl_steps=0), "ttl_steps=0"),
        (lambda: configs.CallsConfig(answers_averaged=0), "answers_averaged=0"),
        (lambda: configs.CallsConfig(abstract_states=False), "answers_averaged=null"),
        (lambda: configs.PriorNetConfig(threshold=1.5), "threshold=1.5"),
        (lambda: configs.BanditConfig(segment_steps=0), "segment_steps=0"),
        (lambda: configs.SamplingConfig(kind="best"), "kind='best'"),
        (lambda: configs.SamplingConfig(temperature=0), "temperature=0"),
        (lambda: configs.SamplingConfig(ratio=0), "ratio=0"),
        (lambda: configs.FeaturesConfig(columns=0), "columns=0"),
        (lambda: configs.MixerConfig(value_temperature=0), "value_temperature=0"),
        (lambda: configs.DisagreementConfig(num_members=1), "num_members=1"),
        (lambda: configs.ValueEnsembleConfig(num_members=1), "num_members=1"),
        (lambda: configs.CallsConfig(always=False, novelty=1.0), "novelty=1.0"),
        (lambda: configs.CallsConfig(novelty=0.5), "always=false"),
        (
            lambda: configs.CallsConfig(always=False, after_reset=False, no_reward_steps=None),
            "without a trigger",
        ),
        (lambda: configs.CallsConfig(always=False, td_spike=0.5), "td_spike_low=1.0"),
        (lambda: configs.GateConfig(beta_max=-1), "beta_max=-1"),
        (lambda: configs.GateConfig(hysteresis=[0.5]), "hysteresis"),
        (lambda: configs.FeaturesConfig(columns=0), "features.columns=0"),
        (lambda: configs.FeaturesConfig(off_share=1.0), "features.off_share=1.0"),
        (lambda: configs.ProgressConfig(episode_budget=0), "progress.episode_budget=0"),
        (lambda: configs.ProgressConfig(time_limit_s=0), "progress.time_limit_s=0"),
        (lambda: configs.EpsilonConfig(eps_init=0.1, eps_end=0.2), "epsilon.eps_end=0.2"),
        (lambda: configs.DreamerConfig(belief_dim=100), "belief_dim=100"),
        (lambda: configs.DreamerConfig(batch_size=0), "batch_size=0"),
        (lambda: configs.DreamerConfig(lr=0), "lr=0"),
        (lambda: configs.DreamerConfig(replay_ratio=-1), "replay_ratio=-1"),
        (lambda: configs.LoggerConfig(backends=["paper"]), "backends"),
        (lambda: configs.LoggerConfig(mode="loud"), "mode"),
        (lambda: configs.LoggerConfig(interval=0), "interval=0"),
        (lambda: configs.EvaluationConfig(episodes=0), "episodes=0"),
        (lambda: configs.TrainConfig(total_steps=0), "total_steps=0"),
        (lambda: configs.TrainConfig(steps_per_batch=33), "steps_per_batch=33"),
        (lambda: configs.TrainConfig(checkpoint_interval=0), "checkpoint_interval=0"),
        (lambda: configs.TrainConfig(num_threads=0), "num_threads=0"),
        (
            lambda: configs.TrainConfig(advisor=configs.ChatAdvisorConfig(deadline_s=30)),
            "lore.calls.timeout_s=30.0 is impossible: advisor.deadline_s=30 must lie below it",
        ),
        (
            lambda: configs.TrainConfig(
                advisor=configs.StaleAdvisorConfig(advisor=configs.ChatAdvisorConfig(deadline_s=30))
            ),
            "advisor.deadline_s=30 must lie below it",
        ),
        (lambda: configs.DreamerConfig(actor_layers=0), "actor_layers=0"),
        (lambda: configs.DreamerConfig(seq_len=1), "seq_len=1"),
        (lambda: configs.TrainConfig(seed=-1), "seed=-1"),
        (lambda: configs.TrainConfig(seed=1_000_000), "seed=1000000"),
        (lambda: configs.DreamerConfig(replay_ratio=float("inf")), "replay_ratio=inf"),
        (lambda: configs.CallsConfig(budget="5"), "budget='5' is impossible: it must be int"),
        (lambda: configs.CallsConfig(budget=5.5), "budget=5.5"),
        (lambda: configs.CallsConfig(budget=True), "budget=True"),
        (lambda: configs.CallsConfig(max_tokens="9"), "it must be int or null"),
        (lambda: configs.GateConfig(tau=None), "it must be float"),
        (lambda: configs.LoReConfig(calls={"budget": 5}), "it must be CallsConfig"),
        (
            lambda: configs.TrainConfig(dreamer=configs.DreamerConfig(buffer_size=40)),
            "buffer_size=40",
        ),
    ],
)
def test_impossible_values_say_what_is_wrong(build, message):
    with pytest.raises(ValueError, match="impossible") as error:
        build()
    assert message in str(error.value)


def test_a_tuple_of_choices_is_taken_as_a_list_is():
    for several in (["plan", "subgoal"], ("plan", "subgoal")):
        assert configs.ChatAdvisorConfig(model="m", ask_for=several).ask_for == several
        with pytest.raises(ValueError, match="choose from"):
            configs.ChatAdvisorConfig(model="m", ask_for=type(several)([*several, "car"]))


@cache
def compose(*overrides: str):
    """Compose a run, each once: no test may change what comes back."""
    hydra = pytest.importorskip("hydra")
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    configs.register_configs()
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return hydra.compose("config", overrides=[*overrides, "output_dir=x"])


def with_file(name: str, *overrides: str):
    """Merge a file, ``GROUP/NAME``, into a composed run, as Hydra does in more time."""
    from omegaconf import OmegaConf

    path = ROOT / "configs" / f"{name}.yaml"
    own = OmegaConf.load(path)
    assert path.read_text().startswith("# @package _global_\n") and "defaults" not in own
    return OmegaConf.merge(compose(*overrides), own)


def compose_study(*overrides: str) -> configs.StudyConfig:
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    GlobalHydra.instance().clear()
    configs.register_configs()
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return OmegaConf.to_object(hydra.compose("study", overrides=[*overrides, "output=x"]))


def experiments() -> list[str]:
    return sorted(path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_composes(name):
    from omegaconf import OmegaConf

    assert isinstance(OmegaConf.to_object(compose(f"experiment={name}")), configs.TrainConfig)


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (ROOT / "configs" / "study").glob("*.yaml"))
)
def test_every_run_of_every_study_composes(name):
    study = compose_study(f"study={name}")
    assert study.name == name and study.baseline in study.methods
    first, *others = study.experiments
    # Methods that differ in a number alone compose alike; each ablation has a test of its own.
    kinds = {re.sub(r"\d+", "0", " ".join(words)): words for words in study.methods.values()}
    for kind, words in kinds.items():
        if not kind.startswith("ablation="):
            compose(f"experiment={first}", *words)
    for experiment in others:
        compose(f"experiment={experiment}", *study.methods[study.baseline])


def test_a_study_has_the_last_word_over_the_root():
    assert compose_study().experiments == ["doorkey5x5"]
    regret = compose_study("study=regret")
    assert regret.experiments == ["empty5x5", "empty_random5x5"] and regret.seeds == 10
    assert compose_study("study=regret", "experiments=[doorkey5x5]").experiments == ["doorkey5x5"]


def test_the_large_model_has_the_size_that_its_file_names():
    from lore_torchrl.dreamer.agent import build_agent

    dreamer = compose("experiment=crafter_gpu").dreamer
    agent = build_agent(dreamer, frame_shape=(3, 64, 64), num_actions=17, device="meta")
    parts = (agent.world_model, agent.actor, agent.value)
    count = sum(p.numel() for part in parts for p in part.parameters())
    said = (ROOT / "configs" / "dreamer" / "size200m.yaml").read_text()
    assert f"({round(count / 1e6)} million parameters here" in said


@pytest.mark.parametrize("group", ["experiment", "method", "channel", "ablation", "sweep"])
def test_an_unknown_file_is_refused(group):
    from hydra.errors import MissingConfigException

    with pytest.raises(MissingConfigException, match="nosuch"):
        compose(f"{group}=nosuch")


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        (["channel=plan"], "plan"),
        (["channel=plan", "advisor.plan_length=16"], None),
        (["channel=subgoal"], "subgoal"),
        (["channel=subgoal", "advisor.subgoals=true"], None),
        (["channel=action_mask"], "valid_actions"),
        (["channel=action_mask", "advisor.valid_actions=true"], None),
        (["channel=action_mask", "advisor=vllm", "advisor.ask_for=[plan]"], "valid_actions"),
        (["channel=action_mask", "advisor=vllm", "advisor.ask_for=[valid_actions]"], None),
        (["channel=plan", "experiment=doorkey8x8_llm"], None),
        (["channel=subgoal", "experiment=multiroom_n4_llm"], "subgoal"),
        (["channel=plan", "advisor=random", "advisor.plan_length=16"], "plan"),
        (["channel=plan", "advisor=adversarial", "advisor.plan_length=16"], None),
        (["channel=subgoal", "advisor=random", "advisor.subgoals=true"], "subgoal"),
        (["channel=subgoal", "advisor=adversarial", "advisor.subgoals=true"], "subgoal"),
        (["channel=action_mask", "experiment=doorkey8x8_llm"], "valid_actions"),
        ([], None),
    ],
)
def test_a_channel_that_gets_nothing_is_told_of(words, idle):
    from omegaconf import OmegaConf

    from lore_torchrl.dreamer.acting import idle_channels

    found = idle_channels(OmegaConf.to_object(compose(*words)))
    assert [f"gives no {idle}," in line for line in found] == ([True] if idle else [])


@pytest.mark.parametrize("never", ["lore.gate.beta_max=0", "lore.calls.budget=0"])
def test_a_channel_whose_advisor_is_never_asked_is_told_of(never):
    from omegaconf import OmegaConf

    from lore_torchrl.dreamer.acting import idle_channels

    words = ["channel=subgoal", "advisor.subgoals=true", never]
    (line,) = idle_channels(OmegaConf.to_object(compose(*words)))
    assert line.startswith("No call will be made") and "channel of subgoal" in line
    if "budget" not in never:
        assert not idle_channels(OmegaConf.to_object(compose(*words, "lore.calls.min_beta=0")))


def test_an_idle_channel_is_told_the_setting_of_a_wrapped_advisor():
    from omegaconf import OmegaConf

    from lore_torchrl.dreamer.acting import idle_channels

    for advisor, path in (("stale", "advisor.advisor"), ("turns", "advisor.before")):
        words = [f"advisor={advisor}", "channel=plan"]
        (line,) = idle_channels(OmegaConf.to_object(compose(*words)))
        assert f"it takes {path}.plan_length=16, {path}.competence other than 0" in line
        assert not idle_channels(OmegaConf.to_object(compose(*words, f"{path}.plan_length=16")))


@pytest.mark.parametrize("name", ["channel/planner", "ablation/no_imitation"])
def test_a_merged_file_is_what_hydra_composes(name):
    words = "experiment=doorkey5x5", "method=lore"
    assert with_file(name, *words) == compose(*words, name.replace("/", "="))


@pytest.mark.parametrize("name", ["features", "progress"])
def test_a_channel_switches_its_programs_on_and_nothing_else(name):
    before = settings("experiment=doorkey5x5")
    after = settings("experiment=doorkey5x5", file=f"channel/{name}")
    changed = {path: after[path] for path in after if after[path] != before[path]}
    assert changed == {f"{name}.enabled": True}


def ablations() -> list[str]:
    return sorted(path.stem for path in (ROOT / "configs" / "ablation").glob("*.yaml"))


# What each ablation changes: the first are on by default, the others off.
PARTS = {
    "no_bandit": {"bandit.enabled": False},
    "no_imitation": {"loss.imitation_weight": 0.0},
    "no_gate": {"gate.kappa": 1000.0, "gate.tau": -1.0},
    "no_projection": {"mixer.max_kl": float("inf")},
    "no_averaging": {"calls.abstract_states": False, "calls.answers_averaged": None},
    "no_noop_filter": {"calls.noop_filter": False},
    "prior_net": {"prior_net.enabled": True},
    "prior": {"loss.prior_weight": 1.0},
    "constraint": {"loss.multiplier_lr": 0.001},
    "disagreement": {"gate.disagreement_weight": 0.3},
    "value_variance": {"gate.entropy_weight": 0.7, "gate.value_weight": 0.3},
    "value_ensemble": {
        "gate.entropy_weight": 0.7,
        "gate.value_weight": 0.3,
        "gate.value_source": "ensemble",
    },
    "temperature": {"temperature.rate": 0.01},
    "tightening": {
        "loss.multiplier_lr": 0.001,
        "loss.delta": 1.0,
        "loss.delta_end": 0.1,
        "loss.delta_steps": 1000,
    },
    "distillation": {
        "loss.multiplier_init": 0.3,
        "loss.multiplier_max": 0.3,
        "loss.delta": 0.0,
    },
    "bonus": {"loss.bonus_weight": 0.1},
    "imagination": {"prior_net.enabled": True, "loss.beta_imagine_max": 0.25},
    "hysteresis": {"gate.hysteresis": [0.4, 0.6]},
    "warmup": {"gate.warmup_steps": 250},
    "dropout": {"gate.dropout": 0.05},
    "probability": {"mixer.mode": "probability"},
    "triggers": {"calls.always": False, "calls.novelty": 0.5, "calls.td_spike": 3.0},
    "cooldown": {"calls.cooldown": 40, "calls.cooldown_after_success": 100},
    "expiry": {"calls.ttl_steps": 1000},
    "epsilon": {"epsilon.eps_init": 0.3},
}


def settings(*words: str, file: str | None = None) -> dict[str, object]:
    """Every setting of ``lore`` by its path."""
    from omegaconf import OmegaConf

    lore = OmegaConf.to_container((with_file(file, *words) if file else compose(*words)).lore)
    return {
        f"{group}.{name}": value
        for group, part in lore.items()
        if isinstance(part, dict)
        for name, value in part.items()
    }


@pytest.mark.parametrize("name", PARTS)
def test_every_ablation_changes_what_it_is_named_for_and_nothing_else(name):
    before = settings("experiment=doorkey5x5")
    after = settings("experiment=doorkey5x5", file=f"ablation/{name}")
    assert {path: after[path] for path in after if after[path] != before[path]} == PARTS[name]


# What each method changes of LoRe's settings.
OPEN = {
    "gate.kappa": 1000.0,
    "gate.tau": -1.0,
    "bandit.enabled": False,
    "loss.imitation_weight": 0.0,
    "loss.gated": False,
}
METHODS = {
    "lore": {},
    "stock_imitation": {"calls.budget": 0, "gate.beta_max": 0.0, "bandit.enabled": False},
    "first_lore": {**OPEN, "mixer.max_kl": float("inf"), "loss.prior_weight": 1.0},
    "advice_alone": {**OPEN, "mixer.max_kl": float("inf")},
    "cloning": {
        **OPEN,
        "mixer.max_kl": float("inf"),
        "mixer.mode": "probability",
        "loss.prior_weight": 1.0,
        "loss.actor_weight": 0.0,
    },
    "dagger": {
        **OPEN,
        "mixer.max_kl": 0.0,
        "loss.prior_weight": 1.0,
        "loss.actor_weight": 0.0,
    },
    "kickstarting": {
        **OPEN,
        "mixer.max_kl": 0.0,
        "loss.prior_weight": 1.0,
        "loss.prior_steps": 1250,
    },
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_differs_from_lore_in_what_it_is_named_for(name):
    before = settings("experiment=doorkey8x8_llm")
    after = settings("experiment=doorkey8x8_llm", f"method={name}")
    assert {path: after[path] for path in after if after[path] != before[path]} == METHODS[name]


def test_a_gate_that_is_held_open_raises_no_alarm():
    never = [name for name in METHODS if compose(f"method={name}").health.beta_share is None]
    opened = [name for name, changed in METHODS.items() if "gate.kappa" in changed]
    assert opened and never == opened
    assert compose("ablation=no_gate").health.beta_share is None


def test_every_method_stands_in_the_headline():
    files = {path.stem for path in (ROOT / "configs" / "method").glob("*.yaml")}
    assert files == {*METHODS, "stock", "open_gate"}
    headline = compose_study("study=headline").methods.values()
    assert sorted(headline) == sorted([f"method={name}"] for name in {*METHODS, "stock"})
    assert not compose("method=stock").lore.enabled
    alone = compose("method=advice_alone")
    assert alone.dreamer.replay_ratio == 0.0 and alone.evaluation.actor == "mixture"


@pytest.mark.parametrize("name", [path.stem for path in (ROOT / "configs/channel").glob("*")])
@pytest.mark.parametrize("method", ["lore", "stock_imitation", "stock"])
def test_every_channel_goes_with_every_method_that_it_can_change(name, method):
    from omegaconf import OmegaConf

    before = settings(f"method={method}")
    after = settings(f"method={method}", file=f"channel/{name}")
    assert 0 < sum(after[path] != before[path] for path in after) <= 3
    goes = name != "planner" if method == "stock_imitation" else method == "lore"
    if goes or name.endswith("sampling"):
        OmegaConf.to_object(with_file(f"channel/{name}", f"method={method}"))


@pytest.mark.parametrize("name", ["features", "progress", "subgoal"])
def test_a_channel_without_lore_is_refused(name):
    from omegaconf import OmegaConf

    config = with_file(f"channel/{name}", "method=stock")
    with pytest.raises(ValueError, match=r"no channel works: use method=stock_imitation"):
        OmegaConf.to_object(config)


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["method=stock", "channel=plan"], "lore.calls.plan_horizon"),
        (["method=stock", "channel=action_mask"], "lore.mixer.action_mask"),
        (["method=stock", "channel=value_gate"], "lore.mixer.value_temperature"),
        (["method=stock", "channel=planner"], "lore.planner.enabled"),
        (["method=stock_imitation", "channel=planner"], "lore.planner.enabled"),
        (["method=dagger", "channel=planner"], "lore.planner.enabled"),
    ],
)
def test_a_channel_that_could_do_nothing_is_refused(words, setting):
    from omegaconf import OmegaConf

    with pytest.raises(ValueError, match=setting):
        OmegaConf.to_object(compose(*words))


@pytest.mark.parametrize("study", ["headline", "frontier"])
def test_studies_of_recorded_answers_name_recordings_that_exist(study):
    chosen = compose_study(f"study={study}")
    for name in chosen.experiments:
        advisor = compose(f"experiment={name}").advisor
        assert name == "babyai" or (ROOT / advisor.path).is_file()


def test_the_study_that_a_reader_writes_composes(tmp_path):
    block = re.search(
        r"```yaml\n(# @package _global_\nname: mine.*?)```",
        (ROOT / "docs" / "studies.md").read_text(),
        re.DOTALL,
    )
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "mine.yaml").write_text(block[1])
    study = compose_study("study=mine", f"hydra.searchpath=[file://{tmp_path}]")
    assert study.name == "mine" and len(study.methods) == 3 and study.seeds == 2


def test_every_ablation_has_its_place_in_a_study():
    assert set(ablations()) == set(PARTS)
    methods = compose_study("study=parts").methods
    expected = [[f"ablation={name}"] for name in PARTS]
    in_its_place = ["ablation=[no_imitation,prior,constraint]"]
    assert sorted(methods.values()) == sorted([[], in_its_place, *expected])
    assert methods["LoRe"] == []
    # What imitation gains without any advice stands beside stock.
    for study in ("method", "competence", "regret"):
        methods = compose_study(f"study={study}").methods
        assert methods["stock"] == ["method=stock"]
        assert methods["stock + imitation"] == ["method=stock_imitation"]


def test_the_benchmark_measures_every_part_that_is_off_by_default():
    sys.path.append(str(ROOT / "benchmarks"))
    from bench_overhead import VARIANTS

    most = VARIANTS["everything"]
    for name in ("prior_weight", "bonus_weight", "multiplier_lr"):
        assert getattr(most.loss, name) > 0, name
    assert most.loss.imitation_weight > 0 and most.loss.beta_imagine_max > 0
    assert most.gate.disagreement_weight > 0
    assert most.gate.value_source == "ensemble" and most.temperature.rate > 0
    assert all(part.enabled for part in (most.prior_net, most.bandit))
    for name, field_name in (("distillation", "multiplier_init"), ("bonus", "bonus_weight")):
        assert getattr(VARIANTS[name].loss, field_name) > 0
        assert not VARIANTS[name].prior_net.enabled


def test_every_choice_of_every_group_composes():
    groups = ("env", "advisor", "lore", "dreamer", "logger")
    columns = (
        [f"{group}={path.stem}" for path in sorted((ROOT / "configs" / group).glob("*.yaml"))]
        for group in groups
    )
    for words in zip_longest(*columns):
        compose(*filter(None, words))


def test_files_hold_the_defaults_of_the_dataclasses():
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(compose())
    assert config.lore == configs.LoReConfig()
    assert config.dreamer == configs.DreamerConfig()
    assert config.logger == configs.LoggerConfig()
    assert config.evaluation == configs.EvaluationConfig()
    assert config.advisor == configs.ScriptedAdvisorConfig()


@pytest.mark.parametrize(
    "overrides",
    [
        ["lore.gate.beta_maximum=1"],
        ["dreamer.learning_rate=1"],
        ["advisor.skill=1"],
        ["sede=1"],
        ["advisor=stale", "advisor.lags=1"],
        ["advisor=stale", "advisor.advisor.competance=1"],
        ["advisor=truncated", "advisor.kept=1"],
        ["advisor=turns", "advisor.after.competance=1"],
    ],
)
def test_unknown_keys_fail_when_composing(overrides):
    from hydra.errors import ConfigCompositionException

    name = overrides[-1].split("=")[0].split(".")[-1]
    with pytest.raises(ConfigCompositionException, match=name):
        compose(*overrides)


def flat(values, prefix: str = "") -> dict[str, object]:
    """Every value of nested mappings by its path."""
    leaves = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and value and not prefix.endswith("options.")
        leaves |= flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return leaves


@pytest.mark.parametrize("group", ["env", "advisor", "lore", "dreamer", "logger", "health"])
def test_files_hold_only_what_differs_from_the_defaults(group):
    """Each default stands once, in its dataclass."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    configs.register_configs()
    for path in sorted((ROOT / "configs" / group).glob("*.yaml")):
        own = OmegaConf.to_container(OmegaConf.load(path))
        schema = next(iter(own.pop("defaults")))
        if not schema.endswith("schema"):
            continue  # it changes another file
        base = ConfigStore.instance().load(f"{group}/{schema}.yaml").node
        defaults = OmegaConf.to_container(base)
        for name, value in flat(own).items():
            assert name.startswith("options.") or value != defaults.get(name), (
                f"{path.stem}: {name}"
            )


@pytest.mark.parametrize("name", experiments())
def test_experiments_hold_only_what_differs_from_the_defaults(name):
    from omegaconf import OmegaConf

    folder = ROOT / "configs" / "experiment"

    def load(file):
        own, groups = OmegaConf.load(folder / f"{file}.yaml"), []
        for entry in own.pop("defaults", ()):
            if isinstance(entry, str):
                part, more = ({}, []) if entry == "_self_" else load(entry)
                own, groups = OmegaConf.merge(part, own), groups + more
            else:
                groups += [f"{key.removeprefix('override /')}={v}" for key, v in entry.items()]
        return own, groups

    own, groups = load(name)
    own = OmegaConf.to_container(own)
    before = flat(OmegaConf.to_container(compose(*groups), resolve=False))
    allowed = {"total_steps"}  # said, since it is what a run costs
    for path, value in flat(own).items():
        assert path in allowed or before[path] != value, path


PARTS_OF = {
    configs.CallsConfig: [
        "service.AdviceCache",
        "service.AdviceService",
        "service.CallPolicy",
        "transforms.AdviceTransform",
    ],
    configs.MixerConfig: ["modules.LogitMixer", "policies.GaussianPolicy"],
    configs.BanditConfig: ["control.AdviceBandit"],
    configs.ChatAdvisorConfig: ["advisors.chat.ChatAdvisor"],
    configs.LocalAdvisorConfig: ["advisors.local.LocalAdvisor"],
    configs.ScriptedAdvisorConfig: ["advisors.scripted.ScriptedAdvisor"],
    configs.StaleAdvisorConfig: ["advisors.flawed.StaleAdvisor"],
    configs.TruncatedAdvisorConfig: ["advisors.flawed.TruncatedAdvisor"],
}


@pytest.mark.parametrize("settings_class", PARTS_OF, ids=lambda cls: cls.__name__)
def test_classes_have_the_defaults_of_their_settings(settings_class):
    import importlib

    shared = set()
    for path in PARTS_OF[settings_class]:
        module, name = f"lore_torchrl.{path}".rsplit(".", 1)
        own = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        for part in fields(settings_class):
            given = own.get(part.name)
            if given is None or given.default in (inspect.Parameter.empty, None):
                continue
            shared.add(part.name)
            value = part.default if part.default is not MISSING else part.default_factory()
            given = list(given.default) if isinstance(value, list) else given.default
            assert given == value, f"{name}({part.name}={given!r}), setting {value!r}"
    assert shared


def test_the_page_of_all_settings_is_up_to_date():
    from lore_torchrl.configs.reference import page

    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == page(), "python -m lore_torchrl.configs.reference > docs/configuration.md"


def test_every_setting_is_documented():
    from lore_torchrl.configs.setting import Settings

    for cls in Settings.__subclasses__():
        for part in fields(cls):
            nested = is_dataclass(part.default_factory)
            doc = part.metadata.get("doc")
            assert part.name.startswith("_") or doc or nested, f"{cls.__name__}.{part.name}"


def test_a_bad_command_line_ends_before_training(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "train.py"), "lore.calls.budget=-3"]
    result = subprocess.run(
        [*command, f"output_dir={tmp_path}", f"hydra.run.dir={tmp_path}/hydra"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode != 0
    assert "lore.calls.budget=-3 is impossible" in result.stderr
    assert not (tmp_path / "metrics.jsonl").exists()


def test_an_experiment_has_the_last_word_over_the_root():
    assert compose("experiment=doorkey6x6").total_steps == 20_000
    assert compose("experiment=doorkey6x6", "total_steps=64").total_steps == 64


def test_pages_name_settings_that_exist():
    groups = {"dreamer": configs.DreamerConfig, "health": configs.HealthConfig}
    groups |= {f"lore.{part.name}": part.default_factory for part in fields(configs.LoReConfig)}
    groups["advisor"] = configs.ChatAdvisorConfig
    found = 0
    for name in ("troubleshooting", "servers", "concepts/calls"):
        text = (ROOT / "docs" / f"{name}.md").read_text()
        pattern = r"`(lore\.\w+|dreamer|health|advisor)\.(\w+)"
        for group, setting in re.findall(pattern, text):
            found += 1
            known = {part.name for part in fields(groups[group])}
            assert setting in known, f"{name}: {group}.{setting}"
    assert found > 40


def test_the_worked_cost_adds_up_and_is_the_advisors_formula():
    from lore_torchrl.advisors.chat import ChatAdvisor

    text = (ROOT / "docs" / "servers.md").read_text()
    number = r"([\d.]+)"
    line = rf"{number} \* \({number} \* {number} \+ {number} \* {number}\) / 1e6 = {number}"
    calls, read, price_in, written, price_out, said = map(float, re.search(line, text).groups())
    advisor = ChatAdvisor(
        "model",
        base_url="http://localhost:1/v1",
        prompt_price=price_in,
        completion_price=price_out,
    )
    tokens = {"prompt_tokens": int(read), "completion_tokens": int(written)}
    usage = advisor._usage({"usage": tokens})
    assert calls * usage.cost == pytest.approx(said)
    assert calls == compose("experiment=doorkey8x8").lore.calls.budget


def test_of_a_saved_run_what_is_unknown_is_left_out():
    saved = {"env": {"adapter": "mine.Adapter", "smell": 1}, "lore": {"calls": {"budget": 3}}}
    config = configs.restore_config(saved)
    assert config.env.adapter == "mine.Adapter" and config.lore.calls.budget == 3


@pytest.mark.parametrize(
    "words",
    [
        ["lore.subgoal.enabled=true", "lore.calls.td_spike=3", "lore.calls.always=false"],
        ["lore.mixer.action_mask=true", "lore.temperature.rate=0.1"],
        ["lore.planner.enabled=true", "lore.planner.seed=plan"],
    ],
)
def test_channels_that_contradict_each_other_are_refused(words):
    from omegaconf import OmegaConf

    with pytest.raises(ValueError, match="set lore"):
        OmegaConf.to_object(compose("experiment=doorkey5x5", *words))
