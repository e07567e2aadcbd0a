"""Grids of threads on one memory, interleaved at random at every access to memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from .memory import Fault, Memory, View
from .translate import END, SHARED, Program

SPEEDS = (1, 1, 4)  # threads differ in how often they run
BURST = 12  # steps of one thread in a row, at most


class Divergence(Exception):
    """Threads of one block wait at different barriers."""


class Block:
    """A thread block: what its threads share."""

    def __init__(
        self, number: int, blocks: int, threads: int, arguments: Sequence[int], shared: bytes, horizon: int
    ) -> None:
        self.number, self.blocks, self.threads, self.arguments = number, blocks, threads, tuple(arguments)
        self.shared = bytearray(shared)
        self.view = View(horizon)
        self.members: list[Thread] = []


class Thread:
    """One thread. Its methods are what translated instructions call."""

    __slots__ = (
        "block", "done", "memory", "number", "pc", "registers", "speed", "steps", "verdict", "view", "vote", "waits_at",
    )  # fmt: skip

    def __init__(self, block: Block, number: int, program: Program, memory: Memory, speed: int) -> None:
        self.block, self.number, self.memory, self.speed = block, number, memory, speed
        self.registers = [0] * program.registers
        self.steps, self.pc = program.steps, 0
        self.view = View(memory.clock)
        self.waits_at, self.done = -1, False
        self.vote, self.verdict = True, 0

    def advance(self, most: int) -> int:
        """Up to so many steps, each to and including an access to memory; how many it took."""
        pc, steps, registers, taken = self.pc, self.steps, self.registers, 0
        while taken < most and pc != END and self.waits_at < 0:
            pc = steps[pc](registers, self)
            taken += 1
        self.pc, self.done = pc, pc == END
        return taken

    def arrive(self, site: int, vote: bool = True, verdict: int = -1) -> None:
        """At a barrier. `verdict`: the register that says whether all votes were for it; none if negative."""
        self.waits_at, self.vote, self.verdict = site, vote, verdict

    def now(self) -> int:
        return self.memory.clock

    def load(self, address: int, size: int, acquire: bool) -> int:
        if address >= SHARED:
            return int.from_bytes(self._shared(address, size), "little")
        return self.memory.load(self.view, self.block.view, address, size, acquire)

    def store(self, address: int, size: int, value: int, release: bool) -> None:
        value &= (1 << 8 * size) - 1
        if address >= SHARED:
            self._shared(address, size)[:] = value.to_bytes(size, "little")
        else:
            self.memory.store(self.view, self.block.view, address, size, value, release)

    def add(self, address: int, size: int, value: int, acquire: bool, release: bool) -> int:
        return self.memory.add(self.view, self.block.view, address, size, value, acquire, release)

    def load_all(self, address: int, size: int, fold: Callable[[int, int], int]) -> int:
        return self.memory.load_all(self.view, self.block.view, address, size, fold)

    def store_all(self, address: int, size: int, value: int) -> None:
        self.memory.store_all(self.view, address, size, value)

    def fence_alias(self) -> None:
        self.memory.fence_alias(self.view, self.block.view)

    def _shared(self, address: int, size: int) -> memoryview:
        at = address - SHARED
        if at % size or at + size > len(self.block.shared):
            raise Fault(f"{size} bytes at {at:#x} of shared memory")
        return memoryview(self.block.shared)[at : at + size]


class Machine:
    """Runs grids until all have ended. One seed, one schedule."""

    def __init__(self, memory: Memory, chance: random.Random) -> None:
        self._memory, self._chance = memory, chance
        self._threads: list[Thread] = []

    def launch(self, program: Program, arguments: Sequence[int], blocks: int, threads: int) -> None:
        """A grid, all of whose blocks are resident. Grids run side by side, at speeds of their own."""
        speed = self._chance.choice(SPEEDS)
        for number in range(blocks):
            garbage = self._chance.randbytes(program.kernel.shared_bytes)
            block = Block(number, blocks, threads, arguments, garbage, self._memory.clock)
            block.members = [
                Thread(block, k, program, self._memory, speed * self._chance.choice(SPEEDS)) for k in range(threads)
            ]
            self._threads += block.members

    def run(self, steps: int) -> bool:
        """Up to so many steps; whether all threads have ended. If so, all they did is visible."""
        runnable = self._runnable()
        while runnable and steps > 0:
            speeds = [thread.speed for thread in runnable]
            for thread in self._chance.choices(runnable, speeds, k=64):
                steps -= self._turn(thread)
                if thread.done or thread.waits_at >= 0:
                    self._meet(thread.block)
                    break
            runnable = self._runnable()
        if not runnable:
            self._end()
        return not runnable

    def _runnable(self) -> list[Thread]:
        return [thread for thread in self._threads if not thread.done and thread.waits_at < 0]

    def _turn(self, thread: Thread) -> int:
        taken = thread.advance(1 + int(self._chance.random() * BURST))
        any_one = self._threads[int(self._chance.random() * len(self._threads))]
        self._memory.drain(any_one.view, any_one.block.view)
        return taken

    def _meet(self, block: Block) -> None:
        """Opens the barrier if all threads that have not ended are at it."""
        here = [thread for thread in block.members if not thread.done]
        if not here or any(thread.waits_at < 0 for thread in here):
            return
        if len({thread.waits_at for thread in here}) > 1:
            raise Divergence(
                f"block {block.number}: threads wait at instructions {[thread.waits_at for thread in here]}"
            )
        self._memory.meet([thread.view for thread in here], block.view)
        every = all(thread.vote for thread in here)
        for thread in here:
            thread.waits_at = -1
            if thread.verdict >= 0:
                thread.registers[thread.verdict] = every

    def _end(self) -> None:
        for thread in self._threads:
            self._memory.settle(thread.view, thread.block.view)
        self._threads.clear()
        self._memory.forget()
