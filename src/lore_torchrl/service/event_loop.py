"""One event loop in one daemon thread, where advisors run."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class _DaemonThreads(ThreadPoolExecutor):
    """Daemon threads, in which a slow look-up of a host does not hold up the interpreter's end."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="lore-advice-blocking", daemon=True).start()
        return future


class EventLoopThread:
    """An event loop of its own, so that it works where one is already running (Jupyter)."""

    def __init__(self) -> None:
        # With a factory it does not become the loop of this thread.
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = runner.get_loop()
        self._loop.set_default_executor(_DaemonThreads())
        self._pid = os.getpid()
        self._stopping = False
        self._thread = threading.Thread(
            target=_serve, args=(runner,), name="lore-advice", daemon=True
        )
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Whether the thread is alive in this process."""
        # Threads do not survive a fork; the child's copy of this object has none.
        return self._pid == os.getpid() and self._thread.is_alive()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        """Run a coroutine in the thread, and return its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self, *, wait: bool = True) -> None:
        """Cancel what runs and end the thread; one that a coroutine blocks is left behind."""
        if not self.usable or self._loop.is_closed():
            return
        if not self._stopping:  # a second stop would break off the runner's own shutdown
            self._stopping = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        if wait and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)


def _serve(runner: asyncio.Runner) -> None:
    with runner:  # which cancels at its end what still runs
        runner.get_loop().run_forever()
