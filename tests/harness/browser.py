"""Headless Chromium, of Debian, and what a person sees in it. `python -m harness.browser` says whether it runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.modes import wait_until
from harness.servers import DEBIAN, Missing, libraries

AXE = Path(sys.prefix, "axe/axe_playwright_python/axe.min.js")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
)  # fmt: skip
ENOUGH = 60.0  # seconds that a busy machine may take


def binaries() -> tuple[Path, Path]:
    """Chromium and its driver. Raises Missing."""
    unpacked = DEBIAN / "usr/lib/chromium/chromium", DEBIAN / "usr/bin/chromedriver"
    if all(each.exists() for each in unpacked):
        return unpacked
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if found[0] and found[1]:
        return Path(found[0]), Path(found[1])
    raise Missing("apt-get install chromium chromium-driver")


def environment() -> dict[str, str]:
    """What Chromium needs if its packages are only unpacked."""
    made = {**os.environ, **libraries(binaries()[0])}
    if (fonts := DEBIAN / "etc/fonts/fonts.conf").exists() and not Path("/etc/fonts/fonts.conf").exists():
        made["FONTCONFIG_FILE"] = str(fonts)
    return made


class Browser:
    """One window."""

    def __init__(self, *, dark: bool = False, size: tuple[int, int] = (1400, 900), touch: bool = False) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        chromium, driver = binaries()
        self._home = tempfile.mkdtemp(prefix="interlock-chromium-")
        options = Options()
        options.binary_location = str(chromium)
        for flag in (*FLAGS, f"--user-data-dir={self._home}", f"--window-size={size[0]},{size[1]}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        options.enable_bidi = False
        self.driver = webdriver.Chrome(options=options, service=Service(str(driver), env=environment()))
        self.driver.set_script_timeout(ENOUGH)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        if touch:
            self.command(
                "Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=2, mobile=True
            )

    def command(self, name: str, **parameters):
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, parameters)

    def open(self, address: str) -> None:
        """Go to this address. The log has nothing of the page before."""
        self.driver.get("about:blank")
        self.log()
        self.driver.get(address)

    def run(self, script: str, *args):
        """Run this body of a function in the page."""
        return self.driver.execute_script(script, *args)

    @property
    def text(self) -> str:
        """All that a person can read."""
        return self.run("return document.body.innerText")

    def sees(self, *words: str, within: float = ENOUGH) -> str:
        """The text, once it has all of these."""
        text = ""

        def has_all() -> bool:
            nonlocal text
            text = self.text
            return all(word in text for word in words)

        try:
            wait_until(has_all, within)
        except AssertionError:
            raise AssertionError(f"no {words} in:\n{text}\nlog: {self.log()}") from None
        return text

    def sees_no(self, word: str, within: float = ENOUGH) -> None:
        """Wait until nobody can read this any more."""
        wait_until(lambda: word not in self.text, within)

    def row(self, name: str) -> str | None:
        """The text of the row of this name in the view of all names, or None."""
        return self.run(
            "for (const row of document.querySelectorAll('tbody tr'))"
            " if (row.querySelector('.name')?.textContent === arguments[0]) return row.innerText; return null",
            name,
        )

    def click(self, words: str) -> None:
        """Press the button or link with these words."""
        done = self.run(
            "for (const each of document.querySelectorAll('button, a'))"
            " if (each.offsetParent && each.textContent.trim() === arguments[0]) { each.click(); return true }"
            " return false",
            words,
        )
        assert done, f"no button {words!r} in:\n{self.text}"

    def log(self) -> list[str]:
        """What the console has said since the last call: errors, and what a policy has refused."""
        return [each["message"] for each in self.driver.get_log("browser")]

    def axe(self) -> list[str]:
        """What axe-core finds against accessibility."""
        self.command("Page.setBypassCSP", enabled=True)
        self.run(AXE.read_text())
        found = self.driver.execute_async_script(
            "const done = arguments[0]; axe.run(document, {resultTypes: ['violations']})"
            ".then((r) => done(r.violations.map((v) => [v.id, v.help, v.nodes.map((n) => n.html + n.failureSummary)])))"
        )
        return [json.dumps(each) for each in found]

    def picture(self, path: Path) -> None:
        """Save a screenshot of the whole page."""
        self.driver.save_screenshot(str(path))

    def close(self) -> None:
        """End Chromium, and delete its profile."""
        with contextlib.suppress(Exception):
            self.driver.quit()
        shutil.rmtree(self._home, ignore_errors=True)


def main() -> int:
    """Print the path of Chromium. Returns the exit status: 0 if Chromium runs here."""
    try:
        chromium, _ = binaries()
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as home:
        ran = subprocess.run(
            [chromium, *FLAGS, f"--user-data-dir={home}", "--dump-dom", "data:text/html,<p>it runs"],
            env=environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    if "it runs" not in ran.stdout:
        print(ran.stderr[-2000:], file=sys.stderr)
        return 1
    print(chromium)
    return 0


if __name__ == "__main__":
    sys.exit(main())
