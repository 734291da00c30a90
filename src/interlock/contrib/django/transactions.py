"""A lock that is held until the transaction has ended: `locks.lock(order, until_commit=True)`.

Theory. If a lock is released inside of a transaction, the next holder reads what was there before the commit, and
undoes it. So here the lease passes from the `with` to the transaction of the database connection, and ends with that.
Django has a hook for a commit (`on_commit`), and none for a rollback, a lost connection or a commit that is to be
refused. So `Transactions` puts itself before the methods of one connection object through which each transaction ends,
`atomic` included, when the first lock is held there; it stays, and passes every call on.

Rules.
(a) The lease ends after the `with` *and* after the transaction that is open when the `with` ends. Without one, it ends
    with the `with`.
(b) A commit is sent only if all leases of the connection are certainly alive. Else the transaction is rolled back, and
    LeaseLost raised. Between this look and the commit in the database time passes: only a fence closes that gap.
    Three calls of Django commit: `commit()`, `atomic` included; `set_autocommit(True)` in a manual transaction, which
    `atomic` calls at its end, too, also if an interrupt has prevented its commit and its rollback; and on SQLite the
    release of a savepoint that a manual transaction has begun with. A `close()` rolls back.
(c) Savepoints end nothing: what was read under the lock before one may count after it.
(d) In a TestCase, whose own `atomic` blocks are never committed, the outermost block of the tested code counts.
(e) What ends after a commit raises nothing, since the data is committed; the client has logged a loss.
(f) A thread may acquire the same lock again before the commit: it would wait for itself.
(g) The connection owns the leases. If it is dropped without an end, as with its thread, their sections are, too, and
    release them in the background.
"""

# Django has no types of its own, and those of django-stubs are not for everyone.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownLambdaType=false
# mypy: disable-error-code="misc, no-any-return, untyped-decorator"

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, Final

from django.db import connections

from interlock._api.section import CallSection
from interlock._protocol.run_to_end import run
from interlock.errors import LeaseLost, LockError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from interlock.threads import Lease, RLock

__all__ = ["Transactions", "UntilCommit"]

_ATTRIBUTE: Final = "_interlock_transactions"


class UntilCommit(ContextDecorator):
    """A lock whose lease ends with the transaction around its `with`: use it in a `with`, or as a decorator.

    In `atomic` (of any depth, and with ATOMIC_REQUESTS) the lease outlives the `with`, and ends after the commit or the
    rollback; elsewhere it ends with the `with`. The thread may acquire it again meanwhile. If the lease is lost before
    the commit, the commit is refused: the transaction is rolled back, and LeaseLost leaves the `atomic`.
    """

    def __init__(self, lock: RLock, using: str) -> None:
        self._lock = lock
        self._using = using
        self._entered: list[tuple[Transactions, Hold]] = []  # by each `with` of it that is open, in whichever thread

    @property
    def name(self) -> str:
        """The name, without the prefix."""
        return self._lock.name

    def __enter__(self) -> Lease:
        transactions = Transactions.of(connections[self._using])
        hold = Hold(self._lock)
        try:
            run(self._lock._enter(hold))
            transactions.holds.append(hold)
            self._entered.append((transactions, hold))
            lease: Lease = hold.lease
        except BaseException:  # an interrupt, too, wherever it comes
            transactions.holds[:] = [each for each in transactions.holds if each is not hold]
            hold.release_in_background()
            raise
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The innermost `with` of this thread. A generator may be left by another thread than the one that entered.
        every = [*self._entered]
        mine = [each for each in every if each[1].is_of_this_thread()] or every
        self._entered.remove(entered := mine[-1])
        transactions, hold = entered
        transactions.leave(hold, kind, error, trace)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.UntilCommit {self.name!r} using={self._using!r}>"


class Hold(CallSection):
    """The section of one `with`, which owns its lease until the transaction ends. Its body is all of that."""

    __slots__ = ("in_with",)

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self.in_with = True
        self.entered_by = weakref.ref(threading.current_thread())

    def is_of_this_thread(self) -> bool:
        """Whether this thread has entered its `with`."""
        return self.entered_by is not None and self.entered_by() is threading.current_thread()


class Transactions:
    """The leases that end with the transactions of one connection, and the ends of these."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.holds: list[Hold] = []
        self._is_of_atomic = connection.in_atomic_block and connection.commit_on_exit  # else it is a manual transaction
        # Whether nothing is left to commit when autocommit is turned on. After the commit of a manual transaction the
        # next statement begins another one, which nobody sees.
        self._is_over = connection.connection is None
        for name, method in (
            ("commit", self._commit),
            ("rollback", self._rollback),
            ("close", self._close),
            ("set_autocommit", self._set_autocommit),
            ("savepoint_commit", self._savepoint_commit),
            ("savepoint_rollback", self._savepoint_rollback),
        ):
            real = getattr(connection, name)
            setattr(connection, name, functools.wraps(real)(functools.partial(method, real)))

    @classmethod
    def of(cls, connection: Any) -> Transactions:
        """The one of this connection, which is made with the first lock."""
        found: Transactions | None = getattr(connection, _ATTRIBUTE, None)
        if found is None:
            found = cls(connection)
            setattr(connection, _ATTRIBUTE, found)
        return found

    def leave(self, hold: Hold, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave the `with`: the lease ends, unless a transaction is open. Raises LeaseLost if the lease is lost."""
        if not self._is_open():
            if hold in self.holds:
                self.holds.remove(hold)
            run(hold.leave(kind, error, trace))
            return
        hold.in_with = False
        if error is None:
            hold.lease.ensure()  # so that the transaction ends now, and not after more work

    def _is_open(self) -> bool:
        """Whether a transaction is open whose end is to be waited for. Connects to nothing."""
        connection = self._connection
        if connection.connection is None or connection.closed_in_transaction:
            return False
        if connection.in_atomic_block:
            return not self._only_blocks_of_a_test_are_open()
        return not connection.autocommit

    def _only_blocks_of_a_test_are_open(self) -> bool:
        blocks = self._connection.atomic_blocks
        return bool(blocks) and all(getattr(block, "_from_testcase", False) for block in blocks)

    # The ends of transactions: Django's `atomic` calls them after it has left its block, and users of Django do.

    def _commit(self, real: Callable[[], None]) -> None:
        if not self._connection.in_atomic_block:  # else Django refuses it
            self._check(self._connection.rollback)
        real()
        self._is_over = self._is_of_atomic
        self._end()

    def _rollback(self, real: Callable[[], None]) -> None:
        real()
        self._is_over = self._is_of_atomic
        self._end()

    def _close(self, real: Callable[[], None]) -> None:
        try:
            real()
        finally:
            if self._connection.connection is None or self._connection.closed_in_transaction:
                self._is_over = True
                self._end()

    def _set_autocommit(
        self,
        real: Callable[[bool, bool], None],
        autocommit: bool,
        force_begin_transaction_with_broken_autocommit: bool = False,  # as `atomic` calls it
    ) -> None:
        connection = self._connection
        if not autocommit and not connection.in_atomic_block:  # in which Django refuses it
            self._is_of_atomic, self._is_over = force_begin_transaction_with_broken_autocommit, False
        try:
            if autocommit and not (connection.autocommit or connection.in_atomic_block or self._is_over):
                self._check(connection.rollback)
        except LeaseLost:
            real(True, False)
            if not self._is_of_atomic:  # else the error that has kept `atomic` from its commit is on its way
                raise
        else:
            real(autocommit, force_begin_transaction_with_broken_autocommit)
        finally:
            if connection.autocommit:
                self._end()  # also after an error of a hook, or of a commit that no other method saw

    def _savepoint_commit(self, real: Callable[[str], None], sid: str) -> None:
        is_end = self._only_blocks_of_a_test_are_open()
        if is_end:
            self._check(functools.partial(self._connection.savepoint_rollback, sid))
        elif not self._is_of_atomic and self._connection.vendor == "sqlite":
            try:
                self._look()
            except LeaseLost:
                return  # the savepoint stays until the end of the transaction, which raises this error
        real(sid)
        if is_end:
            self._end()

    def _savepoint_rollback(self, real: Callable[[str], None], sid: str) -> None:
        real(sid)
        if self._only_blocks_of_a_test_are_open():
            self._end()

    def _check(self, roll_back: Callable[[], None]) -> None:
        """Before a commit: raises LeaseLost, after rolling back, unless each lease is certainly alive."""
        try:
            self._look()
        except LeaseLost as lost:
            lost.add_note("So the transaction was not committed, but rolled back.")
            try:
                roll_back()
            except Exception:  # noqa: BLE001 (as `atomic` does: a connection that can't roll back is closed)
                self._connection.close()
            raise

    def _look(self) -> None:
        """Raise LeaseLost unless each lease is certainly alive. No I/O."""
        for hold in self.holds:
            hold.lease.ensure()

    def _end(self) -> None:
        """The transaction has ended: so do the leases whose `with` has ended before."""
        for hold in [each for each in reversed(self.holds) if not each.in_with]:
            self.holds.remove(hold)
            with contextlib.suppress(LockError):
                run(hold.leave(None, None, None))
