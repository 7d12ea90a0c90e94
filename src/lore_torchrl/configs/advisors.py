"""Settings of the advisors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lore_torchrl.configs.setting import Settings, setting

_MODES = ("auto", "logprobs", "json", "vote")
_SERVERS = ("openai", "vllm", "llamacpp", "ollama")


@dataclass
class ScriptedAdvisorConfig(Settings, prefix="advisor"):
    """The environment's embedded planner as advisor.

    ``advisor=random``, ``adversarial`` and ``overconfident`` are this one with other numbers.
    """

    _target_: str = "lore_torchrl.advisors.scripted.ScriptedAdvisor"
    competence: float = setting(
        1.0, "Share of best actions, 0 to 1, the others random; below 0 of worst ones.", ge=-1, le=1
    )
    sharpness: float = setting(3.0, "Logit of the recommended action; the others get 0.", gt=0)
    confidence: float = setting(1.0, "Confidence that it claims.", ge=0, le=1)
    plan_length: int = setting(
        0, "Longest plan given with the best action, or with the worst; 0 for none.", ge=0, le=64
    )
    subgoals: bool = setting(False, "Whether the planner's subgoal is given with it.")
    valid_actions: bool = setting(
        False,
        "Whether each answer says which actions are of any use; not at a negative competence.",
    )


@dataclass
class StaleAdvisorConfig(Settings, prefix="advisor"):
    """The answer that belonged to an earlier question."""

    _target_: str = "lore_torchrl.advisors.flawed.StaleAdvisor"
    lag: int = setting(1, "How many questions late; the first `lag` as they are.", ge=1)
    advisor: Any = setting(
        ScriptedAdvisorConfig, "Whose answers come late, such as `advisor@advisor.advisor=vllm`."
    )


@dataclass
class TruncatedAdvisorConfig(Settings, prefix="advisor"):
    """Answers that leave actions out.

    Those get a floor of 1e-4 in probability, and the confidence falls to the share of the
    probability that remains.
    """

    _target_: str = "lore_torchrl.advisors.flawed.TruncatedAdvisor"
    keep: float = setting(0.5, "Probability that an action stays; at least one does.", ge=0, le=1)
    advisor: Any = setting(
        ScriptedAdvisorConfig, "Whose answers lose actions, such as `advisor@advisor.advisor=vllm`."
    )


@dataclass
class TurningAdvisorConfig(Settings, prefix="advisor"):
    """A good advisor until it has answered so many questions, then a bad one.

    Answers from before the turn stay in the cache: ``lore.calls.ttl_steps`` limits their life.
    """

    _target_: str = "lore_torchrl.advisors.flawed.TurningAdvisor"
    turn_after: int | None = setting(None, "Questions before the turn; null never turns.", ge=0)
    before: Any = setting(ScriptedAdvisorConfig, "Who answers before it.")
    after: Any = setting(lambda: ScriptedAdvisorConfig(competence=-1.0), "Who answers after it.")


@dataclass
class RecordedAdvisorConfig(Settings, prefix="advisor"):
    """Answers from a recording, without a network.

    A run's own (``record=<path>``), to repeat it bitwise, or another's, such as a language model's
    answers to the states of an environment.
    """

    _target_: str = "lore_torchrl.advisors.recorded.RecordedAdvisor"
    path: str = setting("???", "SQLite as record= writes it, or JSON Lines of states or views.")
    missing: str | None = setting(
        None,
        "A question that is not in the recording stops the run (`error`), or is counted as "
        "advice/error_not_recorded (`mask`). null is error for SQLite and mask for JSON Lines.",
        among=("error", "mask"),
    )


@dataclass
class LocalAdvisorConfig(Settings, prefix="advisor"):
    """A causal language model in this process: every action's name is scored by its
    log-likelihood. Needs ``pip install 'lore-torchrl[local]'``.
    """

    _target_: str = "lore_torchrl.advisors.local.LocalAdvisor"
    model: str = setting("???", "Folder of a model, or its name on the Hugging Face hub.")
    tokenizer: str | None = setting(None, "Folder or name of its tokenizer; null: its own.")
    device: str | None = setting(None, "cpu, cuda, ...; `advisor=local` sets training's device.")
    dtype: str | None = setting(None, "float32, bfloat16, float16; null is as stored.")
    prompt: str | None = setting(
        None, "Template with {description}, {mission}, {actions}; null is the default."
    )
    chat: bool | None = setting(None, "Whether to use the chat template; null: if there is one.")
    length_normalized: bool = setting(False, "Divide an action's log-likelihood by its tokens.")
    max_tokens: int | None = setting(
        None,
        "Longest prompt with action that is answered, in tokens; null: what the model reads.",
        ge=2,
    )
    max_sequences: int = setting(64, "Prompts with actions in one forward pass.", ge=1)


@dataclass
class ChatAdvisorConfig(Settings, prefix="advisor"):
    """A language model behind an OpenAI-compatible chat server.

    It holds the name of the variable with the key and not the key: a configuration is written
    into every run's folder.
    """

    _target_: str = "lore_torchrl.advisors.chat.ChatAdvisor"
    # Plain lists and dictionaries, which go into requests, and not OmegaConf's.
    _convert_: str = "all"
    model: str = setting("???", "Name of the model, as the server knows it; each file sets one.")
    base_url: str | None = setting(
        None,
        "Address up to and with /v1; null takes OPENAI_BASE_URL, else OpenAI itself. The files "
        "other than openai.yaml name this machine, unless OPENAI_BASE_URL is set.",
    )
    api_key_env: str = setting("OPENAI_API_KEY", "Environment variable that holds the key.")
    server: str = setting(
        "openai", "Whose dialect to speak. vllm suits most other servers.", among=_SERVERS
    )
    mode: str = setting(
        "auto", "How a distribution is got; auto: the first that the server honors.", among=_MODES
    )
    prompt: str = setting("default", "`default`, or path of a .txt file that holds $situation.")
    temperature: float | None = setting(None, "Of sampling; null: the server's own (votes: 1).")
    max_tokens: int = setting(
        1024, "Longest answer in modes json and vote, thoughts included, in tokens.", ge=1
    )
    votes: int = setting(8, "Answers asked for in mode vote.", ge=1)
    smoothing: float = setting(0.1, "Mode vote: added to each action's count of answers.")
    min_label_mass: float = setting(0.01, "Mode logprobs: least probability of all letters.")
    prompt_price: float = setting(0.0, "Price of a million tokens read, in any currency.")
    completion_price: float = setting(0.0, "Price of a million tokens written.")
    deadline_s: float = setting(
        20.0, "Seconds of a question with retries; below the service's limit.", gt=0
    )
    retries: int = setting(2, "Attempts after the first.", ge=0)
    backoff_s: list[float] = setting(
        lambda: [0.5, 8.0], "First and longest wait between attempts, seconds."
    )
    max_response_bytes: int = setting(1_048_576, "Largest answer, bytes.", ge=1)
    max_concurrency: int = setting(8, "Requests on the wire at once.", ge=1)
    requests_per_minute: float | None = setting(None, "Limit on requests; null for none.")
    send_image: bool = setting(False, "Whether the image is sent beside the text.")
    ask_for: list[str] = setting(
        list,
        "What mode json asks for beside the preference.",
        among=("plan", "valid_actions", "subgoal"),
    )
    extra_body: dict[str, Any] = setting(dict, "Fields added to each chat request's body.")
