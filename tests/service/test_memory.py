"""What a service keeps of its calls: the advice, and not the megabytes it came in."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import pytest

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.advisors.recorded import RecordedAdvisor, RecordingAdvisor
from lore_torchrl.service import AdviceCache, AdviceService, CallBudget, Query, StepSignals

SIZE = 2**18
CALLS = 16


def question(n: int) -> AdviceRequest:
    return AdviceRequest(f"It is {n}.", ("left", "right"), str(n), image=bytes(SIZE))


def step(service: AdviceService, n: int) -> None:
    query = Query(str(n), lambda: question(n), abstract_state=f"room {n}")
    service.step([query], StepSignals([1.0], rewards=[0.0]))


class Verbose:
    """Answers with a raw text of 256 KiB."""

    async def advise(self, requests):
        return [Advice((0.0, 3.0), raw=f"{item.cache_key}{'x' * SIZE}") for item in requests]


@pytest.mark.parametrize("mode", ["async", pytest.param("blocking", marks=pytest.mark.slow)])
def test_neither_raw_answers_nor_pictures_stay_in_memory(tmp_path, mode):
    recorder = RecordingAdvisor(Verbose(), tmp_path / "answers.sqlite")
    cache = AdviceCache(answers_averaged=3)
    service = AdviceService(recorder, budget=CallBudget(100), cache=cache, mode=mode)
    # The first call starts the thread.
    tracemalloc.start()
    try:
        with service:
            step(service, 0)
            service.drain(5.0)
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            for n in range(1, CALLS):
                step(service, n)
                service.drain(5.0)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
            assert service.lookup("7") == Advice((0.0, 3.0))
            assert service.question(8).description == "It is 7."
    finally:
        tracemalloc.stop()
        recorder.close()
    assert after - before < SIZE
    # Who records has seen it.
    (answer,) = asyncio.run(RecordedAdvisor(tmp_path / "answers.sqlite").advise([question(7)]))
    assert answer.raw.startswith("7xxx")


def test_a_cache_that_is_used_by_itself_keeps_no_raw_answer():
    cache = AdviceCache()
    cache.put("wall", Advice((0.0, 3.0), raw="x" * SIZE))
    assert cache.get("wall") == Advice((0.0, 3.0))
    assert cache.get("wall").raw == ""
