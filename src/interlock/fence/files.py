"""A file that a holder replaces as a whole, unless a newer holder has replaced it. For processes of one machine.

Theory. The writer writes the new content to a draft next to the file (`.NAME.random.new`). Then it takes an flock on
`NAME.fence` and compares the fence in that file with its own. If the stored fence is newer, it refuses; otherwise it
stores its own fence, and only then renames the draft over the file. The flock makes comparison and rename one atomic
step for other writers. The rename makes the change atomic for readers, who take no lock and see either the whole old or
the whole new content.

A crash, or a kill, at each step:

    while the draft is written   readers see the old file. The draft stays behind; you may remove it
    after the fence is stored    readers see the old file, and the guard refuses older holders, as it should
    after the rename             readers see the new file. Until the directory is synced a power cut may still undo the
                                 rename; `write` has not returned yet

The fence is 21 bytes, always at the same offset, never truncated: one small write within one sector, which a kill can't
divide. It is on the disk before the first rename, so an empty file (or, after a power cut, a file of zeros) means that
no holder has guarded the file yet. Any other content is an error, and is never taken for a fence.

A writer that is stopped while it holds the flock (for a few writes) makes other writers wait, at most their `timeout`;
then they raise Unavailable and have written nothing. If the writer is killed, the kernel releases the flock.

Limits. Local file systems: on NFS the kernel may lose an flock while its holder lives, and a rename is not atomic for
all clients. The new file keeps owner, group and permissions of the old one, but not ACLs and extended attributes. All
writers need the right to write the `.fence` file, too; never remove this file while holders may be paused: it stores
the newest fence. All calls block: with asyncio, `await asyncio.to_thread(write, ...)`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from typing import IO, TYPE_CHECKING, BinaryIO, Final, TextIO, cast, overload

from interlock._protocol.names import duration
from interlock.errors import ConfigError, Unavailable

from . import Fenced, fence_of, stale_fence_error

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

__all__ = ["guard", "replacing", "write"]

TIMEOUT: Final = 10.0  # seconds
_NUMBER: Final = re.compile(rb"(\d{20})\n")
_EMPTY: Final = re.compile(rb"\0*")
Path = str | os.PathLike[str]


def guard(path: Path, lease: Fenced, *, timeout: float = TIMEOUT) -> None:
    """Refuse older holders from now on: call it before you read the file to decide what to write.

    `timeout` is in seconds. Raises StaleFence if a newer holder has guarded the file; Unavailable if another process
    keeps the `.fence` file locked for `timeout`; ConfigError if that file holds no fence; OSError.
    """
    with _guarded(os.path.realpath(path), lease, timeout):
        pass


def write(path: Path, lease: Fenced, data: bytes | str, *, timeout: float = TIMEOUT) -> None:
    """Replace the file's content (a str as UTF-8), or raise and change nothing. Arguments and errors as in `guard`."""
    with replacing(path, lease, timeout=timeout) as new:
        new.write(data.encode() if isinstance(data, str) else data)


@overload
def replacing(
    path: Path, lease: Fenced, *, encoding: None = None, timeout: float = TIMEOUT
) -> AbstractContextManager[BinaryIO]: ...
@overload
def replacing(
    path: Path, lease: Fenced, *, encoding: str, timeout: float = TIMEOUT
) -> AbstractContextManager[TextIO]: ...
def replacing(
    path: Path, lease: Fenced, *, encoding: str | None = None, timeout: float = TIMEOUT
) -> AbstractContextManager[BinaryIO] | AbstractContextManager[TextIO]:
    """Open a new file to write to, in a `with`; at its end the new file replaces the one at `path`.

    The new file is binary, or text with an `encoding`. The `with` begins with `guard`, so inside it no older holder can
    change the old file any more. If the body raises, or a newer holder has guarded the file meanwhile, the old file
    stays and the new one is removed. Arguments and errors as in `guard`.
    """
    return cast("AbstractContextManager[BinaryIO]", _replacing(os.path.realpath(path), lease, encoding, timeout))


@contextlib.contextmanager
def _replacing(target: str, lease: Fenced, encoding: str | None, timeout: float) -> Generator[IO[bytes] | IO[str]]:
    guard(target, lease, timeout=timeout)
    folder, name = os.path.split(target)
    draft = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.new")  # noqa: PTH118
    try:
        with _open_draft(draft, encoding) as new:
            yield new
            new.flush()
            _copy_owner_and_mode(target, new.fileno())
            os.fsync(new.fileno())
        with _guarded(target, lease, timeout):
            os.replace(draft, target)  # noqa: PTH105
            _sync(folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)  # noqa: PTH108
        raise


def _open_draft(draft: str, encoding: str | None) -> IO[bytes] | IO[str]:
    if encoding is None:
        return open(draft, "xb")  # noqa: PTH123
    return open(draft, "x", encoding=encoding, newline="")  # noqa: PTH123


@contextlib.contextmanager
def _guarded(target: str, lease: Fenced, timeout: float) -> Generator[None]:
    """Hold the flock, with this lease's fence in the file."""
    fence, path = fence_of(lease), f"{target}.fence"
    file = _open_and_lock(path, lease, duration(timeout, "timeout"))
    try:
        content = os.pread(file, 64, 0)
        number = _NUMBER.fullmatch(content)
        if not number and not _EMPTY.fullmatch(content):
            raise ConfigError(
                f"lock {lease.name!r}: {path} holds no fence, but {content!r:.60}. Nothing was written. Remove that "
                "file as soon as no older holder can be alive"
            )
        newest = int(number[1]) if number else 0
        if newest > fence:
            raise stale_fence_error(lease, newest, path)
        if newest < fence:
            os.pwrite(file, b"%020d\n" % fence, 0)
            os.fsync(file)
            if not number:
                _sync(os.path.dirname(path))  # noqa: PTH120  # the file itself may be new
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # explicit, since a child that was forked meanwhile shares the lock
        os.close(file)


def _open_and_lock(path: str, lease: Fenced, timeout: float) -> int:
    """Open the fence file and lock it. flock() waits either for ever or not at all, so this polls."""
    end = time.monotonic() + timeout
    pause = 0.001
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(file, path):
                return file
        except BlockingIOError:
            if time.monotonic() >= end:
                os.close(file)
                raise Unavailable(
                    f"lock {lease.name!r}: another process has kept {path} locked for {timeout:g} s, and may be "
                    f"stopped (`fuser {path}` names the process). Nothing was written"
                ) from None
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _is_same_file(file: int, path: str) -> bool:
    """Whether the path still leads to this open file: another process may have removed the file before the lock."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))  # noqa: PTH116
    except FileNotFoundError:
        return False


def _copy_owner_and_mode(target: str, new: int) -> None:
    """Give the new file the permissions of the old one, and its owner if this process may change owners."""
    try:
        old = os.stat(target)  # noqa: PTH116
    except FileNotFoundError:
        return
    new_status = os.fstat(new)
    if (new_status.st_uid, new_status.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(PermissionError):
            os.fchown(new, old.st_uid, old.st_gid)
    os.fchmod(new, stat.S_IMODE(old.st_mode))


def _sync(folder: str) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
