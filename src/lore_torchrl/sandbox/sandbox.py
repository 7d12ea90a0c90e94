"""Runs a program where it can reach nothing, under limits on time, memory, depth and output."""

from __future__ import annotations

import atexit
import datetime
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lore_torchrl.sandbox.program import Program, fits_name

#: Largest size of a feature.
LARGEST = 1e4
_MISSING = (
    "Programs run in a sandbox or not at all, and pydantic-monty is not installed: "
    "pip install 'lore-torchrl[sandbox]'"
)
# The same clock and the same random numbers for every run: a result depends on `obs` alone.
_POLICY = {
    "datetime": datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC),
    "sleep": "zero",
    "random_start": {"seed": 0},
}
_LONGEST_TEXT = 2000
# The result leaves as a printed line, whatever the program has redefined or returns at its top
# level: as an object, a key of nested tuples takes the host forever to hash. The names beside it
# tell `1` from `"1"`.
_CALL = """
_result = {function}(obs)
import json as _json
print()
print(_json.dumps([_result, [*_result] if type(_result) is dict else None]))
"""


class ProgramError(Exception):
    """A program did not return what it has to; the message is what its author should read.

    Attributes:
        kind: ``"error"``, ``"timeout"``, ``"memory"``, ``"crash"`` or ``"result"``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message[:_LONGEST_TEXT])
        self.kind = kind


@dataclass(frozen=True)
class Limits:
    """What one run of a program may take.

    Args:
        time_s: Seconds of computing. Default: ``0.05``.
        memory: Bytes of the program's heap. Default: 16 MiB.
        recursion: Depth of calls. Default: ``100``.
        output: Bytes that it may print, its result included. Default: ``10_000``.
        most_features: Entries of what ``compute_features`` and ``reached`` return. Default: ``8``.
    """

    time_s: float = 0.05
    memory: int = 16 << 20
    recursion: int = 100
    output: int = 10_000
    most_features: int = 8


class Sandbox:
    """Runs programs in `Monty <https://github.com/pydantic/monty>`_, a Python without I/O.

    The interpreter is a Rust program in a process of its own, without files, network, environment
    and host objects; plain data goes in, and a line of JSON comes out. Every run has a session of
    its own: nothing that a program keeps or redefines lasts to the next row, step or version. The
    worker process starts with the first run of each process; a spawned child has its own, and so
    has a child that was forked before its parent ran a program.

    Args:
        limits: What one run may take. Default: ``Limits()``.

    Raises:
        ImportError: If the ``sandbox`` extra is not installed. There is no other way in which a
            program is run.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        _monty()

    def run(
        self, program: Program, view: Mapping[str, Any]
    ) -> dict[str, float] | dict[str, bool] | float:
        """Run a program on what is seen.

        Args:
            program: What to run.
            view: ``obs``, as a describer's ``program_view()`` returns it: plain Python data.

        Returns:
            Of features their finite values by name, at most 1e4 in size, sorted by name; of
            progress a number from 0 to 1; of subgoals true or false by name, sorted by name.

        Raises:
            ProgramError: If it fails, takes too much, or returns something else.
            RuntimeError: In a process that was forked from one that had run programs.
        """
        return self._run(_pool(), program, view)

    @contextmanager
    def elsewhere(self) -> Iterator[Callable[[Program, Mapping[str, Any]], Any]]:
        """Return a function like :meth:`run` that uses another worker process, while it lasts."""
        with _new_pool() as pool:
            yield lambda program, view: self._run(pool, program, view)

    def _run(self, pool: Any, program: Program, view: Mapping[str, Any]) -> Any:
        monty = _monty()
        try:
            try:
                printed = self._printed(pool, program, view)
            except monty.MontyCrashedError:
                # An interrupt of the whole process group ends the interpreter too: once more. A
                # program that ends it does so again.
                printed = self._printed(pool, program, view)
        except monty.MontyConversionError as error:
            raise TypeError(f"program_view() must return plain Python data: {error}") from None
        except monty.MontyCrashedError as error:
            raise ProgramError("crash", f"The interpreter was ended: {error}") from None
        except (monty.MontyError, TimeoutError, MemoryError) as error:
            raise _program_error(error) from None
        text = printed.rstrip("\n").rpartition("\n")[2]
        if not text:
            raise ProgramError("result", f"{program.function} is not called: what ends the code?")
        try:
            value, names = json.loads(text)
        # Such as a list of a thousand levels, or a redefined `type`.
        except (ValueError, RecursionError, TypeError) as error:
            raise ProgramError("result", f"The result cannot be read: {error}") from None
        if program.kind == "progress":
            return _number(value, "progress(obs)", 0.0, 1.0)
        return self._entries(value, names, program)

    def _printed(self, pool: Any, program: Program, view: Mapping[str, Any]) -> str:
        monty, limits = _monty(), self.limits
        with pool.checkout(
            limits={
                "max_feed_duration_secs": limits.time_s,
                "max_memory": limits.memory,
                "max_recursion_depth": limits.recursion,
                # Questions to the host, which are all refused, but each take a while.
                "max_suspensions": 16,
            },
            os_policy=_POLICY,
        ) as session:
            printed = monty.CollectString(max_bytes=limits.output)
            code = program.code + _CALL.format(function=program.function)
            state = session.feed_start(code, inputs={"obs": view}, print_callback=printed)
            while not isinstance(state, monty.MontyComplete):
                state = state.resume_auto()
        return printed.output

    def _entries(self, value: Any, names: Any, program: Program) -> dict[str, float]:
        call, subgoals = f"{program.function}(obs)", program.kind == "subgoals"
        # Never shown as a whole: it can be long.
        if type(value) is not dict or names != list(value):
            form = "bool" if subgoals else "float"
            raise ProgramError("result", f"{call} must be a dict from str to {form}.")
        most = self.limits.most_features
        if not 0 < len(value) <= most:
            raise ProgramError(
                "result",
                f"{call} has {len(value)} entries: at least 1, at most {most}.",
            )
        # A name stands in prompts and logs, on one line.
        if not all(map(fits_name, value)):
            raise ProgramError("result", f"A name in {call} needs 1 to 60 printable characters.")
        if subgoals:
            if not all(type(entry) is bool for entry in value.values()):
                raise ProgramError("result", f"Every value of {call} must be True or False.")
            return dict(sorted(value.items()))
        return {
            name: _number(value[name], f"feature {name!r}", -LARGEST, LARGEST)
            for name in sorted(value)
        }


def _number(value: Any, what: str, low: float, high: float) -> float:
    if type(value) not in (bool, int, float):
        raise ProgramError("result", f"{what} must be a float, got {type(value).__name__}.")
    if not low <= value <= high:  # NaN too
        shown = f"{value:g}" if type(value) is float else "a number out of range"
        raise ProgramError("result", f"{what} must lie in [{low:g}, {high:g}], got {shown}.")
    return float(value)


def _program_error(error: Exception) -> ProgramError:
    text = error.display() if hasattr(error, "display") else str(error)
    inner = error.exception() if hasattr(error, "exception") else error
    kinds = {TimeoutError: "timeout", MemoryError: "memory", RecursionError: "memory"}
    return ProgramError(kinds.get(type(inner), "error"), text)


def _monty() -> Any:
    try:
        import pydantic_monty
    except ImportError as err:
        raise ImportError(_MISSING) from err
    return pydantic_monty


# By process: a pool hangs in a forked child, where it must not even be released.
_POOLS: dict[int, Any] = {}


def _new_pool() -> Any:
    return _monty().Monty(min_processes=1, max_processes=1)


def _pool() -> Any:
    pid = os.getpid()
    if pid not in _POOLS:
        if _POOLS:
            raise RuntimeError(
                "This process was forked from one that had run programs, where the sandbox would "
                "hang: start it by multiprocessing's 'spawn' or 'forkserver'."
            )
        pool = _POOLS[pid] = _new_pool()
        pool.__enter__()
        atexit.register(_close, pid)
    return _POOLS[pid]


def _close(pid: int) -> None:
    if pid == os.getpid():
        _POOLS.pop(pid).__exit__(None, None, None)
