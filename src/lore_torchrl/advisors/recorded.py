"""Recording what an advisor answers, and answering from the recording alone."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lore_torchrl.advisors.base import Advice, AdviceRequest, Advisor
from lore_torchrl.advisors.errors import (
    AdviceError,
    DeadlineError,
    FatalAdviceError,
    NotRecordedError,
)
from lore_torchrl.advisors.recording import (
    RecordedAnswer,
    Recording,
    error_kind,
    error_of_kind,
    read_recording,
)
from lore_torchrl.advisors.redaction import secrets_of

_SQLITE_MAGIC = b"SQLite format 3\0"


def model_name(advisor: object) -> str:
    """Return the name of the model that an advisor asks, or of the advisor's class.

    Wrappers are looked through by their ``advisor`` attribute.

    Examples:
        >>> class Chat:
        ...     model = "some-model"
        >>> model_name(Chat())
        'some-model'
    """
    # Bounded: a wrapper that wraps itself must not hang the run.
    for _ in range(32):
        for name in (getattr(advisor, "model_name", None), getattr(advisor, "model", None)):
            if isinstance(name, str) and name:
                return name
        inner = getattr(advisor, "advisor", None)
        if inner is None:
            break
        advisor = inner
    return type(advisor).__name__


class RecordingAdvisor:
    """Ask another advisor, and record every answer and every error to one SQLite file.

    A row holds the request's text, cache key and actions, the model's name, the answer or
    the error, the latency of its batch, tokens and cost, in the order in which the
    answers came. What the wrapped advisor returns or raises passes through unchanged.
    Several calls may be under way at once, in one process or in many. Keys and passwords
    that stand in the advisor's settings, in the environment or in a message are blotted
    out of every text (:func:`~lore_torchrl.advisors.redaction.redact`).

    Args:
        advisor: Whom to ask.
        path: The file; see :class:`~lore_torchrl.advisors.recording.Recording`.

    Keyword Args:
        append: Whether a file that holds answers already may be added to.
            Default: ``True``.

    Raises:
        TypeError: If ``advisor`` has no ``advise``.
        FileExistsError: If the file holds answers and ``append`` is false, or another
            recorder has it for itself.
        ValueError: If the file is no recording, or the one that ``advisor`` answers from or
            records to.

    Examples:
        >>> import asyncio, tempfile
        >>> class Right:
        ...     async def advise(self, requests):
        ...         return [Advice(logits=(0.0, 3.0)) for _ in requests]
        >>> request = AdviceRequest("a wall ahead", ("forward", "right"), "wall")
        >>> path = tempfile.mkdtemp() + "/advice.sqlite"
        >>> recorder = RecordingAdvisor(Right(), path)
        >>> asyncio.run(recorder.advise([request]))
        [Advice(logits=(0.0, 3.0), confidence=1.0)]
        >>> recorder.close()
        >>> asyncio.run(RecordedAdvisor(path).advise([request]))
        [Advice(logits=(0.0, 3.0), confidence=1.0)]
    """

    def __init__(
        self, advisor: Advisor, path: str | os.PathLike[str], *, append: bool = True
    ) -> None:
        if not callable(getattr(advisor, "advise", None)):
            raise TypeError(
                f"RecordingAdvisor needs an advisor with an async `advise`, got {advisor!r}."
            )
        if Path(path).expanduser().resolve() in _recordings_of(advisor):
            raise ValueError(
                f"The advisor's own answers are in {str(path)!r}, which can therefore not be "
                "recorded to: give record= another path."
            )
        self.advisor = advisor
        self.recording = Recording(path, append=append)

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Advice | AdviceError | None]:
        """Return the wrapped advisor's answers, each of them recorded."""
        start = time.perf_counter()
        try:
            answers = await self.advisor.advise(requests)
        except FatalAdviceError:
            # It ends the run, which then needs no repeating.
            raise
        except asyncio.CancelledError:
            # The service cancels what passes its deadline, and counts it so.
            self._record_failure(requests, DeadlineError("cancelled before it answered"), start)
            raise
        except Exception as error:
            self._record_failure(requests, error, start)
            raise
        if not isinstance(answers, (list, tuple)) or len(answers) != len(requests):
            # The service refuses it. What matters is that the repeated run fails here too.
            error = error_of_kind("wrong_answer_count", "not one answer a question")
            self._record_failure(requests, error, start)
        else:
            self._record([_recorded(answer) for answer in answers], requests, start)
        return answers

    def _record_failure(
        self, requests: Sequence[AdviceRequest], error: Exception, start: float
    ) -> None:
        if not isinstance(error, AdviceError):
            error = error_of_kind(error_kind(error), str(error))
        failed = [RecordedAnswer(error, raised=True)]
        # One error failed the batch: what it cost stands in the first row alone.
        free = error_of_kind(error.kind, str(error), status=getattr(error, "status", None))
        failed += [RecordedAnswer(free, raised=True)] * (len(requests) - 1)
        self._record(failed[: len(requests)], requests, start)

    def _record(
        self, answers: list[RecordedAnswer], requests: Sequence[AdviceRequest], start: float
    ) -> None:
        self.recording.append(
            requests,
            answers,
            model=model_name(self.advisor),
            latency_s=time.perf_counter() - start,
            # Anew each time: a client may read its key when it is first used.
            secrets=secrets_of(self.advisor),
        )

    @property
    def cache_prefix(self) -> str:
        """The wrapped advisor's own, so that a recorder changes no cache key."""
        return getattr(self.advisor, "cache_prefix", "")

    async def aclose(self) -> None:
        """Close the wrapped advisor's connections; the recording stays open."""
        aclose = getattr(self.advisor, "aclose", None)
        if callable(aclose):
            await aclose()

    def close(self) -> None:
        """Close the recording, and the wrapped advisor where it can be closed."""
        self.recording.close()
        close = getattr(self.advisor, "close", None)
        if callable(close):
            close()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped advisor's state, so that a recorder may come or go at a resume."""
        return self.advisor.state_dict() if hasattr(self.advisor, "state_dict") else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the wrapped advisor's state."""
        if hasattr(self.advisor, "load_state_dict"):
            self.advisor.load_state_dict(state_dict)


def _recordings_of(advisor: object) -> set[Path]:
    """Return the files that an advisor, or one that it wraps, answers from or records to."""
    found, seen, pending = set(), set(), [advisor]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, RecordedAdvisor):
            found.add(one.path.resolve())
        elif isinstance(one, RecordingAdvisor):
            found.add(one.recording.path)
        pending += [getattr(one, name, None) for name in ("advisor", "before", "after")]
    return found


def _recorded(answer: Any) -> RecordedAnswer:
    if answer is None or isinstance(answer, (Advice, AdviceError)):
        return RecordedAnswer(answer)
    message = f"{type(answer).__name__} where Advice was expected"
    return RecordedAnswer(error_of_kind("wrong_type", message))


_NEEDED = {
    "abstract_state": "coarse_key(), which it does not have",
    "view": "facts 'view' and 'direction', which it does not give",
}


class RecordedAdvisor:
    """Answer from a recording alone, without a network.

    Recordings are the SQLite files of :class:`RecordingAdvisor`, looked up by cache key, or
    JSON Lines with ``logits`` and ``confidence`` a line, and with

    - ``class``, looked up by the request's ``abstract_state``, and ``actions``, or
    - ``image`` and ``direction``, looked up by the request's facts ``view`` and ``direction``.

    Where a key was answered several times, the first question gets the first answer, and so
    on. After the last, those of an abstract state are given again in turn; of other keys the
    last is repeated. Recorded errors happen again, at the price they had.

    A blocking run from its own recording is equal to the original to the bit. So is a
    resumed one, since :meth:`state_dict` holds which answers were given.

    Args:
        path: The recording, read once, here.

    Keyword Args:
        missing: What a question that is not in the recording does. ``"error"`` stops the
            run, as a repeated run that meets a new situation is no repetition.
            ``"mask"`` counts a ``NotRecordedError`` and goes on without that advice.
            Default: ``None``, ``"error"`` for a SQLite recording, and ``"mask"`` for
            JSON Lines, which a run that learns will leave.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no recording, or ``missing`` is unknown.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, missing: Literal["error", "mask"] | None = None
    ) -> None:
        if missing not in ("error", "mask", None):
            raise ValueError(
                f"missing={missing!r} is unknown: use 'error' to stop the run at a question "
                "that is not in the recording, or 'mask' to go on without that advice."
            )
        self.path = Path(path).expanduser()
        if not self.path.is_file():
            raise FileNotFoundError(
                f"There is no recording {str(self.path)!r} (in {os.getcwd()!r}). Make one with "
                "record=<path>, or give the path of one."
            )
        with self.path.open("rb") as file:
            in_lines = file.read(len(_SQLITE_MAGIC)) != _SQLITE_MAGIC
        self.missing = missing or ("mask" if in_lines else "error")
        self._kind, self._answers = "cache_key", {}
        if in_lines:
            self._kind, self._answers = read_lines(self.path)
        else:
            self._answers = read_recording(self.path)
        self._served: dict[str, int] = {}

    def __len__(self) -> int:
        """Return how many different questions have an answer."""
        return len(self._answers)

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Advice | AdviceError | None]:
        """Return the recorded answer to each request.

        Raises:
            AdviceError: If the recorded batch failed as a whole.
            FatalAdviceError: If a request is not in the recording and ``missing`` is
                ``"error"``.
        """
        recorded = [self._next(request) for request in requests]
        raised = [one.answer for one in recorded if one.raised]
        if raised:
            # Without the frames that an earlier raise of the same object left in it.
            raise raised[0].with_traceback(None)
        return [one.answer for one in recorded]

    def _next(self, request: AdviceRequest) -> RecordedAnswer:
        key = {
            "cache_key": request.cache_key,
            "abstract_state": request.abstract_state,
            "view": _view_key(request.facts),
        }[self._kind]
        if key is None:
            return self._not_recorded(f"it needs the describer's {_NEEDED[self._kind]}")
        told = key if self._kind == "abstract_state" else request.cache_key
        answers = self._answers.get(key)
        if answers is None:
            return self._not_recorded(f"no answer to {told!r}")
        turn = self._served.get(key, 0)
        place = turn % len(answers) if self._kind == "abstract_state" else turn
        recorded = answers[min(place, len(answers) - 1)]
        if recorded.actions and recorded.actions != tuple(request.actions):
            return self._not_recorded(
                f"its answer to {told!r} is about {recorded.actions}, not about "
                f"{tuple(request.actions)}"
            )
        self._served[key] = turn + 1
        return recorded

    def _not_recorded(self, reason: str) -> RecordedAnswer:
        message = f"recording {str(self.path)!r}: {reason}"
        if self.missing == "error":
            raise FatalAdviceError(
                f"{message}. A run from its own recording needs the original's configuration; "
                "with missing='mask' it goes on without this advice."
            )
        return RecordedAnswer(NotRecordedError(message))

    def state_dict(self) -> dict[str, Any]:
        """Return how often each question was answered, in types that JSON holds."""
        return {"served": dict(self._served)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        self._served = dict(state_dict.get("served", {}))


def read_lines(path: Path) -> tuple[str, dict[str, list[RecordedAnswer]]]:
    """Return how a JSON Lines recording is looked up, and its answers by key, in their order.

    Args:
        path: A file with one JSON object a line, as :class:`RecordedAdvisor` describes them.

    Returns:
        ``"abstract_state"`` or ``"view"``, and the answers.

    Raises:
        ValueError: If a line lacks something or cannot be read, naming the line.
    """
    kind = ""
    answers: dict[str, list[RecordedAnswer]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                kind = kind or ("abstract_state" if "class" in row else "view")
                if kind == "view":
                    key = _view_key({"view": row["image"], "direction": row["direction"]})
                elif not isinstance(key := row["class"], str):
                    raise TypeError(f"class is {type(key).__name__}, not text")
                logits = tuple(float(value) for value in row["logits"])
                advice = Advice(logits, float(row["confidence"]), raw=line.decode().strip())
                actions = tuple(str(action) for action in row.get("actions", ()))
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as err:
                raise ValueError(
                    f"{str(path)!r}, line {number}, is no recorded answer "
                    f"({type(err).__name__}: {err}). A line holds class, or image and direction, "
                    "and logits and confidence; a SQLite recording begins with its own mark."
                ) from err
            answers.setdefault(key, []).append(RecordedAnswer(advice, actions=actions))
    if not answers:
        raise ValueError(f"{str(path)!r} holds no recorded answer.")
    return kind, answers


def _view_key(facts: Mapping[str, Any]) -> str | None:
    if facts.get("view") is None or facts.get("direction") is None:
        return None
    view = np.asarray(facts["view"], dtype=np.uint8)
    digest = hashlib.blake2b(f"{view.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(view).tobytes())
    return f"{digest.hexdigest()}:{int(facts['direction'])}"
