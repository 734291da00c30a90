"""A process as numbered states, and each step from one to another: the real process runs once for each.

Theory. Coroutines can't be copied. But a process is a function of its inputs, so a state is remembered by the shortest
sequence of inputs that leads to it, and a step from it repeats these inputs in a new process and adds one. Processes
with one fingerprint are one state. Most steps of a search are steps of the same few states: each costs a look into a
dict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from .process import Process

if TYPE_CHECKING:
    from .process import Input, Shape, View
    from .wire import Request

KEPT_ALIVE: Final = 500  # processes that wait for their next input, so that nothing has to be repeated for it


class Step(NamedTuple):
    """What an input does to a process."""

    after: int
    sent: tuple[Request, ...]
    kept: frozenset[str]
    """The handles of earlier requests whose replies it still awaits."""


class Automaton:
    """All states so far of the processes of one name and shape."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name, self.shape = name, shape
        self.views: list[View] = []
        self.repeated = 0  # inputs that processes took again
        self._paths: list[tuple[int, Input | None]] = []  # the state before, and the input that led here
        self._numbers: dict[bytes, int] = {}
        self._steps: dict[tuple[int, Input], Step] = {}
        self._alive: dict[int, Process] = {}
        process = Process(name, shape)
        self._number(process, -1, None)

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self._steps)

    def step(self, state: int, given: Input) -> Step:
        """Return what this input does in this state."""
        step = self._steps.get((state, given))
        if step is None:
            process = self._alive.pop(state, None) or self._repeated(state)
            sent, kept = process.take(given)
            step = self._steps[state, given] = Step(self._number(process, state, given), tuple(sent), kept)
        return step

    def _repeated(self, state: int) -> Process:
        inputs: list[Input] = []
        while True:
            before, given = self._paths[state]
            if given is None:
                break
            inputs.append(given)
            state = before
        self.repeated += len(inputs)
        process = Process(self.name, self.shape)
        for given in reversed(inputs):
            process.take(given)
        return process

    def _number(self, process: Process, before: int, given: Input | None) -> int:
        """Return the number of the state of this process, which nobody else uses from here on."""
        key = process.fingerprint()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.views)
            self.views.append(process.view())
            self._paths.append((before, given))
            if len(self._alive) < KEPT_ALIVE:
                self._alive[number] = process
                return number
        process.close()
        return number

    def close(self) -> None:
        """Drop the processes that are alive."""
        for process in self._alive.values():
            process.close()
        self._alive.clear()
