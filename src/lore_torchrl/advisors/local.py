"""Advice from a language model in this process: the log-likelihood of each action's name."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import threading
from collections.abc import Sequence
from itertools import islice, zip_longest
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lore_torchrl.advisors.base import Advice, AdviceRequest, check
from lore_torchrl.advisors.errors import (
    AdviceError,
    MalformedError,
    NotFiniteError,
    PromptTooLongError,
    Usage,
)

DEFAULT_PROMPT = "{description}\n\nAnswer with one of: {actions}.\nThe best next action is:"
# Forwards take turns: more at once are no faster, and need more memory.
_turn = threading.Lock()


class LocalAdvisor:
    r"""Score every action's name with a causal language model that runs in this process.

    The logit of action :math:`a` is the log-likelihood of its text after the prompt,
    :math:`\ell_a = \sum_i \log p(t_i \mid \text{prompt}, t_{<i})`, or its mean over the
    tokens with ``length_normalized``. The confidence is one minus the normalized entropy
    of :math:`\rho = \operatorname{softmax}(\ell)` over the actions,
    :math:`1 - H[\rho] / \log A`: 0 where the model finds all actions alike, 1 where it
    leaves no doubt. It says how decided the model is, not how often it is right.

    Unlike in TorchRL's ``TransformersWrapper``, prompts and actions are padded on the right,
    where a causal model cannot look, and logits are computed from the end of the prompts on.
    The forward runs in a thread, one at a time; a call that is cancelled by a deadline still
    runs to its end there.

    Args:
        model: Path (or Hugging Face name) of a causal language model, or the model itself.
        tokenizer: Path or tokenizer; needed where ``model`` is a bare model.
            Default: the model's own.
        device: Where the model runs. Default: for a path, CUDA where there is one; for a
            model, where it is.
        dtype: Parameters' type, such as ``"bfloat16"``. Default: as they are stored.
        prompt: Template; ``{description}``, ``{mission}`` and ``{actions}`` are filled in. The
            mission stands before a description that does not name it, unless the template does.
            Default: ``DEFAULT_PROMPT``, description, actions, and a question.
        chat: Whether the prompt goes through the tokenizer's chat template.
            Default: ``None``, if it has one.
        length_normalized: Whether to divide by the number of the action's tokens, which
            favors names of many tokens as the sum favors names of few.
            Default: ``False``.
        max_tokens: Longest prompt and action together, in tokens; never more than the
            model reads. A longer one is answered by a
            :class:`~lore_torchrl.advisors.errors.PromptTooLongError`. Default: what the model
            reads.
        max_sequences: Sequences, prompt and action each, in one forward.
            Default: ``64``.

    Raises:
        ImportError: If transformers is not installed.
        ValueError: If an argument is impossible, or there is no tokenizer.
    """

    def __init__(
        self,
        model: str | PathLike[str] | Any,
        *,
        tokenizer: Any = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        prompt: str | None = None,
        chat: bool | None = None,
        length_normalized: bool = False,
        max_tokens: int | None = None,
        max_sequences: int = 64,
    ) -> None:
        enough = max_tokens is None or max_tokens >= 2
        check(enough, "max_tokens", max_tokens, "2 or more, or None for what the model reads")
        check(max_sequences >= 1, "max_sequences", max_sequences, "at least 1")
        prompt = DEFAULT_PROMPT if prompt is None else prompt
        _check_prompt(prompt)
        loaded = isinstance(model, str | PathLike)
        if device is None and loaded:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = _dtype(dtype)
        model, self.tokenizer = _load(model, tokenizer, dtype)
        self.model = model.eval()
        if device is not None or dtype is not None:
            self.model.to(device=device, dtype=dtype)
        self.model_name = str(getattr(self.model, "name_or_path", "") or type(self.model).__name__)
        # A model that was handed over may have been trained since it had its name.
        self._weights = "" if loaded else _fingerprint(self.model)
        template = getattr(self.tokenizer, "chat_template", None)
        if chat and not template:
            raise ValueError(
                f"chat=True, but the tokenizer of {self.model_name!r} has no chat template: "
                "use chat=False."
            )
        self.prompt = prompt
        self.chat = bool(template) if chat is None else chat
        self.length_normalized = length_normalized
        self.max_sequences = max_sequences
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        limits = (max_tokens, positions, self.tokenizer.model_max_length)
        self.max_tokens = min(n for n in limits if isinstance(n, int) and n > 0)
        self.keeps_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return next(self.model.parameters()).device

    @property
    def cache_prefix(self) -> str:
        """What tells this advisor's answers from those of another model or prompt."""
        dtype = next(self.model.parameters()).dtype
        parts = (self._weights, self.prompt, self.chat, self.length_normalized, self.max_tokens)
        settings = "\0".join(map(str, (self.model_name, dtype, *parts)))
        return f"local:{hashlib.blake2b(settings.encode(), digest_size=6).hexdigest()}:"

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Advice | AdviceError]:
        """Answer each request; one whose prompt is too long gets an error of its own."""
        return await asyncio.to_thread(self._advise, list(requests))

    def _advise(self, requests: list[AdviceRequest]) -> list[Advice | AdviceError]:
        answers: list[Any] = []
        for request in requests:
            try:
                answers.append(self.encode(request))
            except AdviceError as error:
                answers.append(error)
        sequences = [one for each in answers if isinstance(each, list) for one in each]
        with _turn:
            scores = iter(self.log_likelihoods(sequences))
        for index, encoded in enumerate(answers):
            if isinstance(encoded, list):
                own = list(islice(scores, len(encoded)))
                answers[index] = self._advice(requests[index], encoded, own)
        return answers

    def prompt_text(self, request: AdviceRequest) -> str:
        """Return what the model reads before the action."""
        actions = ", ".join(request.actions)
        situation, mission = request.description, request.mission
        if mission and mission not in situation and "{mission}" not in self.prompt:
            situation = f"Mission: {mission}\n\n{situation}"
        text = self.prompt.format(description=situation, mission=mission, actions=actions)
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
        if not self.chat:
            # Special tokens after the text would come between the prompt and the action.
            encoded = [_without_end(tokens, self.tokenizer) for tokens in encoded]
        before, *actions = encoded
        # An action may merge with the prompt's end into one token. Scored from where the
        # first of them parts from the prompt, all actions explain the same characters. The
        # model predicts nothing before it has read a token.
        columns = enumerate(zip_longest(before, *actions))
        parted = (index for index, column in columns if len(set(column)) > 1)
        start = max(1, next(parted, len(before)))
        if start >= min(map(len, actions)):
            raise MalformedError(f"An action of {request.actions} has no text to score.")
        excess = max(map(len, actions)) - self.max_tokens
        if excess > 0:
            raise PromptTooLongError(
                f"{excess} tokens more than the {self.max_tokens} that {self.model_name!r} "
                "may read: shorten the description."
            )
        return [(tokens, start) for tokens in actions]

    def log_likelihoods(self, sequences: Sequence[tuple[list[int], int]]) -> list[float]:
        """Return the sum of log-probabilities of each sequence's tokens from its start on."""
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
        ids = pad_sequence([torch.tensor(tokens) for tokens, _ in sequences], batch_first=True)
        ids = ids.to(self.device)
        starts = torch.tensor([[start] for _, start in sequences], device=self.device)
        ends = torch.tensor([[len(tokens)] for tokens, _ in sequences], device=self.device)
        places = torch.arange(longest, device=self.device)
        attended = (places < ends).long()
        counted = (places >= starts) & (places < ends)
        # Logits at t speak of the token at t + 1; the first that matter are one before
        # the earliest start.
        begin = min(start for _, start in sequences) - 1
        options = {"logits_to_keep": places[begin:-1]} if self.keeps_logits else {}
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
        self, request: AdviceRequest, encoded: list[tuple[list[int], int]], scores: list[float]
    ) -> Advice | AdviceError:
        tokens = [len(sequence) - start for sequence, start in encoded]
        if self.length_normalized:
            scores = [score / count for score, count in zip(scores, tokens, strict=True)]
        usage = Usage(prompt_tokens=sum(len(sequence) for sequence, _ in encoded))
        if not all(math.isfinite(score) for score in scores):
            return NotFiniteError(
                f"{self.model_name!r} gives the log-likelihoods {scores}: in float16 its "
                "numbers may overflow, bfloat16 and float32 hold them.",
                usage=usage,
            )
        named = zip(request.actions, scores, tokens, strict=True)
        lines = (f"{action}: {score:.4f} ({count} tokens)" for action, score, count in named)
        return Advice(tuple(scores), decidedness(scores), usage, "\n".join(lines))


def decidedness(logits: Sequence[float]) -> float:
    r"""Return :math:`1 - H[\operatorname{softmax}(\ell)] / \log A`, from 0 to 1."""
    if len(logits) < 2:
        return 1.0
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    total = sum(weights)
    entropy = -sum(w / total * math.log(w / total) for w in weights if w > 0)
    # Rounding can pass the bounds by an ulp, and some by more.
    return min(1.0, max(0.0, round(1.0 - entropy / math.log(len(logits)), 12)))


def _load(model: Any, tokenizer: Any, dtype: torch.dtype | None) -> tuple[Any, Any]:
    try:
        import transformers
    except ImportError as err:
        raise ImportError(
            "LocalAdvisor runs models with transformers: pip install 'lore-torchrl[local]'."
        ) from err
    model, tokenizer = map(_path, (model, tokenizer))
    if isinstance(model, str):
        if model.startswith(("/", ".", "~")) and not Path(model).exists():
            raise FileNotFoundError(f"model={model!r}: there is no such folder.")
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


def _path(source: Any) -> Any:
    """Return a path as transformers reads it; anything else as it is."""
    if not isinstance(source, str | PathLike):
        return source
    source = fspath(source)
    return str(Path(source).expanduser()) if source.startswith("~") else source


@torch.no_grad()
def _fingerprint(model: torch.nn.Module) -> str:
    """Return what tells a model's weights from others: a hash of some of each parameter."""
    some = [
        parameter.flatten()[:: max(1, parameter.numel() // 64)] for parameter in model.parameters()
    ]
    values = torch.cat([part.float().cpu() for part in some]).numpy().tobytes()
    return hashlib.blake2b(values, digest_size=6).hexdigest()


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


def _without_end(tokens: list[int], tokenizer: Any) -> list[int]:
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {None}
    while len(tokens) > 1 and tokens[-1] in ends:
        tokens = tokens[:-1]
    return tokens
