"""A shop on Celery: payments of one user one at a time, one report a day at a time, one beat of many."""

import json
import os
import pathlib
import time

from celery import Celery

from interlock.contrib.celery import Unique, current_lease, locked

app = Celery("shop", broker=os.environ["BROKER"], backend=os.environ["BROKER"])
app.conf.interlock_url = os.environ["LOCKS"]
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, broker_connection_retry_on_startup=True)
app.conf.beat_schedule = {"count the stock": {"task": "shop.count_stock", "schedule": 1.0}}

BOOKS = pathlib.Path(os.environ["BOOKS"])  # a file for each user: what was paid, by the id of its task


@app.task(bind=True, max_retries=None)
@locked("pay:{user_id}", busy="retry", ttl=3)
def pay(self, user_id, cents):
    """Read, think, write: without the lock, two at once would lose a payment."""
    book = BOOKS / user_id
    paid = json.loads(book.read_text()) if book.exists() else {}
    time.sleep(0.1)
    current_lease().ensure()  # raises LeaseLost rather than write late
    paid[self.request.id] = cents  # a task that Celery runs again, since its process was killed, counts once
    book.with_suffix(".new").write_text(json.dumps(paid))
    book.with_suffix(".new").replace(book)
    return sum(paid.values())


@app.task(base=Unique, unique="report:{day}", at_most=3600)
def report(day):
    """Who asks for it while it waits or runs gets the result of the first."""
    time.sleep(1)
    return f"report of {day}"


@app.task
@locked("stock", busy="skip", ttl=3)
def count_stock():
    return "counted"
