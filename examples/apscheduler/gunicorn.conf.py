"""gunicorn reads this file by itself: three workers, each with a scheduler."""

import os

bind = os.environ.get("BIND", "127.0.0.1:8000")
workers = 3


def post_worker_init(worker):
    from app import scheduler

    scheduler.start()  # after the fork, since threads do not survive one


def worker_exit(server, worker):
    from app import scheduler

    if scheduler.running:
        scheduler.shutdown()  # resigns, so the next worker leads at once
