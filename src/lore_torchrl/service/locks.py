"""A lock that neither a pickle nor a fork can leave closed for ever."""

from __future__ import annotations

import os
import threading
import weakref


class SharedLock:
    """A re-entrant lock for objects that travel to other processes.

    A copy, a pickle and a forked child each get a free lock of their own. An ordinary
    lock cannot be pickled at all, and one that another thread holds during a fork stays
    closed in the child, where that thread does not exist.

    Examples:
        >>> import copy
        >>> lock = SharedLock()
        >>> with lock, copy.deepcopy(lock):
        ...     print("held")
        held
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> SharedLock:
        self._lock.acquire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def acquire(self, *, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds, and return whether the lock is held now."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        """Let go of what :meth:`acquire` or a ``with`` block holds."""
        self._lock.release()

    def __reduce__(self) -> tuple[type[SharedLock], tuple[()]]:
        return SharedLock, ()


_locks: weakref.WeakSet[SharedLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock._lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_renew_all)
