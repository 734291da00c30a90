"""Payments: several workers, one account at a time."""

import os
import time

from redis import Redis
from rq import Queue

from interlock.contrib.rq import locked


@locked("account:{account}", busy="retry")
def pay(account, order):
    print(f"begin {account} order {order}", flush=True)
    time.sleep(0.3)
    print(f"end {account} order {order}", flush=True)


def main():  # python -c "import bank; bank.main()": enqueue ten payments for two accounts
    queue = Queue(connection=Redis.from_url(os.environ.get("REDIS_URL", "redis://localhost:6379/0")))
    for order in range(10):
        queue.enqueue(pay, order % 2, order)
