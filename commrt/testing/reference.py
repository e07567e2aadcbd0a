"""A reference interpreter of plans: all ranks in one process, in plain numpy, one operation at a time.

It is an oracle, written for suspicion instead of speed. It shares no code with the native executor, takes every freedom
that the plan format leaves (puts and packets arrive late, sources of puts are read late, ranks and blocks run ahead in
random order) and refuses what the format forbids: a wait that nothing will answer, signals left over, a packet slot
written twice, writes to an input, peers' user memory touched outside of its owner's handshakes, a plan that isn't
synchronising as it claims. Scratch starts each window as garbage.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commrt.errors import Deadlock, PlanError
from commrt.plan import SELF, Operation, Plan, Ref, groups, part_of
from commrt.testing._cursor import Cursor, Signal, Slot
from commrt.testing.folding import fold

Array = NDArray[Any]


def run(
    plan: Plan,
    inputs: Sequence[Array | None],
    outputs: Sequence[Array | None],
    reduction: str = "sum",
    window: int = 1 << 40,
    seed: int | None = None,
) -> None:
    """Run a whole plan. `inputs[r]` and `outputs[r]` are rank r's flat buffers, None where the collective has none.

    Writes the outputs in place; an output may be (part of) the input as the collective allows. `window` is the most
    elements of a group that one epoch moves. Without a `seed` blocks take turns and puts arrive at once; with one, the
    schedule is random and replays. Raises Deadlock, or PlanError for a broken rule; both name rank, block, operation.
    """
    _World(plan, inputs, outputs, reduction, window, seed).run()


class _World:
    """The state of a run. `window_of[r]` is the window rank r is in; len(windows) once it has finished."""

    def __init__(
        self,
        plan: Plan,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array | None],
        reduction: str,
        window: int,
        seed: int | None,
    ) -> None:
        self.plan, self.reduction = plan, reduction
        self.random = None if seed is None else random.Random(seed)
        self.user = {"input": inputs, "output": outputs}
        self.dtype, self.count = self._geometry()
        starts = range(0, max(self.count, 1), window)
        self.windows = [(start, min(window, self.count - start)) for start in starts]
        self.window_of = [0] * plan.ranks
        self.cursors = [
            Cursor(program.rank, number, block)
            for program in plan.programs
            for number, block in enumerate(program.blocks)
        ]
        # Keys: (rank, window, slot).
        self.scratch: dict[tuple[int, int, int], Array] = {}
        self.packets: dict[tuple[int, int, int], Slot] = defaultdict(Slot)
        # By (rank, window): who has entered this window, and whose addresses are known, as far as the rank can tell.
        self.heard: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.learnt: dict[tuple[int, int], set[int]] = defaultdict(set)
        # What is under way, in order, by (lane, sender, its block, receiver); what has arrived, by channel and pair.
        self.flying: dict[tuple[str, int, int, int], deque[tuple[str, Callable[[], None]]]] = defaultdict(deque)
        self.mailbox: dict[tuple[int, int, int], deque[Signal]] = defaultdict(deque)

    def _geometry(self) -> tuple[np.dtype[Any], int]:
        for name, number in zip(("input", "output"), groups(self.plan.collective, self.plan.ranks), strict=True):
            for array in self.user[name]:
                if array is not None:
                    return array.dtype, array.size // number
        return np.dtype(np.float32), 0

    # The schedule.

    def run(self) -> None:
        """Until every rank has finished every window."""
        for rank in range(self.plan.ranks):
            self.heard[rank, 0].add(rank)
        while any(window < len(self.windows) for window in self.window_of):
            if not self._pass(partial=True) and not self._pass(partial=False):
                raise Deadlock(self._report())
        while self._deliver_all():
            pass
        left = sorted(key for key, signals in self.mailbox.items() if signals)
        if left:
            raise PlanError(f"{self.plan.name}: signals that nobody took, as (channel, from, to): {left}")

    def _pass(self, partial: bool) -> bool:
        """Each block and each delivery gets a chance (`partial`, with a seed: some of them). True if anything moved."""
        actors: list[Callable[[], bool]] = [lambda cursor=cursor: self._advance(cursor) for cursor in self.cursors]  # type: ignore[misc]
        actors += [lambda queue=queue: self._deliver(queue) for queue in list(self.flying.values())]  # type: ignore[misc]
        if self.random:
            self.random.shuffle(actors)
            if partial:
                del actors[self.random.randint(1, len(actors)) :]
        moved = [actor() for actor in actors]
        ended = [self._end_window(rank) for rank in range(self.plan.ranks)]
        return any(moved) or any(ended)

    def _advance(self, cursor: Cursor) -> bool:
        """Run a block until it must wait; with a seed, for some operations."""
        window = self.window_of[cursor.rank]
        if window == len(self.windows) or not self._may_enter(window):
            return False
        budget = self.random.randint(1, 4) if self.random else 1 << 30
        before = (cursor.pc, cursor.turn, len(cursor.taken), cursor.arrived)
        while budget and cursor.operation is not None and self._step(cursor, cursor.operation, window):
            budget -= 1
        return before != (cursor.pc, cursor.turn, len(cursor.taken), cursor.arrived)

    def _may_enter(self, window: int) -> bool:
        """The runtime's guard of one-way plans: halves of scratch are reused only when all ranks are done with them."""
        return self.plan.launch_class == "synchronising" or min(self.window_of) >= window - 1

    def _end_window(self, rank: int) -> bool:
        window = self.window_of[rank]
        mine = [cursor for cursor in self.cursors if cursor.rank == rank]
        puts = any(kind == "put" for key, queue in self.flying.items() if key[1] == rank for kind, _ in queue)
        if window == len(self.windows) or puts or any(cursor.operation for cursor in mine):
            return False
        if not self._may_enter(window):
            return False
        missing = set(range(self.plan.ranks)) - self.heard[rank, window]
        if missing and self.plan.launch_class == "synchronising":
            raise PlanError(f"{self.plan.name} is not synchronising: rank {rank} ends without word of {missing}")
        for cursor in mine:
            cursor.restart()
        self.window_of[rank] += 1
        self.heard[rank, window + 1].add(rank)
        return True

    def _deliver(self, queue: deque[tuple[str, Callable[[], None]]]) -> bool:
        """Let the first of what is under way arrive."""
        if not queue:
            return False
        queue.popleft()[1]()
        return True

    def _deliver_all(self) -> bool:
        return sum(map(self._deliver, self.flying.values())) > 0

    def _send(self, cursor: Cursor, lane: str, peer: int, kind: str, action: Callable[[], None]) -> None:
        if self.random:
            self.flying[lane, cursor.rank, cursor.number, peer].append((kind, action))
        else:
            action()

    def _report(self) -> str:
        stuck = [cursor for cursor in self.cursors if cursor.operation is not None]
        return f"deadlock in {self.plan.name}: " + "; ".join(self._why(cursor) for cursor in stuck)

    def _why(self, cursor: Cursor) -> str:
        operation = cursor.operation
        if operation is not None and operation.name == "wait":
            missing = [peer for peer in operation.peers if peer not in cursor.taken]
            return f"{cursor} waits on channel {operation.channel} for ranks {missing}"
        if operation is not None and operation.name == "barrier":
            return f"{cursor} waits for the other blocks"
        slots = [ref.index for ref in operation.src if ref.buffer == "packets"] if operation is not None else []
        return f"{cursor} waits for packets in slots {slots}"

    # Buffers.

    def _slice(self, operation: Operation, turn: int, window: int) -> tuple[int, int]:
        """(begin, end) of what the operation moves, within its chunk, in elements."""
        length = self._part(window, operation.size.part)[1]
        if not operation.sliced:
            return 0, length
        unit = self.plan.unit // self.dtype.itemsize
        return min(turn * unit, length), min((turn + 1) * unit, length)

    def _part(self, window: int, part: int) -> tuple[int, int]:
        return part_of(self.windows[window][1], self.plan.parts, self.dtype.itemsize, part)

    def _view(self, cursor: Cursor, operation: Operation, ref: Ref, window: int, write: bool = False) -> Array:
        """The memory of a reference, checked."""
        begin, end = self._slice(operation, cursor.turn, window)
        rank = cursor.rank if ref.rank == SELF else ref.rank
        if ref.buffer == "scratch":
            return self._scratch(rank, window, ref.index)[begin:end]
        if write and ref.buffer == "input":
            raise PlanError(f"{cursor} writes to the input of rank {rank}")
        offset, length = self._part(window, ref.part)
        if end > length:
            raise PlanError(f"{cursor} moves {end} elements of a chunk of {length}")
        if ref.rank != SELF and end > begin:
            self._check_access(cursor, rank, window)
        array = self.user[ref.buffer][rank]
        if array is None:
            if end > begin:
                raise PlanError(f"{cursor} touches the {ref.buffer} of rank {rank}, which has none")
            return np.empty(0, self.dtype)
        base = ref.index * self.count + self.windows[window][0] + offset
        return array[base + begin : base + end]

    def _scratch(self, rank: int, window: int, slot: int) -> Array:
        key = (rank, window, slot)
        if key not in self.scratch:
            self.scratch[key] = self._garbage(window)
        return self.scratch[key]

    def _garbage(self, window: int) -> Array:
        return np.full(self._part(window, 0)[1] * self.dtype.itemsize, 0xA7, np.uint8).view(self.dtype)

    def _check_access(self, cursor: Cursor, owner: int, window: int) -> None:
        if owner not in self.learnt[cursor.rank, window]:
            raise PlanError(f"{cursor} touches memory of rank {owner} before it learnt its address")
        if self.window_of[owner] != window:
            raise PlanError(f"{cursor} touches memory of rank {owner}, which has left")

    # The operations. Each returns whether it is done; one that isn't has changed nothing that it would repeat.

    def _step(self, cursor: Cursor, operation: Operation, window: int) -> bool:
        done: bool = getattr(self, "_" + operation.name)(cursor, operation, window)
        if done and operation.name != "loop":
            cursor.pc += 1
        return done

    def _copy(self, cursor: Cursor, operation: Operation, window: int) -> bool:
        source = self._view(cursor, operation, operation.src[0], window)
        self._view(cursor, operation, operation.dst[0], window, write=True)[:] = source
        return True

    _get = _copy

    def _put(self, cursor: Cursor, operation: Operation, window: int) -> bool:
        source = self._view(cursor, operation, operation.src[0], window)
        target = self._view(cursor, operation, operation.dst[0], window, write=True)

        def arrive() -> None:
            target[:] = source

        self._send(cursor, "ordered", operation.dst[0].rank, "put", arrive)
        return True

    def _reduce(self, cursor: Cursor, operation: Operation, window: int) -> bool:
        sources = [self._view(cursor, operation, ref, window) for ref in operation.src]
        self._store(cursor, operation, window, fold(sources, self.reduction, self._divisor(operation)))
        return True

    def _divisor(self, operation: Operation) -> int:
        return self.plan.ranks if operation.final else 1

    def _store(self, cursor: Cursor, operation: Operation, window: int, data: Array) -> None:
        for ref in operation.dst:
            if ref.buffer == "packets":
                self._send_packets(cursor, operation, window, ref, data)
            else:
                self._view(cursor, operation, ref, window, write=True)[:] = data

    def _send_packets(self, cursor: Cursor, operation: Operation, window: int, ref: Ref, data: Array) -> None:
        owner = cursor.rank if ref.rank == SELF else ref.rank
        values, heard, where = data.copy(), frozenset(self.heard[cursor.rank, window]), str(cursor)

        def arrive() -> None:
            if self.packets[owner, window, ref.index].values is not None:
                raise PlanError(f"{where} writes packet slot {ref.index} of rank {owner} twice")
            self.packets[owner, window, ref.index] = Slot(values, heard)

        self._send(cursor, "packets", owner, "packets", arrive)

    def _put_packets(self, cursor: Cursor, operation: Operation, window: int) -> bool:
        self._store(cursor, operation, window, self._view(cursor, operation, operation.src[0], window))
        return True

    def _unpack_packets(self, cursor: Cursor, operation: Operation, window: int) -> bool:
        sources = self._received(cursor, operation, window)
        if sources is not None:
            self._store(cursor, operation, window, sources[0])
        return sources is not None

    def _reduce_packets(self, cursor: Cursor, operation: Operation, window: int) -> bool:
        sources = self._received(cursor, operation, window)
        if sources is not None:
            self._store(cursor, operation, window, fold(sources, self.reduction, self._divisor(operation)))
        return sources is not None

    def _received(self, cursor: Cursor, operation: Operation, window: int) -> list[Array] | None:
        """All sources, once all packets among them are there."""
        sources, heard = [], set[int]()
        for ref in operation.src:
            if ref.buffer == "packets":
                slot = self.packets[cursor.rank, window, ref.index]
                if slot.values is None:
                    return None
                sources.append(slot.values)
                heard |= slot.heard
            else:
                sources.append(self._view(cursor, operation, ref, window))
        self.heard[cursor.rank, window] |= heard
        length = self._slice(operation, cursor.turn, window)[1]
        if any(source.size != length for source in sources):
            raise PlanError(f"{cursor} reads {length} elements from packets of another length")
        return sources

    def _signal(self, cursor: Cursor, operation: Operation, window: int) -> bool:
        signal = Signal(window, operation.publish, frozenset(self.heard[cursor.rank, window]))
        for peer in operation.peers:
            box = self.mailbox[operation.channel, cursor.rank, peer]
            self._send(cursor, "ordered", peer, "signal", lambda box=box: box.append(signal))  # type: ignore[misc]
        return True

    def _wait(self, cursor: Cursor, operation: Operation, window: int) -> bool:
        for peer in operation.peers:
            box = self.mailbox[operation.channel, peer, cursor.rank]
            if peer not in cursor.taken and box:
                self._take(cursor, operation, peer, window, box.popleft())
        if len(cursor.taken) < len(operation.peers):
            return False
        cursor.taken.clear()
        return True

    def _take(self, cursor: Cursor, operation: Operation, peer: int, window: int, signal: Signal) -> None:
        if signal.window != window or signal.publish != operation.publish:
            raise PlanError(f"{cursor} took a signal of rank {peer} that was meant for another wait")
        self.heard[cursor.rank, window] |= signal.heard
        if signal.publish:
            self.learnt[cursor.rank, window].add(peer)
        cursor.taken.add(peer)

    def _switch_reduce(self, cursor: Cursor, operation: Operation, window: int) -> bool:
        refs = [self._everywhere(operation.src[0], cursor.rank, rank) for rank in range(self.plan.ranks)]
        sources = [self._view(cursor, operation, ref, window) for ref in refs]
        self._store(cursor, operation, window, fold(sources, self.reduction, self._divisor(operation)))
        return True

    def _switch_broadcast(self, cursor: Cursor, operation: Operation, window: int) -> bool:
        source = self._view(cursor, operation, operation.src[0], window).copy()
        for rank in range(self.plan.ranks):
            ref = self._everywhere(operation.dst[0], cursor.rank, rank)
            self._view(cursor, operation, ref, window, write=True)[:] = source
        return True

    @staticmethod
    def _everywhere(ref: Ref, own: int, rank: int) -> Ref:
        return Ref(ref.buffer, ref.index, ref.part, SELF if rank == own else rank)

    def _barrier(self, cursor: Cursor, operation: Operation, window: int) -> bool:
        if not cursor.arrived:
            cursor.arrived, cursor.barriers = True, cursor.barriers + 1
        blocks = [other for other in self.cursors if other.rank == cursor.rank]
        if any(other.barriers < cursor.barriers for other in blocks):
            return False
        cursor.arrived = False
        return True

    def _sync(self, cursor: Cursor, operation: Operation, window: int) -> bool:
        return True

    def _loop(self, cursor: Cursor, operation: Operation, window: int) -> bool:
        length = self._part(window, operation.size.part)[1]
        cursor.turn += 1
        if cursor.turn * self.plan.unit < length * self.dtype.itemsize:
            cursor.pc = operation.target
        else:
            cursor.turn, cursor.pc = 0, cursor.pc + 1
        return True
