"""Advice from a language model in this process: the log-likelihood of each action's name."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lore_torchrl.advisors.base import Advice, AdviceRequest, check
from lore_torchrl.advisors.errors import (
    AdviceError,
    MalformedError,
    NotFiniteError,
    PromptTooLongError,
    Usage,
)

_log = logging.getLogger(__name__)

DEFAULT_PROMPT = "{description}\n\nAnswer with one of: {actions}.\nThe best next action is:"
# Tokenizers without a limit of their own name an astronomic one.
_NO_LIMIT = 10**9


class LocalAdvisor:
    r"""Score every action's name with a causal language model that runs in this process.

    The logit of action :math:`a` is the log-likelihood of its text after the prompt,
    :math:`\ell_a = \sum_i \log p(t_i \mid \text{prompt}, t_{<i})`, or its mean over the
    tokens with ``length_normalised``. The confidence is one minus the normalized entropy
    of :math:`\rho = \operatorname{softmax}(\ell)` over the actions,
    :math:`1 - H[\rho] / \log A`: 0 where the model finds all actions alike, 1 where it
    leaves no doubt. It says how decided the model is, not how often it is right.

    TorchRL's ``TransformersWrapper`` is not used: it pads on the left without position ids,
    which shifts absolute positions, and keeps the whole vocabulary's logits for every token
    of every prompt. Here prompts and actions are padded on the right, where a causal model
    cannot look, and logits are computed from the end of the prompts on.

    All requests times all actions are scored together, ``max_sequences`` a forward. The
    forward runs in a thread, one at a time, so that the event loop stays free. A call that
    is cancelled by a deadline still runs to its end there.

    Args:
        model: Path (or Hugging Face name) of a causal language model, or the model itself.

    Keyword Args:
        tokenizer: Path or tokenizer; needed where ``model`` is a bare model.
            Default: the model's own.
        device: Where the model runs: the training device or another. Default: for a path,
            CUDA where there is one, as for training; for a model, where it is.
        dtype: Parameters' type, such as ``"bfloat16"``. Default: as they are stored.
        prompt: Template; ``{description}``, ``{mission}`` and ``{actions}`` are filled in.
            Default: ``DEFAULT_PROMPT``, description, actions, and a question.
        chat: Whether the prompt goes through the tokenizer's chat template.
            Default: ``None``, if it has one.
        length_normalised: Whether to divide by the number of the action's tokens, which
            favors names of many tokens as the sum favors names of few.
            Default: ``False``.
        max_tokens: Longest prompt and action together, in tokens; never more than the
            model reads. Default: what the model reads.
        truncate: Whether a longer prompt loses its beginning. Otherwise it is answered by
            a :class:`~lore_torchrl.advisors.errors.PromptTooLongError`.
            Default: ``False``.
        max_sequences: Sequences, prompt and action each, in one forward.
            Default: ``64``.

    Raises:
        ImportError: If transformers is not installed.
        ValueError: If an argument is impossible, or there is no tokenizer.
    """

    def __init__(
        self,
        model: str | Any,
        *,
        tokenizer: Any = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        prompt: str | None = None,
        chat: bool | None = None,
        length_normalised: bool = False,
        max_tokens: int | None = None,
        truncate: bool = False,
        max_sequences: int = 64,
    ) -> None:
        enough = max_tokens is None or max_tokens >= 2
        check(enough, "max_tokens", max_tokens, "2 or more, or None for what the model reads")
        check(max_sequences >= 1, "max_sequences", max_sequences, "at least 1")
        prompt = DEFAULT_PROMPT if prompt is None else prompt
        _check_prompt(prompt)
        if device is None and isinstance(model, str):
            device = "cuda" if torch.cuda.is_available() else "cpu"
        model, self.tokenizer = _load(model, tokenizer, dtype=_dtype(dtype))
        self.model = model.eval()
        if device is not None or _dtype(dtype) is not None:
            self.model.to(device=device, dtype=_dtype(dtype))
        self.model_name = str(getattr(self.model, "name_or_path", "") or type(self.model).__name__)
        template = getattr(self.tokenizer, "chat_template", None)
        if chat and not template:
            raise ValueError(
                f"chat=True, but the tokenizer of {self.model_name!r} has no chat template: "
                "use chat=False."
            )
        self.prompt = prompt
        self.chat = bool(template) if chat is None else chat
        self.length_normalised = length_normalised
        self.truncate = truncate
        self.max_sequences = max_sequences
        self.max_tokens = min(max_tokens or _NO_LIMIT, _model_limit(self.model, self.tokenizer))
        accepted = inspect.signature(self.model.forward).parameters
        self.keeps_logits = "logits_to_keep" in accepted
        self._lock = threading.Lock()
        self._cut = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return next(self.model.parameters()).device

    @property
    def cache_prefix(self) -> str:
        """What tells this advisor's answers from those of another model or prompt."""
        dtype = next(self.model.parameters()).dtype
        parts = (self.prompt, self.chat, self.length_normalised, self.max_tokens, self.truncate)
        settings = "\0".join(map(str, (self.model_name, dtype, *parts)))
        return f"local:{hashlib.blake2b(settings.encode(), digest_size=6).hexdigest()}:"

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Advice | AdviceError]:
        """Answer each request; one whose prompt is too long gets an error of its own."""
        return await asyncio.to_thread(self._advise, list(requests))

    def _advise(self, requests: list[AdviceRequest]) -> list[Advice | AdviceError]:
        answers: list[Any] = [None] * len(requests)
        sequences: list[tuple[list[int], int]] = []
        places: list[tuple[int, range]] = []
        for index, request in enumerate(requests):
            try:
                encoded = self.encode(request)
            except AdviceError as error:
                answers[index] = error
                continue
            places.append((index, range(len(sequences), len(sequences) + len(encoded))))
            sequences += encoded
        with self._lock:
            scores = self.log_likelihoods(sequences)
        for index, rows in places:
            answers[index] = self._advice(
                requests[index],
                [scores[row] for row in rows],
                tokens=[len(sequences[row][0]) - sequences[row][1] for row in rows],
                read=sum(len(sequences[row][0]) for row in rows),
            )
        return answers

    def prompt_text(self, request: AdviceRequest) -> str:
        """Return what the model reads before the action."""
        text = self.prompt.format(
            description=request.description,
            mission=request.mission,
            actions=", ".join(request.actions),
        )
        if not self.chat:
            return text
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )

    def encode(self, request: AdviceRequest) -> list[tuple[list[int], int]]:
        """Return, for each action, the tokens and where those to score begin."""
        prompt = self.prompt_text(request)
        # A chat's answer begins a line; elsewhere the space belongs to the action's tokens.
        space = "" if self.chat or prompt[-1:].isspace() else " "
        texts = [prompt, *(f"{prompt}{space}{action}" for action in request.actions)]
        # A chat template writes the special tokens itself.
        encoded = self.tokenizer(texts, add_special_tokens=not self.chat)["input_ids"]
        # Special tokens after the text would come between the prompt and the action.
        encoded = [_without_end(tokens, self.tokenizer) for tokens in encoded]
        # An action may merge with the prompt's end into one token. Scored from where the
        # first of them parts from the prompt, all actions explain the same characters.
        start = min(_common(encoded[0], tokens) for tokens in encoded[1:])
        # The model predicts nothing before it has read a token.
        start = max(start, 1)
        actions = encoded[1:]
        if start >= min(map(len, actions)):
            raise MalformedError(f"An action of {request.actions} has no text to score.")
        excess = max(map(len, actions)) - self.max_tokens
        if excess > 0:
            # The token that begins every text keeps its place.
            head = int(encoded[0][0] == self.tokenizer.bos_token_id)
            if not self.truncate or start - excess < 1 + head:
                raise PromptTooLongError(
                    f"{excess} tokens more than the {self.max_tokens} that {self.model_name!r} "
                    "may read: shorten the description, or use truncate=True."
                )
            if not self._cut:
                _log.warning("Prompts lose their beginning: %d tokens too many.", excess)
            self._cut += 1
            actions = [tokens[:head] + tokens[head + excess :] for tokens in actions]
            start -= excess
        return [(tokens, start) for tokens in actions]

    def log_likelihoods(self, sequences: Sequence[tuple[list[int], int]]) -> list[float]:
        """Return the sum of log-probabilities of each sequence's tokens from its start on.

        Args:
            sequences: Tokens, and the index from 1 up of the first that counts. They are
                sorted by length within, so that little is padded.
        """
        scores = [0.0] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index][0]))
        for first in range(0, len(order), self.max_sequences):
            chunk = order[first : first + self.max_sequences]
            values = self._forward([sequences[index] for index in chunk])
            for index, value in zip(chunk, values.tolist(), strict=True):
                scores[index] = value
        return scores

    # Not inference_mode: a model that is also trained must not keep its tensors.
    @torch.no_grad()
    def _forward(self, sequences: list[tuple[list[int], int]]) -> Tensor:
        """Score ``[N]`` sequences in one forward."""
        longest = max(len(tokens) for tokens, _ in sequences)
        # Which token pads is without effect: causal models do not look ahead.
        ids = torch.zeros(len(sequences), longest, dtype=torch.long)
        attended = torch.zeros_like(ids)
        counted = torch.zeros(len(sequences), longest, dtype=torch.bool)
        for row, (tokens, start) in enumerate(sequences):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            attended[row, : len(tokens)] = 1
            counted[row, start : len(tokens)] = True
        ids, attended, counted = (x.to(self.device) for x in (ids, attended, counted))
        # Logits at t speak of the token at t + 1; the first that matter are one before
        # the earliest start.
        begin = min(start for _, start in sequences) - 1
        options = {}
        if self.keeps_logits:
            options["logits_to_keep"] = torch.arange(begin, longest - 1, device=self.device)
        logits = self.model(
            input_ids=ids, attention_mask=attended, use_cache=False, **options
        ).logits
        if not self.keeps_logits:
            logits = logits[:, begin : longest - 1]
        targets, counted = ids[:, begin + 1 :], counted[:, begin + 1 :]
        # In float32: sums of 16-bit logarithms lose the differences between actions.
        log_probs = -torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), reduction="none"
        ).view_as(targets)
        return torch.where(counted, log_probs, 0.0).sum(-1)

    def _advice(
        self, request: AdviceRequest, scores: list[float], *, tokens: list[int], read: int
    ) -> Advice | AdviceError:
        if self.length_normalised:
            scores = [score / count for score, count in zip(scores, tokens, strict=True)]
        usage = Usage(prompt_tokens=read)
        if not all(math.isfinite(score) for score in scores):
            return NotFiniteError(
                f"{self.model_name!r} gives the log-likelihoods {scores}: in float16 its "
                "numbers may overflow, bfloat16 and float32 hold them.",
                usage=usage,
            )
        named = zip(request.actions, scores, tokens, strict=True)
        return Advice(
            logits=tuple(scores),
            confidence=decidedness(scores),
            usage=usage,
            raw="\n".join(
                f"{action}: {score:.4f} ({count} tokens)" for action, score, count in named
            ),
        )


def decidedness(logits: Sequence[float]) -> float:
    r"""Return :math:`1 - H[\operatorname{softmax}(\ell)] / \log A`, from 0 to 1.

    Examples:
        >>> decidedness([1.0, 1.0, 1.0]), decidedness([100.0, 0.0])
        (0.0, 1.0)
    """
    if len(logits) < 2:
        return 1.0
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    total = sum(weights)
    entropy = -sum(w / total * math.log(w / total) for w in weights if w > 0)
    # Rounding can pass the bounds by an ulp, and some by more.
    return min(1.0, max(0.0, round(1.0 - entropy / math.log(len(logits)), 12)))


def _load(model: Any, tokenizer: Any, *, dtype: torch.dtype | None) -> tuple[Any, Any]:
    try:
        import transformers
    except ImportError as err:
        raise ImportError(
            "LocalAdvisor runs models with transformers: pip install 'lore-torchrl[local]'."
        ) from err
    if isinstance(model, str):
        tokenizer = model if tokenizer is None else tokenizer
        # Loading may draw random weights first: the run's random stream is not for that.
        with torch.random.fork_rng(devices=[]):
            model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype or "auto")
    if tokenizer is None:
        raise ValueError(
            f"model is a {type(model).__name__} without a tokenizer: give tokenizer=, or the "
            "path of a model that brings one."
        )
    if isinstance(tokenizer, str):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
    return model, tokenizer


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is none: use float32, bfloat16 or float16.")
    return found


def _check_prompt(prompt: str) -> None:
    try:
        filled = prompt.format(description="\0", mission="", actions="")
    except (KeyError, IndexError, ValueError) as err:
        raise ValueError(
            f"prompt={prompt!r} cannot be filled in ({type(err).__name__}: {err}): it may name "
            "{description}, {mission} and {actions}; write other braces twice."
        ) from err
    if "\0" not in filled:
        raise ValueError(f"prompt={prompt!r} lacks {{description}}: the model would see nothing.")


def _model_limit(model: Any, tokenizer: Any) -> int:
    config = getattr(model, "config", None)
    limits = (getattr(config, "max_position_embeddings", None), tokenizer.model_max_length)
    return min([_NO_LIMIT, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])


def _without_end(tokens: list[int], tokenizer: Any) -> list[int]:
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {None}
    while len(tokens) > 1 and tokens[-1] in ends:
        tokens = tokens[:-1]
    return tokens


def _common(first: list[int], second: list[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    differ = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))
