"""What a shared store may do to a run: damage, locks, a full disk. It costs advice alone."""

from __future__ import annotations

import math
import multiprocessing
import sqlite3
import statistics
import time

import pytest
from questions import ACTIONS, ask, request, step
from torchrl import logger as torchrl_logger

from lore_torchrl.advisors.base import Advice
from lore_torchrl.advisors.errors import Usage
from lore_torchrl.service import (
    AdviceCache,
    AdviceService,
    AdviceStore,
    CallBudget,
    Query,
    StepSignals,
    StoreError,
)
from lore_torchrl.service.store import StoreBusyError, patience

GOOD = Advice(logits=(0.0, 3.0), confidence=0.5)
# In place of the table's own: without the constraints that keep foreign values out.
LOOSE = """
    ALTER TABLE advice RENAME TO strict;
    CREATE TABLE advice (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, prefix, key, answer, abstract_state,
        UNIQUE (prefix, key)
    );
    INSERT INTO advice SELECT * FROM strict;
    DROP TABLE strict;
"""


class Right:
    """Counts what it is asked, as a server would."""

    def __init__(self, usage: Usage | None = None):
        self.asked: list[str] = []
        self.usage = usage or Usage()

    async def advise(self, requests):
        self.asked += [item.cache_key for item in requests]
        return [Advice(GOOD.logits, GOOD.confidence, self.usage) for _ in requests]


def make_service(path, advisor=None, total=10, **config):
    store = AdviceStore(path)
    cache = AdviceCache(store=store)
    cache.expect(len(ACTIONS))
    budget = CallBudget(total, store=store)
    config.setdefault("timeout_s", 5.0)
    return AdviceService(advisor or Right(), budget=budget, cache=cache, **config)


def look(service, key, **near):
    """Return what a row in a situation gets without asking."""
    return step(service, key, armed=False, **near)[0].advice


@pytest.fixture
def path(tmp_path):
    """A store with an answer, 1 of 10 calls spent."""
    path = tmp_path / "shared.sqlite"
    with make_service(path) as service:
        step(service, "wall", abstract_state="room")
    return path


def test_a_service_closes_its_store_whether_it_asked_or_not(path):
    service = make_service(path)
    for key in ("wall", "door"):
        step(service, key)
        assert service.cache.store._connections
        service.close()
        assert not service.cache.store._connections
    assert service.budget.spent == 2, "the first answer was stored"


@pytest.fixture
def warnings(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(torchrl_logger, "warning", lines.append)
    return lines


def test_a_store_that_goes_bad_leaves_what_memory_shares(path):
    with make_service(path) as service:
        assert service.lookup("wall") == GOOD and service.budget.spent == 1
        service.cache.store.close()
        for file in path.parent.iterdir():
            file.unlink()
        path.write_bytes(b"no database" * 1000)
        assert step(service, "hall", abstract_state="room")[0].advice == GOOD
        assert step(service, "door")[0].advice is None
        assert service.errors.total() > 0


def execute(path, sql, *values):
    with sqlite3.connect(path) as connection:
        connection.execute(sql, values)
    connection.close()


def ledger(path):
    with sqlite3.connect(path) as connection:
        (row,) = connection.execute("SELECT calls, tokens, cost FROM ledger").fetchall()
    connection.close()
    return row


# ---- rows that cannot be read ----

DAMAGED = {
    "no JSON": {"answer": "[[0.0, 1.0], 1.0"},
    "cut nesting": {"answer": "[" * 100_000},
    "another shape": {"answer": '{"logits": [0, 1]}'},
    "one number": {"answer": "7"},
    "text for numbers": {"answer": '[["0", "1"], 1.0]'},
    "truth values": {"answer": "[[true, false], 1.0]"},
    "three logits": {"answer": "[[0.0, 1.0, 2.0], 1.0]"},
    "no logits": {"answer": "[[], 1.0]"},
    "NaN": {"answer": "[[NaN, 1.0], 1.0]"},
    "infinity": {"answer": "[[1e999, 1.0], 1.0]"},
    "a huge integer": {"answer": f"[[{10**400}, 1.0], 1.0]"},
    "more digits than Python reads": {"answer": f"[[{'9' * 5000}, 1.0], 1.0]"},
    "confidence": {"answer": "[[0.0, 1.0], 2.0]"},
    "confidence of none": {"answer": "[[0.0, 1.0], null]"},
    "NULL answer": {"answer": None},
    "a number for an answer": {"answer": 2**62},
    "answer not UTF-8": {"answer": b"\xff\xfe\x00"},
    "NULL key": {"key": None},
    "key not UTF-8": {"key": b"\xff\xfe"},
    "a number for a class": {"abstract_state": 5},
    "class not UTF-8": {"abstract_state": b"\xff"},
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_row_is_skipped_counted_and_named_once(path, warnings, damage):
    connection = sqlite3.connect(path)
    connection.executescript(LOOSE)
    connection.close()
    row = {"prefix": "", "key": "door", "answer": "[[0.0, 1.0], 1.0]"} | damage
    places = ", ".join("?" * len(row))
    execute(path, f"INSERT INTO advice ({', '.join(row)}) VALUES ({places})", *row.values())
    with make_service(path) as service:
        for _ in range(3):
            assert service.lookup("wall") == GOOD
            assert look(service, "hall", abstract_state="room") == GOOD
            assert service.lookup("door") is None
        assert service.errors == {"store_row": 1}
        assert service.state_dict()["cache"]["entries"][0][0] == "wall"
        # A new answer takes the damaged row's place.
        assert ask(service, [request("door")]) == [GOOD]
    assert len(warnings) == 1, warnings
    (line,) = warnings
    assert f"{path}, row 2 of advice, key {row['key']!r}: " in line
    if row["key"] == "door":
        with make_service(path) as service:
            assert service.lookup("door") == GOOD
            assert not service.errors


def test_a_checkpoint_mends_the_row_that_it_has_the_answer_of(path):
    with make_service(path) as service:
        service.lookup("wall")
        state = service.state_dict()
    execute(path, "UPDATE advice SET answer = 'damaged'")
    with make_service(path) as service:
        service.load_state_dict(state)
        assert service.lookup("wall") == GOOD
    with make_service(path) as service:
        assert service.lookup("wall") == GOOD


# ---- a ledger that cannot be read ----


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("calls", "many"),
        ("calls", -3),
        ("calls", 2.5),
        ("calls", b"\x01"),
        ("calls", 1e300),
        ("tokens", "many"),
        ("tokens", -1),
        ("cost", "free"),
        ("cost", math.inf),
        ("cost", -1.0),
    ],
)
@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_a_damaged_ledger_stops_the_calls_and_not_the_run(path, warnings, mode, column, value):
    execute(path, f"UPDATE ledger SET {column} = ?", value)
    before = ledger(path)
    advisor = Right()
    with make_service(path, advisor, mode=mode) as service:
        assert service.lookup("wall") == GOOD
        for key in "abc":
            assert step(service, key)[0].advice is None
        with pytest.raises(StoreError):
            service.budget.settle(Usage(prompt_tokens=5, cost=1.0))
        service.stats()
        assert service.errors == {"ledger": 3}
        state = service.state_dict()
    assert advisor.asked == []
    assert ledger(path) == before
    (line,) = warnings
    assert str(path) in line and f"{column}={value!r}" in line and "another ledger" in line
    with make_service(path, advisor) as service:
        service.load_state_dict(state)
        ask(service, [request("d")])
    assert advisor.asked == [] and ledger(path) == before


def test_damage_while_a_run_goes_on_leaves_what_was_known(path):
    with make_service(path) as service:
        ask(service, [request("a")])
        assert service.budget.remaining == 8
        execute(path, "UPDATE ledger SET calls = NULLIF('', 'x')")
        assert ask(service, [request("b")]) == [None]
        assert service.budget.remaining == 8
        assert service.state_dict()["budget"]["spent"] == 2


# ---- a store that another process has locked ----


@pytest.fixture
def other(path):
    """Another program's connection to the store."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    yield connection
    connection.close()


def timed_step(service, key):
    """Let a step pass, and look for late answers; return its seconds and its reply."""
    started = time.monotonic()
    (reply,) = step(service, key)
    service.answers(())
    return time.monotonic() - started, reply


def lock(other, how):
    if how == "whole file":
        # Readers too are kept out, as on a file system without shared memory.
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    other.execute("CREATE TABLE theirs (x)")


@pytest.mark.parametrize("how", ["writers", "whole file"])
def test_no_step_of_an_async_run_waits_for_a_locked_store(path, other, how):
    advisor = Right()
    with make_service(path, advisor, mode="async") as service:
        if how == "writers":
            normal = statistics.median(timed_step(service, f"before {n}")[0] for n in range(3))
            service.drain(5.0)
        else:
            normal = 0.0
        asked = len(advisor.asked)
        lock(other, how)
        slow = [timed_step(service, f"meanwhile {n}") for n in range(9)]
        assert statistics.median(seconds for seconds, _ in slow) < normal + 0.05
        assert all(reply == (0, None, False) for _, reply in slow)
        assert len(advisor.asked) == asked
        assert service.errors == {"store_busy": 9}
        other.execute("ROLLBACK")
        other.close()
        assert timed_step(service, "after")[1].advice_id > 0
        assert service.drain(5.0) == 0
        assert ledger(path)[0] == 1 + len(advisor.asked) == 1 + service.stats()["calls"]


@pytest.mark.parametrize(("mode", "longest"), [("async", 0.15), ("blocking", 0.4)])
def test_the_steps_of_plans_wait_for_a_locked_store_together(path, other, mode, longest):
    plan = Advice(GOOD.logits, plan=(1,))
    with make_service(path, mode=mode) as service:
        step(service, "wall")
        lock(other, "writers")
        started = time.monotonic()
        queries = [
            Query(f"step {row}", lambda: request("none"), row, planned=plan) for row in range(8)
        ]
        replies = service.step(queries, StepSignals([0.0] * 8, rewards=[0.0] * 8))
        assert time.monotonic() - started < longest
        assert [reply.advice for reply in replies] == [plan] * 8
        other.execute("ROLLBACK")


def test_a_blocking_step_waits_within_its_deadline(path, other):
    advisor = Right()
    with make_service(path, advisor, timeout_s=1.0) as service:
        timed_step(service, "before")
        lock(other, "writers")
        seconds, reply = timed_step(service, "meanwhile")
        assert seconds < 1.0 and reply.advice is None
        other.execute("ROLLBACK")
        assert timed_step(service, "meanwhile")[1].advice == GOOD
    assert advisor.asked == ["before", "meanwhile"]


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_an_answer_that_finds_the_store_locked_is_charged_with_the_next(path, other, mode):
    class LocksIt(Right):
        async def advise(self, requests):
            if len(self.asked) < 2:
                lock(other, "writers")
            answers = await super().advise(requests)
            return answers

    usage = Usage(prompt_tokens=10, cost=0.5)
    with make_service(path, LocksIt(usage), mode=mode, timeout_s=5.0) as service:
        questions = [request("a"), request("b")]
        started = time.monotonic()
        service.ask(questions)
        service.drain(5.0)
        # They wait together, not each for itself.
        assert time.monotonic() - started < 1.0
        assert service.lookup("a") == service.lookup("b") == GOOD
        assert ledger(path) == (3, 0, 0.0)
        assert (service.budget.tokens, service.budget.cost) == (20, 1.0)
        other.execute("ROLLBACK")
        ask(service, [request("c")])
        service.drain(5.0)
        assert ledger(path) == (4, 30, 1.5)
        state = service.state_dict()
    with make_service(path) as service:
        assert [service.lookup(key) for key in "abc"] == [None, None, GOOD]
        # They are in the checkpoint, from which the store gets what it lacks.
        service.load_state_dict(state)
    with make_service(path) as service:
        assert all(service.lookup(key) == GOOD for key in "abc")


def test_patience_bounds_all_waits_of_a_block_together(path, other):
    store = AdviceStore(path)
    lock(other, "writers")
    started = time.monotonic()
    with patience(0.1), patience(10.0):
        for _ in range(5):
            with pytest.raises(StoreBusyError, match=r"shared\.sqlite .*locked"), store.write():
                raise AssertionError("the store is locked")
    assert 0.05 < time.monotonic() - started < 2.0


# ---- a store that cannot be written at all ----


def open_on_a_full_disk(path, results):
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    started = time.monotonic()
    try:
        AdviceStore(path).read("SELECT 1")
    except StoreError as error:
        results.send((time.monotonic() - started, type(error), str(error)))


def test_a_full_disk_fails_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    received, results = context.Pipe(duplex=False)
    child = context.Process(target=open_on_a_full_disk, args=(tmp_path / "full.sqlite", results))
    child.start()
    assert received.poll(30)
    seconds, kind, message = received.recv()
    child.join(10)
    assert seconds < 2.0 and kind is StoreError
    assert "full.sqlite cannot be used" in message and "with room" in message


def test_a_path_that_cannot_be_opened_fails_at_once(tmp_path):
    (tmp_path / "file").touch()
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"a\.sqlite cannot be used"):
        AdviceStore(tmp_path / "file" / "a.sqlite").read("SELECT 1")
    assert time.monotonic() - started < 2.0


def test_what_a_full_disk_refuses_stays_in_memory(path):
    store = AdviceStore(path)
    cache = AdviceCache(store=store)
    with store.write() as connection:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
    key = "k" * 50_000
    started = time.monotonic()
    with pytest.raises(StoreError, match="full"):
        cache.put(key, GOOD)
    assert time.monotonic() - started < 2.0
    assert cache.get(key) == GOOD
    with store.write() as connection:
        connection.execute("PRAGMA max_page_count = 1000000")
    cache.put("next", GOOD)
    assert all(AdviceCache(store=store).get(name) == GOOD for name in ("wall", "next"))
    assert cache.get(key) == GOOD


def test_another_programs_mark_is_enough_to_leave_a_file_alone(tmp_path):
    path = tmp_path / "theirs.sqlite"
    execute(path, "PRAGMA application_id = 7")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program's database"):
        CallBudget(5, store=AdviceStore(path)).spend()
    assert path.read_bytes() == before
