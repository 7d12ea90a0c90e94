"""Ask for a program once and tell everything about it, as text for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lore_torchrl.advisors.errors import AdviceError
from lore_torchrl.advisors.redaction import redact, remember, secrets_of, visible
from lore_torchrl.sandbox.checks import judged
from lore_torchrl.sandbox.program import Kind, Program, ProgramStore
from lore_torchrl.sandbox.sandbox import ProgramError, Sandbox
from lore_torchrl.sandbox.writer import ProgramWriter, program_prompt

if TYPE_CHECKING:
    # It needs the http extra.
    from lore_torchrl.advisors.chat import ChatAdvisor

_SHOWN = 5


async def program_once(
    kind: Kind,
    views: Sequence[Mapping[str, Any]],
    returns: Sequence[float],
    *,
    env: str,
    fields: Mapping[str, str],
    advisor: ChatAdvisor | None,
    hand_written: Program | None = None,
    store: ProgramStore | None = None,
) -> tuple[str, bool]:
    """Ask for a program, check it, run it; return the report, and whether there is a program.

    Args:
        kind: ``"features"``, ``"progress"`` or ``"subgoals"``.
        views: Recorded observations as a program sees them.
        returns: The return that followed each.

    Keyword Args:
        env: Name of the environment.
        fields: The describer's ``program_fields``.
        advisor: Whom to ask; ``None`` checks ``hand_written``.
        hand_written: The adapter's own program, needed without ``advisor``. Default: ``None``.
        store: Where the program is kept, a model's failed attempts too. Default: ``None``,
            nowhere.
    """
    about = {"env": env, "mission": views[0].get("mission", ""), "fields": fields}
    lines = ["Prompt", "------", str(program_prompt(kind, example=views[0], **about)), ""]
    failure: Exception | None = None
    if advisor is None:
        lines += ["No model is asked: this is the adapter's hand-written program.", ""]
        program, failure = judged(hand_written, views, returns=returns)
        if store is not None:
            store.append(program)
    else:
        remember(*secrets_of(advisor))
        writer = ProgramWriter(advisor, store)
        try:
            program = await writer.write(kind, views=views, returns=returns, **about)
        except (ProgramError, AdviceError) as error:
            program, failure = None, error
        finally:
            await advisor.aclose()
    if program is not None:
        lines += ["Program", "-------", *map(visible, program.code.splitlines()), ""]
        lines += [f"{'written by':12s} {program.model}", f"{'code_id':12s} {program.code_id}"]
        lines += [f"{'retries':12s} {len(program.errors)}"]
        lines += [f"{name:12s} {value}" for name, value in program.checks.items()]
    if failure is not None:
        lines += ["", "Error", "-----", *map(visible, str(failure).splitlines())]
        return redact("\n".join(lines)), False
    lines += ["", f"On {_SHOWN} of {len(views)} recorded observations"]
    for view in views[:: max(1, len(views) // _SHOWN)][:_SHOWN]:
        lines.append(f"  {Sandbox().run(program, view)}")
    return redact("\n".join(lines)), True
