from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import sqlite3
import threading
import time
import warnings

import pytest
import store_workers
from store_workers import advice

from lore_torchrl.service import AdviceCache, AdviceStore, CallBudget, StoreError

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "advice.sqlite"


def fork(work, *args):
    """Run ``work(*args, acknowledge)`` in a forked child; return its id and its words."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork
        child = os.fork()
    if child == 0:
        try:
            work(*args, lambda line: os.write(writer, line.encode()))
        finally:
            os._exit(0)
    os.close(writer)
    return child, os.fdopen(reader)


def killed(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def intact(path):
    with sqlite3.connect(path) as connection:
        return connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@needs_fork
def test_two_processes_share_one_ledger_and_never_exceed_it(path):
    total = 301
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [
        context.Process(target=store_workers.spend_all, args=(path, total, barrier, results))
        for _ in range(2)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork
        for worker in workers:
            worker.start()
    taken = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == 0
    assert sum(taken) == total
    assert min(taken) > 0
    budget = CallBudget(total, store=AdviceStore(path))
    assert (budget.spent, budget.remaining) == (total, 0)


@needs_fork
@pytest.mark.parametrize("after", [1, 2, 7, 20])
def test_a_process_killed_at_work_leaves_all_it_spoke_of(path, after):
    child, words = fork(store_workers.buy_for_ever, path)
    lines = [words.readline() for _ in range(after)]
    time.sleep(0.003 * after)
    killed(child)
    lines += words.read().splitlines()
    spent = sum(line.startswith("spent") for line in lines)
    kept = sum(line.startswith("kept") for line in lines)

    assert intact(path)
    store = AdviceStore(path)
    budget, cache = CallBudget(10_000, store=store), AdviceCache(store=store)
    # At most the change under way may be there beyond what was spoken of.
    assert spent <= budget.spent <= spent + 1
    assert kept <= len(cache) <= kept + 1
    assert all(cache.peek(f"key {n}") == advice(n) for n in range(kept))
    before = budget.spent
    budget.load_state_dict(CallBudget(1).state_dict())
    budget.spend()
    assert budget.spent == before + 1


@needs_fork
def test_a_process_killed_inside_a_transaction_changes_nothing_and_blocks_nobody(path):
    child, words = fork(store_workers.stop_inside, path)
    assert words.readline() == "inside\n"
    impatient = CallBudget(10, store=AdviceStore(path))
    impatient.store.busy_timeout_s = 0.05
    assert impatient.remaining == 8  # reading does not wait for the writer
    with pytest.raises(StoreError, match=r"advice\.sqlite cannot be used: database is locked"):
        impatient.spend()
    killed(child)
    impatient.spend()
    assert impatient.spent == 3
    assert intact(path)


@needs_fork
def test_a_fork_waits_for_a_transaction_and_both_sides_open_the_file_anew(path):
    store = AdviceStore(path)
    budget = CallBudget(10, store=store)
    inside, go_on = threading.Event(), threading.Event()

    def spend_slowly():
        with store.write() as connection:
            inside.set()
            time.sleep(0.2)
            connection.execute("INSERT INTO ledger (name, calls) VALUES ('default', 1)")
        go_on.wait(10)

    def child_work(acknowledge):
        acknowledge(f"{len(store._connections)} {budget.remaining}\n")
        budget.spend()
        acknowledge("spent\n")

    other = threading.Thread(target=spend_slowly)
    other.start()
    assert inside.wait(10)
    child, words = fork(child_work)
    assert not store._connections
    assert words.read().splitlines() == ["0 9", "spent"]
    os.waitpid(child, 0)
    go_on.set()
    other.join()
    budget.spend()
    assert budget.spent == 3


@needs_fork
def test_what_a_forked_child_spends_outlives_the_parents_connection(path):
    # A child that inherits an open connection would write into a log that the parent,
    # as the last one that holds the file, deletes when it closes.
    store = AdviceStore(path)
    budget = CallBudget(10, store=store)
    budget.spend()
    leave, left = os.pipe()

    def child_work(acknowledge):
        budget.spend()
        acknowledge("spent\n")
        os.read(leave, 1)
        budget.spend()

    child, words = fork(child_work)
    assert words.readline() == "spent\n"
    budget.spend()
    store.close()
    os.write(left, b"x")
    os.waitpid(child, 0)
    assert budget.spent == 4
    assert intact(path)


def test_threads_share_a_store(path):
    store = AdviceStore(path)
    budget, cache = CallBudget(60, store=store), AdviceCache(store=store)
    failures = []

    def work(name):
        try:
            while budget.spend_up_to(1):
                cache.put(f"{name} {budget.spent}", advice(1))
                cache.get("nothing")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert budget.spent == 60


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
def test_copies_and_pickles_share_the_file_not_the_connection(path, travel):
    store = AdviceStore(path)
    budget = CallBudget(5, store=store)
    cache = AdviceCache(store=store)
    budget.spend()
    cache.put("a", advice(1), abstract_state="room")
    other_budget, other_cache = travel((budget, cache))
    other_budget.spend()
    other_cache.put("b", advice(2))
    assert budget.spent == 2
    assert cache.get("b") == advice(2)
    assert other_cache.get("c", "room") == advice(1)


def test_opens_late_and_again(tmp_path):
    path = tmp_path / "new folder" / "advice.sqlite"
    store = AdviceStore(path)
    assert not path.parent.exists()
    CallBudget(5, store=store).spend()
    store.close()
    store.close()
    assert CallBudget(5, store=store).spent == 1


def test_a_relative_path_is_fixed_at_construction(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = AdviceStore("advice.sqlite")
    monkeypatch.chdir("/")
    CallBudget(5, store=store).spend()
    assert (tmp_path / "advice.sqlite").exists()


def test_a_block_that_raises_is_undone(path):
    store = AdviceStore(path)
    budget = CallBudget(5, store=store)
    budget.spend()
    with pytest.raises(KeyboardInterrupt), store.write() as connection:
        connection.execute("UPDATE ledger SET calls = 0")
        raise KeyboardInterrupt
    assert budget.spent == 1


@pytest.mark.parametrize("version", [2, 99])
def test_tables_of_another_version_are_left_alone(path, version):
    AdviceStore(path).read("SELECT 1")
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(StoreError, match=rf"another version.*tables {version}.*another file"):
        AdviceStore(path).read("SELECT 1")


def test_other_files_are_left_alone(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="another program's database"):
        CallBudget(5, store=AdviceStore(path)).spend()
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match="not a database"):
        CallBudget(5, store=AdviceStore(path)).spend()


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ValueError, match=r":memory:.*store=None"):
        AdviceStore(":memory:")
    with pytest.raises(ValueError, match="folder"):
        AdviceStore(tmp_path)
