"""What the live page costs with 5,000 locks and 1,000 changes a second: `python -m browser.measure --minutes 10`.

It prints one line of JSON a minute: the longest frame and how many took over 100 ms, the heap of the page's script
after a collection, and the cores that the page's process and the server of the locks used, the latter also before
anybody looked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from harness.browser import Browser
from harness.commands import Command
from interlock.testing import BreakableServer

INTERLOCK = Path(sys.executable).with_name("interlock")
TICK = os.sysconf("SC_CLK_TCK")
OF_ONE = 50  # locks of one Interlock: the registry has so many of each session
LOAD = """
import sys, time
from interlock import Interlock
url, first, number, rate = sys.argv[1], *map(int, sys.argv[2:])
held = []
for i in range(first, first + number, OF_ONE):
    locks = Interlock(url, label=f"load-{i}", max_connections=2)
    for j in range(i, min(first + number, i + OF_ONE)):
        held.append([locks, f"stock:{j}", locks.lock(f"stock:{j}").acquire()])
print("ready", flush=True)
began, done = time.monotonic(), 0
while True:  # a release is a change, and so is an acquire
    if not rate:
        time.sleep(60)
    each = held[done % len(held)]
    each[2].release()
    each[2] = each[0].lock(each[1]).acquire()
    done += 1
    ahead = began + 2 * done / rate - time.monotonic()
    if ahead > 0.002:
        time.sleep(ahead)
""".replace("OF_ONE", str(OF_ONE))
FRAMES = """
window.frames_ = {longest: 0, long: 0, all: 0};
let before = performance.now();
const frame = (now) => {
  const took = now - before;
  before = now;
  frames_.all += 1;
  if (took > frames_.longest) frames_.longest = took;
  if (took > 100) frames_.long += 1;
  requestAnimationFrame(frame);
};
requestAnimationFrame((now) => { before = now; requestAnimationFrame(frame); });
window.tasks_ = {longest: 0, long: 0};
new PerformanceObserver((list) => { for (const each of list.getEntries()) {
  if (each.duration > tasks_.longest) tasks_.longest = each.duration;
  if (each.duration > 100) tasks_.long += 1;
} }).observe({entryTypes: ["longtask"]});
"""


def cpu_of(pid: int) -> float:
    """Seconds of a core that this process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def measure(locks: int, rate: int, seconds: float, steps: int, loaders: int = 2):
    """Yield what each step has measured."""
    with BreakableServer() as server, tempfile.TemporaryDirectory() as folder:
        home, running = Path(folder), []
        try:
            for i in range(loaders):
                words = [server.url, *map(str, (i * locks // loaders, locks // loaders, rate // loaders))]
                running.append(Command([sys.executable, "-c", LOAD, *words], cwd=home, log=home / f"load-{i}"))
            for each in running:
                each.says("ready", within=300)
            pid = server.pid
            time.sleep(3)
            before = cpu_of(pid)
            time.sleep(10)
            unwatched = (cpu_of(pid) - before) / 10
            argv = [str(INTERLOCK), "web", "--port", "0", "--url", server.url]
            page = Command(argv, cwd=home, log=home / "page")
            running.append(page)
            (address,) = page.says(r"http://\S+")
            browser = Browser()
            try:
                browser.open(address)
                browser.sees(f"{locks:,} names", within=300)
                browser.run(FRAMES)
                for step in range(steps):
                    began, used, served = time.monotonic(), cpu_of(page.pid), cpu_of(pid)
                    browser.run("frames_.longest = frames_.long = frames_.all = tasks_.longest = tasks_.long = 0")
                    time.sleep(seconds / steps)
                    took = time.monotonic() - began
                    frames, tasks = browser.run("return [frames_, tasks_]")
                    browser.command("HeapProfiler.collectGarbage")
                    if not step:
                        browser.command("Performance.enable")
                    metrics = browser.command("Performance.getMetrics")["metrics"]
                    of = {each["name"]: each["value"] for each in metrics}
                    rss = Path(f"/proc/{page.pid}/status").read_text().split("VmRSS:")[1].split()[0]
                    yield {
                        "longest_frame_ms": round(frames["longest"]), "frames_over_100_ms": frames["long"],
                        "frames": frames["all"], "longest_task_ms": round(tasks["longest"]),
                        "tasks_over_100_ms": tasks["long"], "heap_mb": round(of["JSHeapUsedSize"] / 1e6, 1),
                        "nodes": int(of["Nodes"]), "page_process_core": round((cpu_of(page.pid) - used) / took, 3),
                        "page_process_mb": round(int(rss) / 1000, 1),
                        "server_core": round((cpu_of(pid) - served) / took, 3),
                        "server_core_unwatched": round(unwatched, 3),
                        "turn_s": (re.findall(r"every (\d+) s", browser.text) or [None])[0],
                    }  # fmt: skip
            finally:
                browser.close()
        finally:
            for each in running:
                each.kill_all()


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--locks", type=int, default=5000)
    parser.add_argument("--rate", type=int, default=1000)
    options = parser.parse_args()
    steps = max(1, round(options.minutes))
    for found in measure(options.locks, options.rate, 60 * options.minutes, steps):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
