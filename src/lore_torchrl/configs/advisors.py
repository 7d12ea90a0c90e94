"""Settings of the advisors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lore_torchrl.configs.setting import Settings, setting

_MODES = ("auto", "decisions", "logprobs", "json", "vote")
_SERVERS = ("openai", "vllm", "llamacpp", "ollama")


@dataclass
class ScriptedAdvisorConfig(Settings):
    """The environment's embedded planner as advisor."""

    prefix: ClassVar[str] = "advisor"

    _target_: str = "lore_torchrl.advisors.scripted.ScriptedAdvisor"
    competence: float = setting(
        1.0,
        "1 always the planner's best action, 0 a random one, -1 always a worst one; between them, "
        "that often.",
        ge=-1,
        le=1,
    )
    sharpness: float = setting(3.0, "Logit of the recommended action; the others get 0.", gt=0)
    confidence: float = setting(1.0, "Confidence that it claims.", ge=0, le=1)


@dataclass
class StaleAdvisorConfig(Settings):
    """The answer that belonged to an earlier question."""

    prefix: ClassVar[str] = "advisor"

    _target_: str = "lore_torchrl.advisors.flawed.StaleAdvisor"
    lag: int = setting(
        1, "How many questions late; the first `lag` questions are answered as they are.", ge=1
    )
    advisor: Any = setting(
        ScriptedAdvisorConfig, "Whose answers come late, such as `advisor@advisor.advisor=vllm`."
    )


@dataclass
class TruncatedAdvisorConfig(Settings):
    """Answers that leave actions out.

    Those get a floor of 1e-4 in probability, and the confidence falls to the share of the
    probability that remains.
    """

    prefix: ClassVar[str] = "advisor"

    _target_: str = "lore_torchrl.advisors.flawed.TruncatedAdvisor"
    keep: float = setting(
        0.5, "Probability with which each action stays; at least one does.", ge=0, le=1
    )
    advisor: Any = setting(
        ScriptedAdvisorConfig, "Whose answers lose actions, such as `advisor@advisor.advisor=vllm`."
    )


@dataclass
class TurningAdvisorConfig(Settings):
    """A good advisor until it has answered so many questions, then a bad one.

    Answers from before the turn stay in the cache: ``lore.calls.ttl_steps`` limits their life.
    """

    prefix: ClassVar[str] = "advisor"

    _target_: str = "lore_torchrl.advisors.flawed.TurningAdvisor"
    turn_after: int | None = setting(None, "Questions before the turn; null never turns.", ge=0)
    before: Any = setting(ScriptedAdvisorConfig, "Who answers before it.")
    after: Any = setting(lambda: ScriptedAdvisorConfig(competence=-1.0), "Who answers after it.")


@dataclass
class RecordedAdvisorConfig(Settings):
    """Answers from a recording, without a network.

    A run's own (``record=<path>``), to repeat it bitwise, or another's, such as a language model's
    answers to the states of an environment.
    """

    prefix: ClassVar[str] = "advisor"

    _target_: str = "lore_torchrl.advisors.recorded.RecordedAdvisor"
    path: str = setting(
        "???",
        "The recording: SQLite as record= writes it, or JSON Lines of abstract states or views.",
    )
    missing: str | None = setting(
        None,
        "What a question that is not in the recording does: `error` stops the run, as a repeated "
        "run must not leave its recording; `mask` counts it (advice/error_not_recorded) and goes "
        "on. null is error for SQLite and mask for JSON Lines, which a run that learns will leave.",
        among=("error", "mask"),
    )


@dataclass
class LocalAdvisorConfig(Settings):
    """A causal language model in this process: every action's name is scored by its
    log-likelihood. Needs ``pip install 'lore-torchrl[local]'``.
    """

    prefix: ClassVar[str] = "advisor"

    _target_: str = "lore_torchrl.advisors.local.LocalAdvisor"
    model: str = setting("???", "Folder of a model, or its name on the Hugging Face hub.")
    tokenizer: str | None = setting(
        None, "Folder or name of its tokenizer; null is the model's own."
    )
    device: str | None = setting(
        None, "Where it runs: cpu, cuda, ...; `advisor=local` sets the training device."
    )
    dtype: str | None = setting(None, "float32, bfloat16, float16; null is as stored.")
    prompt: str | None = setting(
        None,
        "Template with {description}, and {mission} and {actions} where wanted; null is the "
        "default.",
    )
    chat: bool | None = setting(
        None, "Whether to use the tokenizer's chat template; null uses it if there is one."
    )
    length_normalised: bool = setting(
        False, "Divide an action's log-likelihood by its tokens: for names of unequal length."
    )
    max_tokens: int | None = setting(
        None, "Longest prompt with action, in tokens; null is what the model reads.", ge=2
    )
    truncate: bool = setting(
        False, "A longer prompt loses its beginning (true), or gets no answer (false)."
    )
    max_sequences: int = setting(
        64, "Prompts with actions in one forward pass; fewer need less memory.", ge=1
    )


@dataclass
class ChatAdvisorConfig(Settings):
    """A language model behind an OpenAI-compatible chat server.

    It holds the name of the variable with the key and not the key: a configuration is written
    into every run's folder.
    """

    prefix: ClassVar[str] = "advisor"

    _target_: str = "lore_torchrl.advisors.chat.ChatAdvisor"
    # Plain lists and dictionaries, which go into requests, and not OmegaConf's.
    _convert_: str = "all"
    model: str = setting("???", "Name of the model, as the server knows it.")
    base_url: str | None = setting(
        None, "Address up to and with /v1; null takes OPENAI_BASE_URL, else OpenAI itself."
    )
    api_key_env: str = setting(
        "OPENAI_API_KEY",
        "Environment variable that holds the key; the key itself belongs in no file.",
    )
    server: str = setting(
        "openai", "Whose dialect to speak. vllm suits most other servers.", among=_SERVERS
    )
    mode: str = setting(
        "auto",
        "How a distribution is got: decisions, logprobs, json, vote, or auto for the first of "
        "these that the server honors. The first line of the log says which.",
        among=_MODES,
    )
    prompt: str = setting(
        "default", "`default`, or the path of a .txt file of your own that holds $situation."
    )
    temperature: float | None = setting(
        None, "Sampling temperature; null for the server's own (votes: 1)."
    )
    max_tokens: int = setting(
        1024,
        "Longest answer in modes json and vote, a reasoning model's thoughts included.",
        ge=1,
    )
    votes: int = setting(8, "Answers asked for in mode vote.", ge=1)
    smoothing: float = setting(0.1, "Mode vote: added to each action's count of answers.")
    min_label_mass: float = setting(
        0.01, "Mode logprobs: least probability on all letters together that still is an answer."
    )
    prompt_price: float = setting(
        0.0, "Price of a million tokens read, in any currency; for the cost in the log."
    )
    completion_price: float = setting(0.0, "Price of a million tokens written.")
    deadline_s: float = setting(
        20.0,
        "Total seconds of a question, retries and body included. Keep it below the service's "
        "limit.",
        gt=0,
    )
    retries: int = setting(2, "Attempts after the first.", ge=0)
    backoff_s: list[float] = setting(
        lambda: [0.5, 8.0], "First and longest wait between attempts, seconds."
    )
    max_response_bytes: int = setting(
        1_048_576, "Largest answer in bytes, after decompression.", ge=1
    )
    max_concurrency: int = setting(8, "Requests on the wire at once.", ge=1)
    requests_per_minute: float | None = setting(None, "Limit on requests; null for none.")
    send_image: bool = setting(
        False, "`true` sends the request's image beside the text, for models that see."
    )
    extra_body: dict[str, Any] = setting(dict, "Fields added to each chat request's body.")
