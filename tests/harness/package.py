"""The package as users get it: builds wheel and sdist, looks into both, and tests the wheel in clean environments.

    python -m harness.package [--python VERSION] [--no-suite]    `scripts/package` runs this

A clean environment is a venv without pip, in a temporary directory: the wheel, and what the wheel itself declares. The
tests run there from a copy of `tests/`, beside which there are no sources; pytest and the test servers are added last,
behind everything else. `tests/integrations/test_package.py` runs the short form: there the dependencies are borrowed
from the environment of the tests, so that no registry is asked.
"""

from __future__ import annotations

import argparse
import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from harness import pythons
from harness.processes import PROGRAMS
from interlock.embedded import Server

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
SMOKE = PROGRAMS / "smoke.py"
# Tests that need the history or the sources, or Python's own tests; all others of tests/conformance are the core.
NOT_IN_THE_CORE = ("test_versions.py", "test_fleet.py", "test_cpython.py")
NOT_INHERITED = {"PYTHONPATH", "INTERLOCK_URL", "PYTHONMALLOC"}  # not every Python has the allocator that we name
TOOLS = ("pytest", "pytest-xdist")  # of the group `test`: what the core needs beside the wheel


def project(root: Path = ROOT) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


# Build


def run(*command: object, **options: Any) -> str:
    """Run a command. Returns its output. Raises AssertionError with all that it printed, if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def build(source: Path, out: Path, what: str, *, isolated: bool = True) -> Path:
    """Build `wheel` or `sdist` of a tree. Isolated: with what pyproject.toml asks for, from the registry."""
    run(sys.executable, "-m", "build", f"--{what}", *(() if isolated else ("--no-isolation",)), "-o", out, source)
    (made,) = out.glob("*.whl" if what == "wheel" else "*.tar.gz")
    return made


def unpacked_sdist(sdist: Path, out: Path) -> Path:
    with tarfile.open(sdist) as packed:
        packed.extractall(out, filter="data")
    (tree,) = out.iterdir()
    return tree


# Look inside


def contents(wheel: Path) -> dict[str, int]:
    """Each file of a wheel with its checksum."""
    with zipfile.ZipFile(wheel) as packed:
        return {info.filename: info.CRC for info in packed.infolist()}


def wrong_contents(wheel: Path, root: Path = ROOT) -> list[str]:
    """What is wrong with the files of a wheel: exactly those of src belong there, and what pip needs."""
    source = {
        str(path.relative_to(root / "src"))
        for path in (root / "src").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    files = {*contents(wheel)}
    packages = {name for name in files if ".dist-info/" not in name}
    rest = {name.partition(".dist-info/")[2] for name in files - packages}
    wrong = [f"missing: {name}" for name in sorted(source - packages)]
    wrong += [f"too much: {name}" for name in sorted(packages - source)]
    wrong += [
        f"missing: {name}"
        for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
        if name not in rest
    ]
    if "interlock/py.typed" not in packages or not any(name.endswith(".lua") for name in packages):
        wrong.append("no py.typed, or no scripts")
    return wrong


def wrong_sdist(tree: Path, root: Path = ROOT) -> list[str]:
    """Where an unpacked sdist differs from the files that git knows or would add. Empty where git knows no tree."""
    listing = ("git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard", "--full-name")
    done = subprocess.run([*map(str, listing)], capture_output=True, text=True, check=False)
    source = {name for name in done.stdout.splitlines() if (root / name).is_file()}
    if done.returncode or "pyproject.toml" not in source:
        return []
    files = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()} - {"PKG-INFO"}
    wrong = [f"missing: {name}" for name in sorted(source - files)]
    return [*wrong, *(f"too much: {name}" for name in sorted(files - source))]


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(packed.read(name))


def wrong_metadata(wheel: Path, root: Path = ROOT) -> list[str]:
    """Where the metadata of a wheel differ from pyproject.toml, and the links of its README that lead nowhere."""
    told, said = project(root)["project"], metadata(wheel)
    extras = told["optional-dependencies"]
    wrong = [
        f"{name}: {said[name]!r}, not {wanted!r}"
        for name, wanted in (
            ("Name", told["name"]),
            ("Version", told["version"]),
            ("Requires-Python", told["requires-python"]),
            ("Description-Content-Type", "text/markdown"),
        )
        if said[name] != wanted
    ]
    declared = {str(Requirement(each)) for each in told["dependencies"]}
    required = [Requirement(each) for each in said.get_all("Requires-Dist", ())]
    if {str(each) for each in required if each.marker is None} != declared:
        wrong.append(f"dependencies: {[*map(str, required)]}")
    if {*said.get_all("Provides-Extra", ())} != {*extras}:
        wrong.append(f"extras: {said.get_all('Provides-Extra')}")
    if "interlock = _interlock_cli:main" not in entry_points(wheel):
        wrong.append("there is no command `interlock`")
    description = str(said.get_payload())
    if "\npip install 'interlock[embedded]' " not in description or re.search(r"pip install '?\.", description):
        wrong.append("the README tells how to install from a checkout")
    if "<!--" in description:
        wrong.append("the README has the marks of its figures")
    return [*wrong, *wrong_links(rendered(description))]


def entry_points(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".dist-info/entry_points.txt")]
        return packed.read(name).decode().splitlines()


def rendered(description: str) -> str:
    """The README as a package index renders it."""
    from readme_renderer import markdown

    html = markdown.render(description)
    assert html, "the index would show plain text"
    return html


def wrong_links(html: str) -> list[str]:
    """Links and images that only a tree with the pages has, and links to headings that there are not."""
    ids = {f"#{name}" for name in re.findall(r'id="([^"]*)"', html)}
    places = re.findall(r'(?:href|src)="([^"]*)"', html)
    return [f"leads nowhere on an index: {it}" for it in places if not it.startswith("https://") and it not in ids]


# Install


class Environment:
    """A clean environment of an interpreter."""

    def __init__(self, directory: Path, python: str = sys.executable) -> None:
        self.directory = directory
        self.variables: dict[str, str] = {}  # of its processes
        run(python, "-m", "venv", "--without-pip", directory)
        self.python = directory / "bin" / "python"
        self.packages = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())

    def run(self, *arguments: object, **variables: str) -> str:
        """Run its interpreter, in its own directory, and so that it can import nothing from elsewhere."""
        return run(self.python, *arguments, cwd=self.directory, env=self.inherited() | variables)

    def inherited(self) -> dict[str, str]:
        """What its processes have of the environment variables of this one, and its own."""
        return {name: value for name, value in os.environ.items() if name not in NOT_INHERITED} | self.variables

    def install(self, *wanted: object) -> None:
        """Install with pip, with dependencies."""
        pip = (
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.python,
            "--disable-pip-version-check",
            "install",
            "--quiet",
        )
        run(*pip, *wanted)

    def install_offline(self, wheel: Path, extras: Iterable[str] = ()) -> None:
        """Install the wheel with pip; link the dependencies that it declares from where this process has them."""
        self.install("--no-deps", "--no-index", "--no-compile", wheel)
        for distribution in closure(metadata(wheel).get_all("Requires-Dist", ()), extras):
            for top in {Path(file).parts[0] for file in distribution.files or () if ".." not in Path(file).parts}:
                place, link = Path(str(distribution.locate_file(top))), self.packages / top
                if place.exists() and not link.exists():
                    link.symlink_to(place)

    def distributions(self) -> list[str]:
        code = "import importlib.metadata as m; print(*sorted({d.name.lower() for d in m.distributions()}))"
        return self.run("-I", "-c", code).split()

    def smoke(self, url: str, *checks: str) -> str:
        """Check that it imports the installed package, and that this works: see smoke.py."""
        return self.run("-I", SMOKE, self.directory, url, *checks)


def closure(requirements: Iterable[str], extras: Iterable[str]) -> list[importlib.metadata.Distribution]:
    """The distributions that these requirements bring, with those of these extras."""
    found: dict[str, importlib.metadata.Distribution] = {}
    wanted = [(Requirement(each), [*extras]) for each in requirements]
    while wanted:
        requirement, chosen = wanted.pop()
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in [*chosen, ""]):
            continue
        distribution = importlib.metadata.distribution(requirement.name)
        if requirement.name not in found or requirement.extras:
            found[requirement.name] = distribution
            wanted += [(Requirement(each), [*requirement.extras]) for each in distribution.requires or ()]
    return [*found.values()]


# Test


def core_of_the_suite(environment: Environment, copy: Path, *options: str) -> None:
    """Run the core of the suite in this environment, from a copy of the tests beside which there are no sources."""
    for name in ("tests", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    told = project()
    tools = [each for each in told["dependency-groups"]["test"] if Requirement(each).name in TOOLS]
    tools += told["project"]["optional-dependencies"]["embedded"]  # the servers of the tests
    beside = copy / "tools"
    environment.install("--target", beside, *tools)
    (environment.packages / "tools.pth").write_text(f"{beside}\n")  # behind all that is installed
    command = ["-X", "dev", "-m", "pytest", "-p", "harness.installed", "-q", "-rfE", "-n", "4", "--dist", "loadgroup"]
    command += [f"--ignore={copy / 'tests/conformance' / name}" for name in NOT_IN_THE_CORE]
    variables = {"CI": "", "PYTHONPATH": str(copy / "tests"), "INSTALLED_IN": str(environment.directory)}
    done = subprocess.run(
        [environment.python, *command, *options, copy / "tests/conformance", f"--rootdir={copy}"],
        cwd=environment.directory, env=environment.inherited() | variables, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"the core of the suite fails: status {done.returncode}"


# The long form


def built_and_checked(out: Path) -> Path:
    """Build wheel and sdist, and check them. Returns the wheel."""
    wheel, sdist = build(ROOT, out / "dist", "wheel"), build(ROOT, out / "dist", "sdist")
    unpacked = unpacked_sdist(sdist, out / "sdist")
    wrong = [*wrong_contents(wheel), *wrong_metadata(wheel), *wrong_sdist(unpacked)]
    assert not wrong, "\n".join(wrong)
    again = build(unpacked, out / "again", "wheel")
    assert contents(again) == contents(wheel), "the sdist makes another wheel"
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    kinds = Counter(Path(name).suffix or Path(name).name for name in contents(wheel))
    files = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    print(f"{wheel.name}: {files}; {entry_points(wheel)[1]}")
    print(f"{sdist.name}: the files of the tree, and it makes the same wheel", flush=True)
    return wheel


def installed(wheel: Path, extra: str, python: pythons.Python, directory: Path, url: str) -> Environment:
    """A clean environment with the wheel and one extra, or with "" alone, in which all that they promise works."""
    environment = Environment(directory, str(python.path))
    if python.version.endswith("t"):
        environment.variables["PYTHON_GIL"] = "0"  # hiredis does not declare that it works without the GIL
    try:
        environment.install(f"{wheel}[{extra}]" if extra else wheel)
    except AssertionError as error:
        if not extra or not python.version.endswith("t"):
            raise
        # What an extra needs need not be built for a Python without the GIL.
        print(
            f"{extra}: can't be installed for Python {python.version}: {str(error).strip().splitlines()[-1]}",
            flush=True,
        )
        return environment
    said = environment.smoke(url, "alone", extra or "without-extras")
    print(f"{extra or 'alone'}: {said.strip()}; installed: {' '.join(environment.distributions())}", flush=True)
    return environment


def long_form(python: pythons.Python, out: Path, options: list[str], *, with_suite: bool) -> None:
    wheel = built_and_checked(out)
    with Server() as server:
        alone = installed(wheel, "", python, out / "alone", server.url)
        for extra in project()["project"]["optional-dependencies"]:
            installed(wheel, extra, python, out / extra, server.url)
    if with_suite:
        core_of_the_suite(alone, out / "copy", *options)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/package", description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter to install into: as of scripts/test")
    parser.add_argument("--no-suite", action="store_true", help="leave out the core of the suite")
    arguments, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="interlock-package-") as out:
        try:
            long_form(pythons.found(arguments.python), Path(out), options, with_suite=not arguments.no_suite)
        except (AssertionError, pythons.NoPython) as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
