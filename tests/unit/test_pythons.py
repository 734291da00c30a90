"""Which Python `scripts/test --python` takes. Debian's are not asked for here: they take minutes."""

from __future__ import annotations

import sys
import sysconfig

import pytest

from harness import pythons

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}" + "t" * bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    """No Python on PATH, of pyenv, of uv or kept, and no Debian."""
    for name in ("bin", "pyenv/versions", "kept"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(pythons, "KEPT", tmp_path / "kept")


def command(path, says: str):
    """An executable that runs the Python of this test, or the given line of a shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n{says or f"""exec "{sys.executable}" "$@" """}\n')
    path.chmod(0o755)
    return path


def test_a_path_or_a_command_is_taken_with_its_version(tmp_path):
    given = command(tmp_path / "bin" / "mine", "")
    for wanted in (str(given), "mine", sys.executable):
        assert pythons.found(wanted).version == HERE


def test_a_python_on_the_path_comes_first_and_a_shim_that_runs_nothing_is_passed_over(tmp_path):
    command(tmp_path / "bin" / f"python{HERE}", "echo 'pyenv: not chosen' >&2; exit 127")
    with pytest.raises(pythons.NoPython):
        pythons.found(HERE)
    command(tmp_path / "pyenv" / "versions" / f"{HERE.removesuffix('t')}.9" / "bin" / "python", "exit 1")
    suffix = HERE[len(HERE.removesuffix("t")) :]
    command(tmp_path / "pyenv" / "versions" / f"{HERE.removesuffix('t')}.10{suffix}" / "bin" / "python", "")
    assert pythons.found(HERE).version == HERE
    command(tmp_path / "bin" / f"python{HERE}", f"echo {HERE} /first")
    assert str(pythons.found(HERE).path) == "/first"


def test_one_that_was_unpacked_before_is_found_again(tmp_path):
    number = HERE.removesuffix("t")
    command(tmp_path / "kept" / HERE / "usr" / "bin" / f"python{number}", "")
    assert pythons.found(HERE).version == HERE


def test_an_error_says_where_it_was_looked_for_and_the_way_out(tmp_path):
    command(tmp_path / "bin" / "python3", "echo 3.11 /usr/bin/python3")
    with pytest.raises(
        pythons.NoPython, match=r"no Python 3\.99 could be had: none on PATH; .*--python /path/to/python"
    ):
        pythons.found("3.99")
    with pytest.raises(pythons.NoPython, match="nothing runs no Python"):
        pythons.found("nothing")
    with pytest.raises(pythons.NoPython, match=r"3\.11 or later; this is 3\.9"):
        pythons.found("3.9")
    old = command(tmp_path / "old", "echo 3.10 /usr/bin/python3.10")
    with pytest.raises(pythons.NoPython, match=r"this is 3\.10"):
        pythons.found(str(old))


def test_an_interrupted_download_leaves_no_half(tmp_path):
    with pytest.raises(KeyboardInterrupt), pythons.Unfinished("3.99") as root:
        (root / "half").touch()
        raise KeyboardInterrupt
    assert not any((tmp_path / "kept").iterdir())
    with pythons.Unfinished("3.99") as root:
        (root / "whole").touch()
    assert (tmp_path / "kept" / "3.99" / "whole").exists()
