"""An object store that refuses a late writer, by conditional writes: `change(url, lease, how)`.

The fence stands in the object. A write says which version of the object it replaces (If-Match), so the store refuses it
if anybody has written since that version was read. Then read again: a higher fence means that a newer holder was here.
"""

import json
import urllib.error
import urllib.request

from interlock import Interlock
from interlock.fence import StaleFence


def change(url, lease, how):
    """Replace the object at `url` by `how(old)`, or raise StaleFence if a newer holder of the lock has written it."""
    while True:
        tag, old = read(url)
        newest = old.get("fence", 0)
        if newest > lease.fence:
            raise StaleFence(f"{url} has seen fence {newest} of a newer holder, so it refuses the older {lease.fence}")
        if put(url, tag, {**how(old), "fence": lease.fence}):
            return
        # Somebody has written between the two: an older holder, or this one.


def read(url):
    """The object's version and content."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.headers["ETag"], json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return None, {}


def put(url, tag, content):
    """Write this in place of that version. Returns whether it still was that version."""
    condition = {"If-None-Match": "*"} if tag is None else {"If-Match": tag}
    request = urllib.request.Request(url, json.dumps(content).encode(), condition, method="PUT")
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        if error.code not in {409, 412}:  # S3 answers 409 if two conditional writes meet
            raise
        return False
    return True


def main():
    from store import serve

    url = f"{serve()}/stock"
    with Interlock("embedded://") as locks:
        lock = locks.lock("stock", ttl=0.5, renew=False)
        late = lock.acquire()  # a holder that stops here for longer than its lease
        with lock.acquire(timeout=5) as newer:
            change(url, newer, lambda _: {"left": 9})
        try:
            change(url, late, lambda _: {"left": 100})
        except StaleFence as refusal:
            print(f"refused: {refusal}")
        print(f"the store has {read(url)[1]}")


if __name__ == "__main__":
    main()
