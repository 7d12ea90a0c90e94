"""The programs in use: what they computed, how often they failed, which are retired."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
from torchrl._utils import logger as torchrl_logger

from lore_torchrl.sandbox.bandit import ProgramBandit
from lore_torchrl.sandbox.program import Program
from lore_torchrl.sandbox.ranking import score
from lore_torchrl.sandbox.sandbox import Limits, ProgramError, Sandbox

# Results kept for each program, and steps and episodes that scores are of.
_KEPT, _STEPS, _SCORED_EVERY = 4096, 4096, 16


class UsedProgram:
    """One program in use.

    Attributes:
        program: The program.
        columns: Where its features or subgoals stand; of progress its one column.
        retired: Why it no longer runs, ``None`` while it does.
        score: What its values have told of returns, ``None`` while unknown.
        error: The last line of its last failure, empty without one.
        seen: Values and the return that followed, of the last 4,096 steps, which it is scored by.
        episodes: Episodes that were seen.
    """

    def __init__(self, program: Program, columns: slice, bandit: ProgramBandit) -> None:
        self.program, self.columns, self.bandit = program, columns, bandit
        self.names: list[str] | None = program.checks.get("names")
        self.retired: str | None = None
        self.score: float | None = program.checks.get("score")
        self.error = ""
        self.run = self.failed = self.cached = 0
        self._results: OrderedDict[str, np.ndarray] = OrderedDict()
        self.seen: deque[tuple[np.ndarray, float]] = deque(maxlen=_STEPS)
        self.episodes = 0

    def compute(self, sandbox: Sandbox, view: Mapping[str, Any], key: str) -> np.ndarray | None:
        """Return the values of a view, ``None`` where the program fails."""
        if key in self._results:
            self._results.move_to_end(key)
            self.cached += 1
            return self._results[key]
        self.run += 1
        try:
            result = sandbox.run(self.program, view)
            if isinstance(result, dict):
                self.names = self.names or list(result)
                if list(result) != self.names:
                    raise ProgramError("result", "The names are other ones than before.")
                result = list(result.values())
                width = self.columns.stop - self.columns.start
                if len(result) > width:
                    raise ProgramError("result", f"{len(result)} entries for {width} columns.")
        except ProgramError as error:
            self.failed += 1
            self.error = str(error).strip().rsplit("\n", 1)[-1]
            return None
        values = self._results[key] = np.atleast_1d(np.asarray(result, dtype=np.float32))
        if len(self._results) > _KEPT:
            self._results.popitem(last=False)
        return values

    def observe(self, values: np.ndarray, returns: np.ndarray) -> None:
        """Take note of an episode's values ``[T, N]`` and raw returns from each step on ``[T]``."""
        self.seen.extend(zip(values, returns.tolist(), strict=True))
        self.episodes += 1
        if self.episodes % _SCORED_EVERY == 0:
            seen, following = zip(*self.seen, strict=True)
            values = np.stack(seen)
            values = values[:, 0] if self.program.kind == "progress" else values
            told = score(values, np.array(following))
            self.score = self.score if told is None else told


class ProgramSet:
    """Runs programs of one kind, counts their failures and retires those that do not work or pay.

    Results are kept by what was seen, so that a program runs once for each different view.

    Args:
        programs: Programs of one kind, best known first.

    Keyword Args:
        columns: Features or subgoals of all programs together; a program that comes later takes
            those that are free, and those of a retired one stay 0. Default: ``8``.
        limits: What a run may take. Default: ``Limits()``.
        max_failures: Failures after which a program is retired. Default: ``20``.
        off_share: As of :class:`~lore_torchrl.sandbox.ProgramBandit`. Default: ``0.0``.
        block_episodes: As there. Default: ``16``.
        seed: Seed of the bandits. Default: ``0``.

    Raises:
        ValueError: If there is no program, kinds are mixed, or columns do not suffice.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        columns: int = 8,
        limits: Limits | None = None,
        max_failures: int = 20,
        off_share: float = 0.0,
        block_episodes: int = 16,
        seed: int = 0,
    ) -> None:
        if not programs:
            raise ValueError("A ProgramSet needs at least one program.")
        self.kind, self.columns = programs[0].kind, columns
        self.sandbox, self.max_failures, self.seed = Sandbox(limits), max_failures, seed
        self._bandit = {"off_share": off_share, "block_episodes": block_episodes}
        self._where = ""
        self.used: list[UsedProgram] = []
        for program in programs:
            self.add(program)

    def add(self, program: Program) -> None:
        """Take one more program.

        Raises:
            ValueError: If it is of another kind or version in use, or too few columns are free.
        """
        if program.kind != self.kind or program.code_id in {u.program.code_id for u in self.used}:
            raise ValueError(
                f"{program.kind} program {program.code_id} is of another kind than {self.kind}, or "
                "in use already."
            )
        first = self.used[-1].columns.stop if self.used and self.kind != "progress" else 0
        names = program.checks.get("names")
        # What was never checked may take all that is left.
        width = 1 if self.kind == "progress" else len(names or range(self.columns - first))
        if not 0 < width <= self.columns - first:
            setting = "lore.features.columns" if self.kind == "features" else "columns"
            unchecked = [u.program.code_id for u in self.used if not u.program.checks.get("names")]
            way = f"raise {setting}"
            if unchecked:
                way = f"{unchecked[0]}, which was never checked, has taken all: put it last"
            raise ValueError(
                f"Program {program.code_id} needs {width or 'some'} of {self.columns - first} free "
                f"columns: {way}."
            )
        bandit = ProgramBandit(**self._bandit, seed=self.seed + len(self.used))
        self.used.append(UsedProgram(program, slice(first, first + width), bandit))

    def active(self) -> list[UsedProgram]:
        """Return the programs that are not retired, best score first.

        An unknown score counts as 1 in a program's first 16 episodes, and as 0 after.
        """

        def worth(used: UsedProgram) -> float:
            return float(used.episodes < _SCORED_EVERY) if used.score is None else used.score

        # Python's sort is stable: equal ones keep their order.
        return sorted((u for u in self.used if u.retired is None), key=worth, reverse=True)

    def compute(
        self, programs: Sequence[UsedProgram], view: Mapping[str, Any]
    ) -> dict[UsedProgram, np.ndarray]:
        """Return the values of those ``programs`` that did not fail on a view."""
        key = repr(view)
        found = {}
        for used in programs:
            values = used.compute(self.sandbox, view, key)
            if values is not None:
                found[used] = values
            self._retire_failed(used)
        return found

    def fail(self, programs: Sequence[UsedProgram], error: str) -> None:
        """Count a view that could not be had as a failure of each of the ``programs``."""
        for used in programs:
            used.failed, used.error = used.failed + 1, error
            self._retire_failed(used)

    def _retire_failed(self, used: UsedProgram) -> None:
        if used.retired is None and used.failed >= self.max_failures:
            self.retire(used, f"{used.failed} failures, the last: {used.error}")

    def observe(self, used: UsedProgram, block: int, episode_return: float) -> None:
        """Tell a program's bandit what an episode returned, and retire one that does not pay."""
        used.bandit.observe(block, episode_return)
        if used.retired is None and not used.bandit.pays:
            self.retire(used, f"return {used.bandit.gain:+.3g} with it")

    def retire(self, used: UsedProgram, reason: str) -> None:
        """Run a program no more."""
        used.retired = reason
        torchrl_logger.warning(
            f"{self.kind} program {used.program.code_id} by {used.program.model} is retired"
            f"{self._where}: {reason}."
        )

    def for_evaluation(self) -> ProgramSet:
        """Return the same programs, of which one evaluation counts and retires on its own."""
        held_out = copy(self)
        held_out.used = [copy(used) for used in self.used]
        for used in held_out.used:
            used.failed, used._results = 0, used._results.copy()
        held_out._where = " in this evaluation"
        return held_out

    def stats(self) -> dict[str, float]:
        """Return counts for the log, and the best score that is known."""
        values = {
            "run": sum(used.run for used in self.used),
            "cached": sum(used.cached for used in self.used),
            "failed": sum(used.failed for used in self.used),
            "retired": sum(used.retired is not None for used in self.used),
            "score": max((used.score or 0.0 for used in self.active()), default=0.0),
        }
        return {name: float(value) for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return all that was learned, by version; results are computed again."""
        return {
            used.program.code_id: {
                "run": used.run,
                "cached": used.cached,
                "failed": used.failed,
                "retired": used.retired,
                "score": used.score,
                "names": used.names,
                "bandit": used.bandit.state_dict(),
                "episodes": used.episodes,
                "seen": [(values.tolist(), following) for values, following in used.seen],
            }
            for used in self.used
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            ValueError: If the programs there are not the first ones here, in their order: replay
                holds what they computed. Of subgoals, whose number the networks know, there may
                be no further ones.
        """
        now = [used.program.code_id for used in self.used]
        fixed = self.kind == "subgoals"
        if list(state_dict) != (now if fixed else now[: len(state_dict)]):
            raise ValueError(
                f"{self.kind}: the checkpoint's run had the programs {', '.join(state_dict)}, now "
                f"there are {', '.join(now)}. Keep those of the file and their order, "
                f"{'add none' if fixed else 'add further ones after them'}, or start a new run."
            )
        for used in self.used:
            state = dict(state_dict.get(used.program.code_id, {}))
            if state:
                used.bandit.load_state_dict(state.pop("bandit"))
                seen = [(np.array(v, dtype=np.float32), g) for v, g in state.pop("seen")]
                vars(used).update(state, seen=deque(seen, maxlen=_STEPS))
