"""A web application of several processes with one schedule: each process has a scheduler, and one of them runs."""

import os
import time

from apscheduler.schedulers.background import BackgroundScheduler

from interlock import Interlock
from interlock.contrib.apscheduler import Leading, current_lease

scheduler = BackgroundScheduler()
locks = Interlock(os.environ.get("INTERLOCK_URL", "embedded://"))
leading = Leading(scheduler, locks.election("schedule", ttl=3))  # with a ttl of 3 s the next one leads 3 s after a kill


@scheduler.scheduled_job("cron", second="*", misfire_grace_time=10, coalesce=False)
def tick():
    print(f"tick at {time.strftime('%X')} in process {os.getpid()}, term {current_lease().term}", flush=True)


def app(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    role = "leads" if leading.lease else "follows"
    return [f"process {os.getpid()} {role}\n".encode()]
