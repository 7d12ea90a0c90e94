"""Structured configuration of the advisors behind a chat server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ChatAdvisorConfig:
    """Keywords of :class:`~lore_torchrl.advisors.chat.ChatAdvisor`, which checks them.

    Documented in ``configs/advisor/openai.yaml``. It holds the name of the variable with the
    key and not the key: a configuration is written into every run's folder.
    """

    _target_: str = "lore_torchrl.advisors.chat.ChatAdvisor"
    # Plain lists and dictionaries, which go into requests, and not OmegaConf's.
    _convert_: str = "all"
    model: str = "???"
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    server: str = "openai"
    mode: str = "auto"
    prompt: str = "default"
    temperature: float | None = None
    max_tokens: int = 1024
    votes: int = 8
    smoothing: float = 0.1
    min_label_mass: float = 0.01
    prompt_price: float = 0.0
    completion_price: float = 0.0
    deadline_s: float = 20.0
    retries: int = 2
    backoff_s: list[float] = field(default_factory=lambda: [0.5, 8.0])
    max_response_bytes: int = 1_048_576
    max_concurrency: int = 8
    requests_per_minute: float | None = None
    send_image: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        modes = ("auto", "decisions", "logprobs", "json", "vote")
        for name, value, known in (
            ("mode", self.mode, modes),
            ("server", self.server, ("openai", "vllm", "llamacpp", "ollama")),
        ):
            if value not in known:
                raise ValueError(f"advisor.{name}={value!r} is impossible: choose from {known}.")
        if not self.deadline_s > 0:
            raise ValueError(
                f"advisor.deadline_s={self.deadline_s!r} is impossible: it must be positive."
            )
        for name in ("max_tokens", "votes", "max_response_bytes", "max_concurrency"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"advisor.{name}={value!r} is impossible: it must be at least 1.")
