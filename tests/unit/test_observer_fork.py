"""A fork while another thread switches the observers: the child can switch them."""

from __future__ import annotations

import os
import threading

from interlock._people import observer


def test_a_child_of_a_fork_in_the_middle_of_a_switch_can_switch():
    taken, go_on = threading.Event(), threading.Event()

    def switching():
        with observer.switching:
            taken.set()
            go_on.wait(30)

    thread = threading.Thread(target=switching)
    thread.start()
    assert taken.wait(30)
    if not (child := os.fork()):
        free = observer.switching.acquire(timeout=5)
        os._exit(0 if free else 1)
    _, status = os.waitpid(child, 0)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
