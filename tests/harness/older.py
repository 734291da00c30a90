"""Earlier versions of interlock, from commits of this repository, beside each other: as wheels, or as sources."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

from harness.matrix import required

ROOT = Path(__file__).parents[2]
FIRST = "49003b8"  # the oldest version with which this one gets along
# Each is the last commit before something that clients and scripts say to each other changed.
OLDER = {
    FIRST: "the first",
    "5921bed": "before a push brought a fence, and before cohorts",
    "4c529c5": "before a section started from the push",
    "cbb4d2c": "before there were drop-ins",
    "bce9c44": "while a section could start from a push",
}


@cache
def last_of_days() -> tuple[str, ...]:
    """The last commit of each day from that of the oldest version on, without the day of the newest commit.

    Empty without that history: in a shallow clone, or outside of one.
    """
    told = _git("log", "--format=%h %cs", f"{FIRST}~1..HEAD")
    last: dict[str, str] = {}
    for line in told.stdout.decode().splitlines() if told.returncode == 0 else ():
        commit, _, day = line.partition(" ")
        last.setdefault(day, commit)
    return tuple(commit for day, commit in sorted(last.items()))[:-1]


def unpacked_source(commit: str, directory: Path) -> Path:
    """Unpack the packages of a commit, without building them. Returns their place. Raises LookupError without it."""
    archive = _git("archive", commit, "src")
    if archive.returncode:
        raise LookupError(f"no history with {commit} here: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(directory, filter="data")
    return directory / "src"


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)


def unpacked_wheel(commit: str, directory: Path) -> Path:
    """Build the wheel of a commit, and unpack it. Returns the place of its packages. Skips the test without history."""
    tree = directory / "tree"
    archive = _git("archive", commit)
    if archive.returncode:
        required(f"no history with {commit} here: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(tree, filter="data")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)],
        cwd=tree, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "No module named hatchling" in built.stderr:
        required("hatchling is not installed; scripts/test installs it")
    assert built.returncode == 0, built.stderr
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(directory / "packages")
    return directory / "packages"
