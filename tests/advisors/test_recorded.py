import asyncio
import json
import multiprocessing
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from lore_torchrl.advisors.base import Advice, AdviceRequest, Advisor
from lore_torchrl.advisors.errors import (
    AdviceError,
    ConnectionLostError,
    FatalAdviceError,
    NotRecordedError,
    QuotaError,
    StatusError,
    Usage,
)
from lore_torchrl.advisors.flawed import StaleAdvisor
from lore_torchrl.advisors.recorded import RecordedAdvisor, RecordingAdvisor, model_name
from lore_torchrl.advisors.redaction import Secret, redact, remember, secrets_of
from lore_torchrl.service import (
    AdviceCache,
    AdviceService,
    AdviceStore,
    CallBudget,
    CallPolicy,
    StoreError,
)

ACTIONS = ("left", "right")
KEY = "sk-a-key-that-nobody-may-see"
RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"


def ask(key: str, **changes) -> AdviceRequest:
    return AdviceRequest(
        **({"description": f"see {key}", "actions": ACTIONS, "cache_key": key} | changes)
    )


def answers(advisor, *requests):
    return asyncio.run(advisor.advise(list(requests)))


class Says:
    """Answers from a list, in turn; exceptions are raised."""

    model = "test-model"

    def __init__(self, *turns):
        self.turns = list(turns)

    async def advise(self, requests):
        turn = self.turns.pop(0)
        if isinstance(turn, BaseException):
            raise turn
        return turn


def rows(path, columns="*"):
    with closing(sqlite3.connect(path)) as database:
        return database.execute(f"SELECT {columns} FROM answers ORDER BY id").fetchall()


def recorded(path, *turns, requests=None):
    """Record one call a turn; return what came out."""
    recorder = RecordingAdvisor(Says(*turns), path)
    out = []
    for turn in turns:
        asked = requests or [ask(f"k{i}") for i in range(len(turn))]
        try:
            out.append(answers(recorder, *asked))
        except Exception as error:
            out.append(error)
    recorder.close()
    return out


def test_a_row_holds_request_answer_and_cost(tmp_path):
    path = tmp_path / "new" / "advice.sqlite"
    advice = Advice((0.1, -2.5), 0.25, Usage(10, 3, 0.5), raw="go left")
    recorded(path, [advice], requests=[ask("k", mission="reach the goal")])
    columns = "id, cache_key, model, mission, description, actions, logits, confidence, raw"
    request = (1, "k", "test-model", "reach the goal", "see k", '["left", "right"]')
    assert {file.name for file in path.parent.iterdir()} == {path.name, f"{path.name}-lock"}
    assert rows(path, columns) == [(*request, "[0.1, -2.5]", 0.25, "go left")]
    ((kind, latency, *cost),) = rows(
        path, "error_kind, latency_s, prompt_tokens, completion_tokens, cost"
    )
    assert kind is None and latency >= 0 and cost == [10, 3, 0.5]
    (answer,) = answers(RecordedAdvisor(path), ask("k"))
    assert (answer, answer.usage, answer.raw) == (advice, advice.usage, "go left")


def test_half_an_emoji_costs_neither_answer_nor_record(tmp_path):
    recorded(tmp_path / "a", [Advice((0.0, 1.0), raw="ok \ud83d")], requests=[ask("k")])
    (answer,) = answers(RecordedAdvisor(tmp_path / "a"), ask("k"))
    assert (answer.logits, answer.raw) == ((0.0, 1.0), "ok ?")


def test_every_bit_of_a_logit_survives(tmp_path):
    values = (np.float32(0.1), 1 / 3)
    recorded(tmp_path / "a", [Advice(values)], requests=[ask("k")])
    (answer,) = answers(RecordedAdvisor(tmp_path / "a"), ask("k"))
    assert answer.logits == values and type(answer.logits[0]) is float


def test_errors_happen_again_with_class_kind_and_cost(tmp_path):
    errors = [
        QuotaError(429, "all used up", usage=Usage(7)),
        StatusError(503, "busy"),
        ConnectionLostError("reset"),
    ]
    recorded(tmp_path / "a", [*errors, None])
    again = answers(RecordedAdvisor(tmp_path / "a"), *(ask(f"k{i}") for i in range(4)))
    assert [type(error) for error in again] == [*map(type, errors), type(None)]
    assert [error.kind for error in again[:3]] == ["quota", "status_503", "connection"]
    assert again[0].usage == Usage(7) and again[1].status == 503 and str(again[2]) == "reset"


@pytest.mark.parametrize(
    ("turn", "kind"),
    [
        (QuotaError(402, "no money", usage=Usage(5)), "quota"),
        (ConnectionError("the server is down"), "ConnectionError"),
        ([Advice((0.0, 1.0))], "wrong_answer_count"),
        ([Advice((0.0, 1.0)), "left"], "wrong_type"),
    ],
)
def test_what_fails_in_the_original_fails_in_the_repetition(tmp_path, turn, kind):
    path, requests = tmp_path / "a", [ask("k0"), ask("k1")]

    def outcome(advisor):
        with AdviceService(advisor, budget=CallBudget(2)) as service:
            got = service.ask(requests)
            return got, dict(service.errors), service.stats()["failed"]

    original = outcome(RecordingAdvisor(Says(turn), path))
    assert kind in original[1]
    assert outcome(RecordedAdvisor(path)) == original
    assert sum(tokens for (tokens,) in rows(path, "prompt_tokens")) == 5 * (kind == "quota")


def test_a_deadline_is_recorded(tmp_path):
    class Slow:
        async def advise(self, requests):
            await asyncio.sleep(30)

    path = tmp_path / "a"
    for build in (lambda: RecordingAdvisor(Slow(), path), lambda: RecordedAdvisor(path)):
        with AdviceService(build(), budget=CallBudget(1), timeout_s=0.05) as service:
            assert service.ask([ask("k")])[0].advice is None
            assert dict(service.errors) == {"timeout": 1}


def test_the_same_key_in_recorded_order_then_the_last(tmp_path):
    turns = [[Advice((float(i), 0.0))] for i in range(3)]
    recorded(tmp_path / "a", *turns)
    advisor = RecordedAdvisor(tmp_path / "a")
    got = [answers(advisor, ask("k0"))[0].logits[0] for _ in range(5)]
    assert got == [0, 1, 2, 2, 2]
    resumed = RecordedAdvisor(tmp_path / "a")
    answers(resumed, ask("k0"))
    state = json.loads(json.dumps(resumed.state_dict()))
    resumed = RecordedAdvisor(tmp_path / "a")
    resumed.load_state_dict(state)
    assert answers(resumed, ask("k0"))[0].logits[0] == 1


def test_missing_entries_stop_the_run_or_are_counted(tmp_path):
    recorded(tmp_path / "a", [Advice((0.0, 1.0))])
    masking = RecordedAdvisor(tmp_path / "a", missing="mask")
    known, unknown = answers(masking, ask("k0"), ask("other"))
    assert isinstance(known, Advice) and isinstance(unknown, NotRecordedError)
    (renamed,) = answers(masking, ask("k0", actions=("right", "left")))
    assert isinstance(renamed, NotRecordedError) and "is about ('left', 'right')" in str(renamed)
    strict = RecordedAdvisor(tmp_path / "a")
    with pytest.raises(FatalAdviceError, match="no answer to 'other'"):
        answers(strict, ask("other"))
    with AdviceService(strict, budget=CallBudget(9)) as service:
        assert service.ask([ask("k0")])[0].advice is not None
        with pytest.raises(FatalAdviceError, match="missing='mask'"):
            service.ask([ask("other")])
    with AdviceService(masking, budget=CallBudget(9)) as service:
        assert service.ask([ask("other")])[0].advice is None
        assert dict(service.errors) == {"not_recorded": 1}
        # It costs no call, and is not asked again.
        assert service.budget.spent == 0 and not service.cache.wants(masking.cache_prefix + "other")


def test_two_recordings_in_one_store_keep_their_answers(tmp_path):
    store = AdviceStore(tmp_path / "store")
    for path, logits in (("a", (0.0, 1.0)), ("b", (5.0, 0.0))):
        recorded(tmp_path / path, [Advice(logits)])
        advisor = RecordedAdvisor(tmp_path / path)
        cache = AdviceCache(store=store, prefix=advisor.cache_prefix)
        with AdviceService(advisor, budget=CallBudget(9), cache=cache) as service:
            assert service.ask([ask("k0")])[0].advice.logits == logits
            assert service.budget.spent == 1


@pytest.mark.parametrize("wrap", [lambda inner: inner, StaleAdvisor])
def test_a_resume_with_another_recording_begins_with_its_first_answer(tmp_path, wrap):
    for path, first in (("a", 1.0), ("b", 5.0)):
        recorded(tmp_path / path, [Advice((first, 0.0))], [Advice((first + 1, 0.0))])

    def over(path):
        advisor = wrap(RecordedAdvisor(tmp_path / path))
        cache = AdviceCache(prefix=advisor.cache_prefix)
        return AdviceService(advisor, budget=CallBudget(9), cache=cache)

    with over("a") as service:
        service.ask([ask("k0")])
        state = service.state_dict()
    with over("b") as fresh, over("b") as resumed:
        resumed.load_state_dict(state)
        first, second = (service.ask([ask("k0")])[0].advice for service in (fresh, resumed))
        assert first == second


def test_fatal_errors_pass_the_recorder_unrecorded(tmp_path):
    (error,) = recorded(tmp_path / "a", FatalAdviceError("stop"), requests=[ask("k")])
    assert isinstance(error, FatalAdviceError) and rows(tmp_path / "a") == []


# ---- concurrency and durability ----


def test_calls_under_way_at_once_are_all_recorded(tmp_path):
    class Scattered:
        async def advise(self, requests):
            await asyncio.sleep(0.001 * (int(requests[0].cache_key) % 7))
            return [Advice((float(r.cache_key), 0.0)) for r in requests]

    recorder = RecordingAdvisor(Scattered(), tmp_path / "a")

    async def run():
        await asyncio.gather(*(recorder.advise([ask(str(i))]) for i in range(60)))

    asyncio.run(run())
    recorder.close()
    replay = RecordedAdvisor(tmp_path / "a")
    assert len(replay) == 60
    got = answers(replay, *(ask(str(i)) for i in range(60)))
    assert [a.logits[0] for a in got] == list(range(60))


def _append(path, name, count):
    recorder = RecordingAdvisor(Says(*([Advice((0.0, 1.0))] for _ in range(count))), path)
    for i in range(count):
        answers(recorder, ask(f"{name}-{i}"))
    recorder.close()


def test_processes_share_a_file_and_a_fork_opens_its_own(tmp_path):
    context = multiprocessing.get_context("fork")
    path = str(tmp_path / "a")
    recorder = RecordingAdvisor(Says([Advice((0.0, 1.0))], [Advice((0.0, 1.0))]), path)
    answers(recorder, ask("before"))
    workers = [context.Process(target=_append, args=(path, name, 20)) for name in "ab"]
    workers.append(context.Process(target=answers, args=(recorder, ask("forked"))))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    answers(recorder, ask("after"))
    recorder.close()
    assert len(RecordedAdvisor(path)) == 43


def test_a_killed_process_loses_no_answer(tmp_path):
    code = (
        "import asyncio, os, signal, sys\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from test_recorded import Says, ask, Advice, RecordingAdvisor\n"
        "r = RecordingAdvisor(Says([Advice((1.0, 2.0))]), sys.argv[1])\n"
        "asyncio.run(r.advise([ask('k')]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    here = str(Path(__file__).parent)
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a"), here], timeout=60)
    assert result.returncode == -9
    assert answers(RecordedAdvisor(tmp_path / "a"), ask("k"))[0].logits == (1.0, 2.0)


def test_recorder_pickles_and_passes_state_and_prefix_through(tmp_path):
    class Stateful(Says):
        cache_prefix = "v1:"

        def state_dict(self):
            return {"turn": 3}

        def load_state_dict(self, state):
            self.loaded = state

    recorder = RecordingAdvisor(Stateful(), tmp_path / "a")
    assert isinstance(recorder, Advisor) and recorder.cache_prefix == "v1:"
    assert recorder.state_dict() == {"turn": 3}
    recorder.load_state_dict({"turn": 4})
    assert recorder.advisor.loaded == {"turn": 4}
    plain = RecordingAdvisor(Says([Advice((0.0, 1.0))]), tmp_path / "b")
    assert not hasattr(plain, "state_dict") and not hasattr(plain, "cache_prefix")
    copy = pickle.loads(pickle.dumps(plain))
    answers(copy, ask("k"))
    copy.close()
    assert len(rows(tmp_path / "b")) == 1


def test_answers_wait_while_another_program_has_the_file_locked(tmp_path):
    recorder = RecordingAdvisor(Says([Advice((0.0, 1.0))]), tmp_path / "a")
    with closing(sqlite3.connect(tmp_path / "a", check_same_thread=False)) as other:
        other.isolation_level = None
        other.execute("BEGIN IMMEDIATE")
        unlock = threading.Timer(5.5, other.execute, ("ROLLBACK",))  # SQLite's own patience is 5 s
        unlock.start()
        answers(recorder, ask("k"))
        unlock.join()
    assert len(rows(tmp_path / "a")) == 1
    recorder.close()


def test_a_file_that_cannot_be_written_stops_the_run(tmp_path):
    recorder = RecordingAdvisor(Says([Advice((0.0, 1.0))]), tmp_path / "a")
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(FatalAdviceError, match="cannot be written"):
        answers(recorder, ask("k"))


def test_a_recording_can_be_read_where_nothing_can_be_written(tmp_path):
    folder = tmp_path / "readonly"
    recorded(folder / "a", [Advice((0.0, 1.0))])
    os.chmod(folder, 0o500)
    try:
        assert len(RecordedAdvisor(folder / "a")) == 1
    finally:
        os.chmod(folder, 0o700)


# ---- secrets ----


@dataclass
class Settings:
    api_key: str = KEY


class Chatty(Says):
    def __init__(self, *turns):
        super().__init__(*turns)
        self.settings = Settings(KEY)
        self.headers = {"Authorization": "Bearer other-secret-value"}


def test_keys_never_reach_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "environment-secret")
    leaks = (
        f"{KEY} other-secret-value environment-secret Authorization: Bearer raised-one "
        "http://me:pw1234@host/"
    )
    turns = [
        RuntimeError(f"401 {leaks}"),
        [AdviceError(f"bad key {leaks}")],
        [Advice((0.0, 1.0), raw=f"your key is {leaks}")],
    ]
    path = tmp_path / "a"
    advisor = Chatty(*turns)
    advisor.model = f"model-{KEY}"
    recorder = RecordingAdvisor(advisor, path)
    for _ in turns[:1]:
        with pytest.raises(RuntimeError):
            answers(recorder, ask("k"))
    answers(recorder, ask("k", description=f"a wall with {KEY} on it"))
    answers(recorder, ask("k"))
    recorder.close()
    held = path.read_bytes()
    for secret in (KEY, "other-secret-value", "environment-secret", "raised-one", "pw1234"):
        assert secret.encode() not in held, secret
    assert rows(path, "error_message")[0][0].startswith("401 [redacted]")


def test_wrapped_secrets_are_found_and_words_are_not():
    class Outer:
        def __init__(self):
            self.advisor = Says()
            self.advisor.client = {"key": Secret("shhh-quiet"), "token": "none", "max_tokens": 5}
            self.advisor.myself = self

    found = secrets_of(Outer())
    assert "shhh-quiet" in found and "none" not in found
    remember(*found)
    assert redact("no token: open the door") == "no token: open the door"


# ---- names of failures ----

UNSAFE = ["../../x", "/tmp/x", "a\0b", "x" * 10_000, "", "é", "a b", None, 7]


def kinds_counted(advisor):
    with AdviceService(advisor, budget=CallBudget(1)) as service:
        assert service.ask([ask("k")])[0].advice is None
        return dict(service.errors)


@pytest.mark.parametrize("kind", UNSAFE, ids=range(len(UNSAFE)))
def test_a_kind_that_cannot_name_a_metric_is_counted_as_other(tmp_path, kind):
    error = type("TheirError", (AdviceError,), {"kind": kind})("no")
    assert kinds_counted(Says([error])) == {"other": 1}
    assert kinds_counted(RecordingAdvisor(Says([error]), tmp_path / "a")) == {"other": 1}
    with closing(sqlite3.connect(tmp_path / "a")) as database, database:
        database.execute("UPDATE answers SET error_kind = ?", (str(kind),))
    safe = str(kind) if kind in (None, 7) else "other"
    assert kinds_counted(RecordedAdvisor(tmp_path / "a")) == {safe: 1}


def test_a_class_that_cannot_name_a_metric_is_counted_as_other(tmp_path):
    error = type("../../x", (RuntimeError,), {})("no")
    assert kinds_counted(Says(error)) == {"other": 1}
    with pytest.raises(RuntimeError):
        answers(RecordingAdvisor(Says(error), tmp_path / "a"), ask("k"))
    assert kinds_counted(RecordedAdvisor(tmp_path / "a")) == {"other": 1}


def test_a_kind_in_a_recording_writes_nothing_outside_the_run_folder(tmp_path):
    pytest.importorskip("hydra")
    from lore_torchrl.configs import LoggerConfig
    from lore_torchrl.dreamer.logging import RunLogger
    from lore_torchrl.lore import advice_stats

    path = tmp_path / "answers.sqlite"
    recorded(path, [StatusError(500, "oops")])
    for kind in ("../../../../x", str(tmp_path / "absolute"), "nested/deep"):
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("UPDATE answers SET error_kind = ?", (kind,))
        with AdviceService(RecordedAdvisor(path), budget=CallBudget(1)) as service:
            service.ask([ask("k0")])
            row = advice_stats(service)
        assert row["advice/error_other"] == 1.0
        run = tmp_path / "a" / "b" / "run"
        before = {file for file in tmp_path.rglob("*") if run not in file.parents}
        logger = RunLogger(LoggerConfig(backends=["csv"]), run)
        logger.log(1, row)
        logger.close()
        after = {file for file in tmp_path.rglob("*") if run not in file.parents}
        assert after - before <= {run, *run.parents}
        assert (run / "csv").exists()


def test_kinds_beyond_64_share_one_metric():
    def fail(n):
        error = AdviceError("no")
        error.kind = f"request_{n}"
        return error

    with AdviceService(Says(*([fail(n)] for n in range(100))), budget=CallBudget(100)) as service:
        for n in range(100):
            service.ask([ask(str(n))])
        assert len(service.errors) == 65 and sum(service.errors.values()) == 100
        assert service.errors["other"] == 36
        state = service.state_dict()
        state["counters"]["errors"]["../x"] = 4
        service.load_state_dict(state)
        assert len(service.errors) == 65 and service.errors["other"] == 40


# ---- files that are no recordings ----


def test_bad_files_fail_at_construction(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.sqlite"):
        RecordedAdvisor(tmp_path / "nowhere.sqlite")
    recorded(tmp_path / "a", [Advice((0.0, 1.0))])
    with pytest.raises(ValueError, match="missing='ask'"):
        RecordedAdvisor(tmp_path / "a", missing="ask")
    with pytest.raises(FileExistsError, match="holds 1 answers"):
        RecordingAdvisor(Says(), tmp_path / "a", append=False)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        RecordingAdvisor(Says(), tmp_path)
    with pytest.raises(TypeError, match="advise"):
        RecordingAdvisor("nobody", tmp_path / "b")
    (tmp_path / "text").write_text("not a recording at all" * 10)
    for build in (RecordedAdvisor, lambda path: RecordingAdvisor(Says(), path)):
        with pytest.raises(ValueError, match="text"):
            build(tmp_path / "text")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="no recorded answer"):
        RecordedAdvisor(tmp_path / "empty")


def folder_of(path):
    """What lies beside a file, and what is in it."""
    return {
        file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.parent.iterdir()
    }


def theirs(path, *statements):
    with closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement)


@pytest.mark.parametrize(
    "statements",
    [
        ["CREATE TABLE birds (x)"],
        ["CREATE TABLE birds (x)", "PRAGMA journal_mode = WAL"],
        ["PRAGMA application_id = 7"],
        ["CREATE TABLE recording (bird TEXT)"],
        ["CREATE TABLE answers (bird TEXT)"],
        ["CREATE TABLE recording (format TEXT)", "CREATE TABLE answers (bird TEXT)"],
    ],
)
def test_another_programs_database_is_refused_and_left_as_it_is(tmp_path, statements):
    path = tmp_path / "theirs.sqlite"
    theirs(path, *statements)
    before = folder_of(path)
    for append in (False, True):
        with pytest.raises(ValueError, match=r"theirs\.sqlite"):
            RecordingAdvisor(Says(), path, append=append)
    with pytest.raises(ValueError, match=r"theirs\.sqlite"):
        RecordedAdvisor(path)
    assert folder_of(path) == before


def test_a_database_in_use_elsewhere_is_left_as_it_is(tmp_path):
    path = tmp_path / "theirs.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE birds (x)")
        # The table is in the WAL alone.
        with pytest.raises(ValueError, match="another program's database"):
            RecordingAdvisor(Says(), path)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("birds",)]


def test_a_store_of_advice_and_a_recording_cannot_be_one_file(tmp_path):
    with AdviceStore(tmp_path / "store") as store:
        CallBudget(1, store=store).spend()
    with pytest.raises(ValueError, match="another program's database"):
        RecordingAdvisor(Says(), tmp_path / "store")
    recorded(tmp_path / "recording", [Advice((0.0, 1.0))])
    with pytest.raises(StoreError, match="another program's database"):
        CallBudget(1, store=AdviceStore(tmp_path / "recording")).spend()


def test_a_file_that_a_run_records_to_is_closed_to_other_runs(tmp_path):
    path = tmp_path / "new.sqlite"
    first = RecordingAdvisor(Says([Advice((0.0, 1.0))]), path, append=False)
    for append in (False, True):
        with pytest.raises(FileExistsError, match=r"Another run is recording to .*new\.sqlite"):
            RecordingAdvisor(Says(), path, append=append)
    context = multiprocessing.get_context("fork")
    refused = context.Process(target=_append, args=(str(path), "a", 1))
    refused.start()
    refused.join(60)
    assert refused.exitcode == 1
    assert len(RecordedAdvisor(path)) == 0, "reading is free"
    # Nothing was recorded: the next may begin.
    first.close()
    RecordingAdvisor(Says(), path, append=False).close()


def test_a_killed_run_leaves_its_file_open_to_the_next(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, told = context.Pipe(duplex=False)

    def hold():
        held = RecordingAdvisor(Says(), tmp_path / "a", append=False)
        told.send(str(held.path))
        time.sleep(60)

    child = context.Process(target=hold)
    child.start()
    assert ready.poll(30)
    with pytest.raises(FileExistsError, match="Another run"):
        RecordingAdvisor(Says(), tmp_path / "a", append=False)
    child.kill()
    child.join(10)
    RecordingAdvisor(Says(), tmp_path / "a", append=False).close()


# ---- recordings of recordings ----


def test_a_replay_can_be_recorded_elsewhere(tmp_path):
    turns = [Advice((0.0, 1.0), 0.5, Usage(3), "go"), QuotaError(429, "all used up"), None]
    recorded(tmp_path / "a", turns)
    requests = [ask(f"k{i}") for i in range(3)]
    recorder = RecordingAdvisor(RecordedAdvisor(tmp_path / "a"), tmp_path / "b", append=False)
    answers(recorder, *requests)
    recorder.close()
    first, again, none = answers(RecordedAdvisor(tmp_path / "b"), *requests)
    assert (first, first.raw, first.usage) == (turns[0], "go", Usage(3))
    assert isinstance(again, QuotaError) and none is None


@pytest.mark.parametrize("append", [False, True])
def test_a_replay_cannot_be_recorded_to_its_own_source(tmp_path, monkeypatch, append):
    path = tmp_path / "a"
    recorded(path, [Advice((0.0, 1.0))])
    before = folder_of(path)
    monkeypatch.chdir(tmp_path)
    source = StaleAdvisor(RecordedAdvisor(path))
    with pytest.raises(ValueError, match=r"own answers are in 'a'.*another path"):
        RecordingAdvisor(source, "a", append=append)
    assert folder_of(path) == before
    with pytest.raises(ValueError, match=r"another path"):
        RecordingAdvisor(RecordingAdvisor(Says(), path), path)


# ---- damaged rows ----


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("cache_key", b"\xff"),
        ("actions", "left"),
        ("actions", '"left"'),
        ("actions", "[1]"),
        ("actions", "[" * 100_000),
        ("logits", "[0.0, 1.0"),
        ("logits", "7"),
        ("logits", "[]"),
        ("logits", "[NaN, 1.0]"),
        ("logits", '["0", "1"]'),
        ("logits", "[[" * 50_000),
        ("logits", f"[{'9' * 5000}]"),
        ("logits", f"[{10**400}]"),
        ("logits", b"\xff\xfe"),
        ("confidence", 2.0),
        ("confidence", None),
        ("confidence", "high"),
        ("raw", b"\xff"),
        ("raised", 1),
        ("raised", "no"),
        ("prompt_tokens", "many"),
        ("cost", "free"),
    ],
)
def test_a_damaged_row_is_named_with_its_file(tmp_path, column, value):
    path = tmp_path / "damaged.sqlite"
    recorded(path, [Advice((0.0, 1.0))], [Advice((0.0, 1.0))])
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"UPDATE answers SET {column} = ? WHERE id = 2", (value,))
    with pytest.raises(
        ValueError, match=r"damaged\.sqlite': row 2 of answers .*Delete it"
    ) as error:
        RecordedAdvisor(path)
    assert len(str(error.value)) < 1000


def test_a_damaged_error_row_is_named_with_its_file(tmp_path):
    for column, value in (("error_status", "busy"), ("error_kind", b"\xff"), ("raised", b"")):
        path = tmp_path / f"{column}.sqlite"
        recorded(path, [StatusError(500, "oops")])
        with closing(sqlite3.connect(path)) as database, database:
            database.execute(f"UPDATE answers SET {column} = ?", (value,))
        with pytest.raises(ValueError, match=rf"{column}\.sqlite': row 1"):
            RecordedAdvisor(path)


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "damaged.sqlite"
    recorded(path, *([Advice((0.0, 1.0), raw="x" * 3000)] for _ in range(30)))
    data = bytearray(path.read_bytes())
    data[2 * 4096 :] = b"\x55" * (len(data) - 2 * 4096)
    path.write_bytes(data)
    for build in (RecordedAdvisor, lambda path: RecordingAdvisor(Says(), path)):
        with pytest.raises(ValueError, match=r"damaged\.sqlite.*(record again|another path)"):
            build(path)


def test_a_recording_keeps_the_beginning_of_a_huge_answer(tmp_path):
    recorded(tmp_path / "a", [Advice((0.0, 1.0), raw="x" * 2**20)])
    (again,) = answers(RecordedAdvisor(tmp_path / "a"), ask("k0"))
    assert again.raw == "x" * 65_536
    assert (tmp_path / "a").stat().st_size < 2**18


def test_model_name_looks_through_wrappers(tmp_path):
    class Wrapper:
        def __init__(self, advisor):
            self.advisor = advisor

    assert model_name(Wrapper(Wrapper(Says()))) == "test-model"


# ---- answers by abstract state ----


def state_request(state: str | None, **fields) -> AdviceRequest:
    return replace(ask("a situation of its own", **fields), abstract_state=state)


def state_lines(path, *rows) -> str:
    about = {"confidence": 0.5, "actions": ["left", "right"]}
    path.write_text("".join(json.dumps(about | row) + "\n" for row in rows))
    return str(path)


def test_the_answers_of_an_abstract_state_are_given_in_turn(tmp_path):
    path = state_lines(
        tmp_path / "states.jsonl",
        {"class": "wall", "logits": [3, -2]},
        {"class": "door", "logits": [0, 9]},
        {"class": "wall", "logits": [-1, 1]},
    )
    advisor = RecordedAdvisor(path)
    wall, door = state_request("wall"), state_request("door")
    assert len(advisor) == 2
    given = [answer.logits[0] for answer in answers(advisor, wall, door, wall, wall, door)]
    assert given == [3.0, 0.0, -1.0, 3.0, 0.0]
    resumed = RecordedAdvisor(path)
    resumed.load_state_dict(json.loads(json.dumps(advisor.state_dict())))
    assert answers(resumed, wall)[0].logits == (-1.0, 1.0)


def test_states_without_an_answer_are_counted_and_masked(tmp_path):
    path = state_lines(tmp_path / "states.jsonl", {"class": "wall", "logits": [3, -2]})
    absent, unknown = answers(RecordedAdvisor(path), state_request("gap"), state_request(None))
    assert isinstance(absent, NotRecordedError) and "'gap'" in str(absent)
    assert isinstance(unknown, NotRecordedError) and "'abstract_state'" in str(unknown)
    with pytest.raises(FatalAdviceError, match="'gap'"):
        answers(RecordedAdvisor(path, missing="error"), state_request("gap"))
    other = state_lines(
        tmp_path / "other.jsonl", {"class": "wall", "logits": [3, -2], "actions": ["up", "down"]}
    )
    (answer,) = answers(RecordedAdvisor(other), state_request("wall"))
    assert isinstance(answer, NotRecordedError) and "'up', 'down'" in str(answer)


def test_the_transform_tells_the_abstract_state(tmp_path):
    pytest.importorskip("minigrid")
    from lore_torchrl.envs.minigrid import MiniGrid, MiniGridDescriber
    from lore_torchrl.transforms import AdviceTransform

    describer = MiniGridDescriber()
    env = MiniGrid("MiniGrid-DoorKey-8x8-v0").make_env(num_envs=4, seed=1)
    td = env.reset()
    states = {
        describer.abstract_state(
            row,
            {k: td[k][row].numpy() for k in ("image", "direction")}
            | {"mission": "use the key to open the door and then get to the goal"},
        )
        for row in range(4)
    }
    rows = [
        {"class": state, "logits": [5] + [0] * 6, "actions": list(describer.actions)}
        for state in states
    ]
    advisor = RecordedAdvisor(state_lines(tmp_path / "states.jsonl", *rows))
    budget = CallBudget(9)
    policy = CallPolicy(budget, calls_per_step=4)
    with AdviceService(advisor, budget=budget, policy=policy) as service:
        transform = AdviceTransform(service, describer, require_key=None)
        td = MiniGrid("MiniGrid-DoorKey-8x8-v0").make_env(num_envs=4, seed=1)
        td = td.append_transform(transform).reset()
    assert td["llm_mask"].all() and (td["llm_prior_logits"][:, 0] == 5).all()


# ---- recorded views ----


def view_request(view, direction) -> AdviceRequest:
    return ask("same", facts={"view": np.asarray(view), "direction": direction})


def test_views_are_told_apart_by_direction(tmp_path):
    views = [np.full((3, 3, 3), i).tolist() for i in range(2)]
    lines = [
        {"image": views[0], "direction": 0, "logits": [0, 1], "confidence": 0.5, "visits": 3},
        {"image": views[0], "direction": 3, "logits": [1, 0], "confidence": 0.75},
    ]
    path = tmp_path / "views.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    advisor = RecordedAdvisor(path)
    east, north, other, ungiven = answers(
        advisor,
        view_request(views[0], 0),
        view_request(np.uint8(views[0]), np.int64(3)),
        view_request(views[1], 0),
        ask("k"),
    )
    assert (east.logits, east.confidence) == ((0.0, 1.0), 0.5)
    assert (north.logits, north.confidence) == ((1.0, 0.0), 0.75)
    assert isinstance(other, NotRecordedError)
    assert isinstance(ungiven, NotRecordedError) and "'view'" in str(ungiven)
    with pytest.raises(FatalAdviceError, match="no answer to 'same'"):
        answers(RecordedAdvisor(path, missing="error"), view_request(views[1], 0))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[" * 100_000,
        '{"image": [[[0]]], "direction": 0, "logits": [0, 1]}',
        '{"image": [[[0]]], "direction": 0, "logits": [NaN, 1], "confidence": 1}',
        '{"image": [[[0]]], "direction": 0, "logits": [0, 1], "confidence": 2}',
        '{"image": [[[300]]], "direction": 0, "logits": [0, 1], "confidence": 1}',
        '{"image": [[[0]]], "direction": 0, "actions": ["a"], "logits": [0, 1], "confidence": 1}',
        "[1, 2]",
    ],
)
def test_bad_lines_are_named(tmp_path, line):
    good = '{"image": [[[0]]], "direction": 0, "logits": [0, 1], "confidence": 1}'
    (tmp_path / "v.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match="line 2"):
        RecordedAdvisor(tmp_path / "v.jsonl")


def test_the_recording_of_views_answers_the_describers_requests():
    pytest.importorskip("minigrid")
    from lore_torchrl.envs.minigrid import MiniGrid, MiniGridDescriber

    advisor = RecordedAdvisor(RECORDINGS / "doorkey5x5_llm.jsonl", missing="mask")
    assert len(advisor) == 215
    for memory in (False, True):
        describer = MiniGridDescriber(memory=memory)
        td = MiniGrid("MiniGrid-DoorKey-5x5-v0").make_env(num_envs=8, seed=1).reset()
        requests = []
        for row in range(8):
            seen = {
                "image": td["image"][row].numpy(),
                "direction": td["direction"][row].numpy(),
                "mission": "use the key to open the door and then get to the goal",
            }
            describer.observe(row, seen, None, reset=True)
            requests.append(describer.request(row, seen))
        assert all(isinstance(answer, Advice) for answer in answers(advisor, *requests))


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("keycorridor", "KeyCorridorS3R1"),
        ("doorkey8x8", "DoorKey-8x8"),
        ("multiroom", "MultiRoom-N2-S4"),
    ],
)
def test_a_recording_by_abstract_state_answers_a_question_that_is_asked_once(name, task):
    pytest.importorskip("minigrid")
    from lore_torchrl.envs.adapter import sample_request
    from lore_torchrl.envs.minigrid import MiniGrid

    advisor = RecordedAdvisor(RECORDINGS / f"{name}_llm.jsonl", missing="mask")
    adapter, memory = MiniGrid(f"MiniGrid-{task}-v0"), name != "doorkey8x8"
    requests = [sample_request(adapter, steps=steps, memory=memory) for steps in range(6)]
    assert any(isinstance(answer, Advice) for answer in answers(advisor, *requests))


EXTRAS = Advice((1.5, -2.0), 0.5, plan=(1, 0), subgoal="open the door", valid=(True, False))


def test_plan_subgoal_and_valid_actions_survive_a_recording(tmp_path):
    recorded(tmp_path / "a.sqlite", [EXTRAS, Advice((0.0, 1.0))])
    again = answers(RecordedAdvisor(tmp_path / "a.sqlite"), ask("k0"), ask("k1"))
    assert again == [EXTRAS, Advice((0.0, 1.0))]


def test_lines_may_hold_them_too(tmp_path):
    line = {"class": "a", "logits": [1.5, -2.0], "confidence": 0.5, **EXTRAS.extras()}
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    advisor = RecordedAdvisor(tmp_path / "a.jsonl")
    assert answers(advisor, ask("k", abstract_state="a")) == [EXTRAS]


def test_strange_costs_can_be_recorded(tmp_path):
    strange = StatusError(500, "oops", usage=Usage(10**40, -5, float("nan")))
    recorded(tmp_path / "a", [strange])
    (again,) = answers(RecordedAdvisor(tmp_path / "a"), ask("k0"))
    assert again.usage == strange.usage.counted() == Usage(2**53, 0, 0.0)
