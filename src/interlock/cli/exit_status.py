"""The exit statuses of the command line, by the names and numbers of sysexits.h where it has one."""

from __future__ import annotations

from typing import Final

NOTHING_THERE: Final = 1  # the server has nothing under this name, or nobody holds it
EX_USAGE: Final = 64  # a bad option or URL
EX_UNAVAILABLE: Final = 69  # a server does not answer, or a library is not installed
EX_IOERR: Final = 74  # the command can't write its output, or (`interlock web`) can't listen on its port
EX_TEMPFAIL: Final = 75  # refused for now: the command would harm a process that holds a lease
EX_LOST: Final = 76  # the lease was lost while a command ran under it
EX_NOPERM: Final = 77  # the same, and the command worked on: this user may not end it
INTERRUPTED: Final = 130  # by Ctrl-C or SIGTERM
