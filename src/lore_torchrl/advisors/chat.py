"""Advice from a language model behind any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

from lore_torchrl.advisors.base import Advice, AdviceRequest, check
from lore_torchrl.advisors.errors import (
    AdviceError,
    MalformedError,
    Sending,
    StatusError,
    Usage,
)
from lore_torchrl.advisors.http import JSONClient, after_reaching
from lore_torchrl.advisors.modes import (
    MODES,
    UNSUPPORTED,
    ChatSettings,
    Mode,
    answer_text,
    prompt_body,
)
from lore_torchrl.advisors.prompt import EXTRAS, Prompt, PromptTemplate
from lore_torchrl.advisors.redaction import Secret, redact, shown

_log = logging.getLogger(__name__)

SERVERS = ("openai", "vllm", "llamacpp", "ollama")
OPENAI_URL = "https://api.openai.com/v1"
# Questions between attempts to find a mode that works.
_PROBE_AGAIN = 64
# Questions that json must fail, without being refused, before votes are taken for good.
_JSON_TRIES = 3
# Characters of an answer that are kept for people to read.
_LONGEST_RAW = 1 << 16


class ChatAdvisor:
    """Ask a chat server, in the best way that it offers, for a preference over actions.

    Three modes, documented at their classes in :mod:`lore_torchrl.advisors.modes`:
    ``logprobs``, ``json`` and ``vote``. ``auto`` tries them in this order on the first question
    and stays with the first that is answered in the form asked for, since some servers take
    fields that they do not know and ignore them. What was chosen is logged, and
    :attr:`chosen_mode` names it. A server that cannot be reached decides nothing.
    Where no mode works, later questions are asked in ``json``, and all modes are tried again
    after 64 questions, or as soon as one is answered.

    A question may take several HTTP requests: retries, votes, probing. They share one
    deadline, and :attr:`requests_sent` counts them all.

    Args:
        model: Name of the model, as the server knows it.
        base_url: Address up to and with ``/v1``. Default: ``OPENAI_BASE_URL``, else OpenAI.
        api_key: The key. It does not show in reprs, logs and errors.
            Default: the variable ``api_key_env``.
        api_key_env: Environment variable that holds the key. Default: ``"OPENAI_API_KEY"``.
        server: ``"openai"``, ``"vllm"``, ``"llamacpp"`` or ``"ollama"``: whose dialect to
            speak. Any other server is best addressed as ``"vllm"``. Default: ``"openai"``.
        mode: ``"auto"`` or one of the three modes. Default: ``"auto"``.
        prompt: Name or path of the prompt; see
            :class:`~lore_torchrl.advisors.prompt.PromptTemplate`. Default: ``"default"``.
        temperature: Sampling temperature; ``None`` for the server's own, and 1 for votes.
        max_tokens: Longest answer in ``json`` and ``vote``, thoughts of a reasoning model
            included. Default: ``1024``.
        votes: Answers that ``vote`` asks for. Default: ``8``.
        smoothing: Added to each action's count of votes. Default: ``0.1``.
        min_label_mass: In ``logprobs``, the least probability on all letters together that
            still counts as an answer. Default: ``0.01``.
        prompt_price: Price of a million tokens read. Default: ``0.0``.
        completion_price: Price of a million tokens written. Default: ``0.0``.
        deadline_s: Total time of a question in seconds. Keep it below the service's own
            limit, so that the error says what happened. Default: ``20.0``.
        retries: Attempts after the first. Default: ``2``.
        backoff_s: First and longest wait between attempts in seconds.
            Default: ``(0.5, 8.0)``.
        max_response_bytes: Largest body. Default: 1 MiB.
        max_concurrency: Requests on the wire at once. Default: ``8``.
        requests_per_minute: Limit on requests, as a bucket that holds a minute's worth;
            ``None`` for none. Default: ``None``.
        send_image: Whether a request's image is sent beside the text. Default: ``False``.
        ask_for: What mode ``json``, which must be set then, asks for beside the preference:
            ``"plan"``, ``"valid_actions"``, ``"subgoal"``. Default: nothing.
        extra_body: Fields added to each chat request's body, such as
            ``{"chat_template_kwargs": {"enable_thinking": False}}``. Default: none.

    Raises:
        ImportError: If the ``http`` extra is not installed.
        ValueError: If an argument is out of range or unknown, or OpenAI is to be asked
            without a key.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        server: str = "openai",
        mode: str = "auto",
        prompt: str = "default",
        temperature: float | None = None,
        max_tokens: int = 1024,
        votes: int = 8,
        smoothing: float = 0.1,
        min_label_mass: float = 0.01,
        prompt_price: float = 0.0,
        completion_price: float = 0.0,
        deadline_s: float = 20.0,
        retries: int = 2,
        backoff_s: Sequence[float] = (0.5, 8.0),
        max_response_bytes: int = 1 << 20,
        max_concurrency: int = 8,
        requests_per_minute: float | None = None,
        send_image: bool = False,
        ask_for: Sequence[str] = (),
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        check(bool(model), "model", model, "name one that the server has")
        check(server in SERVERS, "server", server, f"choose from {SERVERS}")
        check(mode == "auto" or mode in MODES, "mode", mode, f"choose from {('auto', *MODES)}")
        check(temperature is None or temperature >= 0, "temperature", temperature, "0 or more")
        known = set(ask_for) <= set(EXTRAS)
        check(known, "ask_for", list(ask_for), f"choose from {EXTRAS}")
        check(not ask_for or mode == "json", "mode", mode, "ask_for needs mode='json'")
        check(max_tokens >= 1, "max_tokens", max_tokens, "at least 1")
        check(votes >= 1, "votes", votes, "at least 1")
        check(0 < smoothing < math.inf, "smoothing", smoothing, "a positive number")
        check(0 <= min_label_mass <= 1, "min_label_mass", min_label_mass, "from 0 to 1")
        check(0 <= prompt_price < math.inf, "prompt_price", prompt_price, "0 or more")
        check(0 <= completion_price < math.inf, "completion_price", completion_price, "0 or more")
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
        secret = Secret(api_key.strip()) if api_key else Secret.from_env(api_key_env)
        if secret is None and base_url.startswith(OPENAI_URL):
            raise ValueError(f"OpenAI needs a key: set {api_key_env}, or base_url for a server.")
        self.settings = ChatSettings(
            model=model,
            server=server,
            temperature=temperature,
            max_tokens=max_tokens,
            votes=votes,
            smoothing=smoothing,
            min_label_mass=min_label_mass,
            send_image=send_image,
            ask_for=tuple(ask_for),
            # Through JSON: a body must be able to travel so, and nobody changes it later.
            extra_body=json.loads(json.dumps(dict(extra_body or {}))),
        )
        self.mode = mode
        self.chosen_mode: str | None = None if mode == "auto" else mode
        self.prompt_price = prompt_price
        self.completion_price = completion_price
        self.deadline_s = deadline_s
        self.client = JSONClient(
            base_url,
            api_key=secret,
            deadline_s=deadline_s,
            retries=retries,
            backoff_s=tuple(backoff_s),
            max_response_bytes=max_response_bytes,
            max_concurrency=max_concurrency,
            requests_per_minute=requests_per_minute,
        )
        names = tuple(MODES) if mode == "auto" else (mode,)
        self._modes: dict[str, Mode] = {
            name: MODES[name](self.settings, PromptTemplate(prompt, name, ask_for))
            for name in names
        }
        self._until_probe = 0
        self._json_failed = 0
        self._probing: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        _log.info("Asking %s, mode %s, prompt %s", self, mode, self.prompt_hash[:12])

    def __repr__(self) -> str:
        return f"ChatAdvisor({self.model!r}, base_url={self.client.base_url!r}, mode={self.mode!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_probing": None}

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.settings.model

    @property
    def requests_sent(self) -> int:
        """HTTP requests sent so far."""
        return self.client.sent

    @cached_property
    def prompt_hash(self) -> str:
        """SHA-256 of what shapes the answers beside the question: prompt, mode, settings."""
        parts = [self.mode, json.dumps(asdict(self.settings), sort_keys=True)]
        parts += [one.template.source for one in self._modes.values()]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def cache_prefix(self) -> str:
        """What cached answers' keys begin with, so that another prompt shares none."""
        return f"{self.prompt_hash[:16]}:"

    def prompt(self, request: AdviceRequest) -> Prompt:
        """Return the prompt that a question becomes, in the mode chosen or tried first."""
        return self._modes[self.chosen_mode or next(iter(self._modes))].template.render(request)

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Advice | AdviceError]:
        """Ask all questions at once; each gets its advice or the error that it met."""
        return list(await asyncio.gather(*(self._answer(request) for request in requests)))

    async def complete(self, prompt: Prompt) -> tuple[str, Usage]:
        """Return what the model writes to a prompt that asks for no action, and what it cost.

        Raises:
            AdviceError: If there is no answer, with its ``usage``.
        """
        meter = _Meter(self)
        settings = self.settings
        body = prompt_body(settings, prompt.system, prompt.user, settings.max_tokens)
        try:
            data = await meter("/chat/completions", body | dict(settings.extra_body))
            text = answer_text(data)
        except AdviceError as error:
            error.usage = meter.usage
            raise error.bare() from None
        return redact(text, limit=_LONGEST_RAW), meter.usage

    async def aclose(self) -> None:
        """Close the connections. A later question opens new ones."""
        await self.client.aclose()

    async def _answer(self, request: AdviceRequest) -> Advice | AdviceError:
        meter = _Meter(self)
        try:
            advice = await self._ask(request, meter)
        except AdviceError as failure:
            error = after_reaching(failure) if meter.reached else failure
            error.usage = meter.usage
            return error.bare()
        # Redacted only now: the modes read what the server wrote.
        return replace(advice, usage=meter.usage, raw=redact(advice.raw, limit=_LONGEST_RAW))

    async def _ask(self, request: AdviceRequest, meter: _Meter) -> Advice:
        if self.chosen_mode is None:
            loop = asyncio.get_running_loop()
            if self._probing is None or self._probing[0] is not loop:
                self._probing = (loop, asyncio.Lock())
            # Whoever holds it ends by its own deadline, which is before this question's.
            async with self._probing[1]:
                if self.chosen_mode is None:
                    if self._until_probe == 0:
                        return await self._probe(request, meter)
                    self._until_probe -= 1
        answer = await self._modes[self.chosen_mode or "json"].ask(meter, request)
        self._until_probe = 0
        return answer

    async def _probe(self, request: AdviceRequest, meter: _Meter) -> Advice:
        """Find the mode, with a question that needs an answer anyway."""
        failed: dict[str, AdviceError] = {}
        for name, mode in self._modes.items():
            try:
                answer = await mode.ask(meter, request)
                if name == "vote" and getattr(failed["json"], "status", 0) not in UNSUPPORTED:
                    # One bad answer must not make every later question cost several requests.
                    self._json_failed += 1
                    if self._json_failed < _JSON_TRIES:
                        return answer
                self.chosen_mode = name
                _log.info("%s answers in mode %s; %s", self, name, _reasons(failed))
                if name == "vote":
                    _log.warning(
                        "%s takes up to %d requests a question in mode vote; set advisor.mode=json "
                        "to have one each.",
                        *(self, self.settings.votes),
                    )
                return answer
            except (MalformedError, StatusError) as error:
                status = getattr(error, "status", 500)
                if status not in UNSUPPORTED and status < 500:
                    raise
                failed[name] = error
        self._until_probe = _PROBE_AGAIN
        _log.warning(
            "%s answers in no mode: asking in json, and in all again after %d questions. %s",
            *(self, _PROBE_AGAIN, _reasons(failed)),
        )
        raise failed["json"]

    def _usage(self, data: Mapping[str, Any]) -> Usage:
        usage = data.get("usage")
        if not isinstance(usage, Mapping):
            return Usage()
        read, written = (_tokens(usage.get(f"{what}_tokens")) for what in ("prompt", "completion"))
        cost = (read * self.prompt_price + written * self.completion_price) / 1e6
        return Usage(read, written, cost)


class _Meter:
    """Posts for one question, under its deadline, and adds up what the answers cost."""

    def __init__(self, advisor: ChatAdvisor) -> None:
        self.advisor = advisor
        self.usage = Usage()
        self.reached = False
        self.until = asyncio.get_running_loop().time() + advisor.deadline_s

    async def __call__(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            data = await self.advisor.client.post(path, body, until=self.until)
        except AdviceError as error:
            self.reached = self.reached or error.sending is Sending.DONE
            raise
        self.reached = True
        self.usage += self.advisor._usage(data)
        return data


def _tokens(count: object) -> int:
    # A wrong count must not cost the answer; what is no count is none.
    if type(count) is float and count.is_integer():
        count = int(count)
    return count if type(count) is int and 0 <= count < 1 << 40 else 0


def _reasons(failed: Mapping[str, AdviceError]) -> str:
    reasons = (f"{name} failed: {shown(str(error), 80)}" for name, error in failed.items())
    return "; ".join(reasons) or "tried first"
