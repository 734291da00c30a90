"""The command `interlock web`."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import Annotated, Final

import typer

from interlock.cli.exit_status import EX_UNAVAILABLE
from interlock.cli.options import Urls, connect
from interlock.errors import ConfigError

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)
PORT: Final = 8642
VARIABLE: Final = "INTERLOCK_WEB_TOKEN"
MIN_TOKEN: Final = 16  # characters
WITHOUT_WEB: Final = (
    "interlock web needs starlette and uvicorn: pip install starlette uvicorn, or '.[web]' in a checkout of interlock"
)

EPILOG = """\b
interlock web                               http://127.0.0.1:8642, for this machine only
interlock web --allow-revoke                with a token in the address that it prints
INTERLOCK_WEB_TOKEN=... interlock web --host 0.0.0.0      for others: behind a proxy with TLS

It only shows, unless started with --allow-revoke. It asks the server while somebody looks, and sees what `interlock ls`
sees. A token comes from --token-file or the variable INTERLOCK_WEB_TOKEN, of 16 characters or more.

Exit status: 0, 64 for a bad option, 69 if the extra `web` is not installed, 74 if the port is in use, 130 after
Ctrl-C."""


@app.command("web", epilog=EPILOG)
def web(
    *,
    host: Annotated[str, typer.Option(metavar="HOST", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="0: any that is free.")] = PORT,
    allow_revoke: Annotated[
        bool, typer.Option("--allow-revoke", help="Let visitors revoke, with an entry in the audit.")
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The token that visitors need: its first line.")
    ] = None,
    root_path: Annotated[str, typer.Option(metavar="PATH", help="Where a proxy has it, such as /locks.")] = "",
    url: Urls = None,
) -> int:
    """Serve the live page: who holds what, where in the code, who waits, what is stuck."""
    try:
        import uvicorn  # noqa: PLC0415 (so that the message below can replace an ImportError)

        from interlock.cli.web.gate import LOCAL, Gate  # noqa: PLC0415
        from interlock.contrib.web import anybody, app  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        if missing.name not in {"starlette", "uvicorn", "anyio"}:
            raise
        typer.echo(f"interlock: {WITHOUT_WEB}", err=True)
        return EX_UNAVAILABLE
    with connect(url, "lock:", f"interlock web of {_user()}") as locks:
        token = _token(token_file)
        if host not in LOCAL and not token:
            raise ConfigError(
                f"--host {host} lets other machines look: give a token with --token-file or ${VARIABLE}. Or mount "
                "interlock.contrib.web in a program that has a login"
            )
        if allow_revoke and not token:
            token = secrets.token_urlsafe(24)
        listening = _listening(host, port)
        page = Gate(app(locks, authorize=anybody, allow_revoke=allow_revoke), token)
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listening.getsockname()[1]}{root_path}/"
        print(f"{address}?token={token}" if token and token_file is None and not _variable() else address, flush=True)
        config = uvicorn.Config(
            page, log_level="warning", access_log=False, root_path=root_path, timeout_graceful_shutdown=1,
            server_header=False,
        )  # fmt: skip
        uvicorn.Server(config).run([listening])
    return 0


def _token(file: Path | None) -> str:
    """The token that the user has chosen; "" if none. Raises ConfigError."""
    if file is not None:
        try:
            text = (file.read_text().splitlines() or [""])[0].strip()
        except OSError as error:
            raise ConfigError(f"--token-file {file}: {error.strerror}") from error
    else:
        text = _variable()
    if (file is not None or text) and len(text) < MIN_TOKEN:
        source = f"--token-file {file}" if file is not None else f"${VARIABLE}"
        raise ConfigError(f"{source}: a token has {MIN_TOKEN} characters or more: `openssl rand -hex 16` makes one")
    return text


def _variable() -> str:
    return os.environ.get(VARIABLE, "").strip()


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise OSError(
            f"can't listen on {host} port {port}: {error.strerror or error}. Choose another --port"
        ) from error


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in a container
        return "somebody"
