"""Payments: two workers, one account at a time."""

import os
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from interlock.contrib.dramatiq import Locks, locked

broker = RedisBroker(url=os.environ.get("REDIS_URL", "redis://localhost:6379/0"))
broker.add_middleware(Locks())  # on the server of the broker; Locks("redis://...") is another one
dramatiq.set_broker(broker)


@dramatiq.actor(min_backoff=500, max_backoff=2000)
@locked("account:{account}", busy="retry")
def pay(account, order):
    print(f"begin {account} order {order}", flush=True)
    time.sleep(0.3)
    print(f"end {account} order {order}", flush=True)


if __name__ == "__main__":  # python bank.py: send ten payments for two accounts
    for order in range(10):
        pay.send(order % 2, order)
