"""One caller asks for all that want to know the same, and nobody waits for a caller that has gone."""

from __future__ import annotations

import threading

import pytest

from interlock._people.answers import Answers
from interlock._protocol.run_to_end import run
from interlock._protocol.server import Disconnected
from interlock._transports.blocking.runtime import ThreadRuntime


class Server:
    """Answers when it may."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.asked, self.error = 0, error
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    async def ask(self) -> str:
        self.asked += 1
        self.is_asked.set()
        assert self.may_answer.wait(30)
        if self.error is not None:
            raise self.error
        return "answer"


def get(answers, server, found):
    try:
        found.append(run(answers.get("a", server.ask, answers.runtime.now() + 30)))
    except BaseException as error:
        found.append(error)


def crowd(server, answers, number=5):
    """What so many threads get that ask at one moment."""
    found: list[object] = []
    threads = [threading.Thread(target=get, args=(answers, server, found)) for _ in range(number)]
    for thread in threads:
        thread.start()
    assert server.is_asked.wait(30)
    while len(answers._asking["a"].waiting) < number:
        threading.Event().wait(0.001)
    server.may_answer.set()
    for thread in threads:
        thread.join(30)
    return found


def test_one_asks_for_all_and_the_answer_counts_for_a_while():
    answers, server = Answers(ThreadRuntime()), Server()
    found = crowd(server, answers)
    assert [each.value for each in found] == ["answer"] * 5
    assert run(answers.get("a", server.ask, 0.0)) is found[0]
    assert server.asked == 1
    assert run(answers.get("b", server.ask, 0.0)).value == "answer"
    assert server.asked == 2


@pytest.mark.parametrize("error", [Disconnected("silent", sent=True), KeyboardInterrupt()])
def test_nobody_gets_an_answer_if_there_is_none_and_the_next_one_asks_again(error):
    answers, server = Answers(ThreadRuntime()), Server(error)
    found = crowd(server, answers)
    assert found.count(None) >= 4
    server.error = None
    assert run(answers.get("a", server.ask, 0.0)).value == "answer"


def test_an_interrupt_before_the_question_leaves_it_to_the_next_one():
    class Interrupted:
        left = 1

        def __enter__(self): ...

        def __exit__(self, *_):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

    runtime, server = ThreadRuntime(), Server()
    runtime.mutex = Interrupted()
    answers = Answers(runtime)
    server.may_answer.set()
    with pytest.raises(KeyboardInterrupt):
        run(answers.get("a", server.ask, 0.0))
    assert run(answers.get("a", server.ask, 0.0)).value == "answer"
