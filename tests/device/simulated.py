"""Ranks in simulated memory: what a plan's kernel is launched with, laid out as the host's compiler lays it out."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from commrt.lowering import with_syncs
from commrt.native import as_native
from commrt.plan import Plan, RankProgram, groups

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from ptxsim.machine import Machine  # noqa: E402
from ptxsim.memory import Memory  # noqa: E402
from ptxsim.translate import Program  # noqa: E402

FIELDS = {
    "Line": "value tag input output",
    "Control": "entered sequence completed state",
    "Peer": "out in scratch packets view posted expected input output",
    "Ref": "buffer rank index part",
    "Op": "code flags channel size_buffer ndst nsrc ref peer npeers size_index size_part target",
    "Program": "ops refs peers begin nblocks parts scratch_slots packet_slots unit most_part synchronising id",
    "Lane": "epoch synced lap flag rank ranks scratch packets scratch_half packets_half control peers arrived abort "
    "failure multicast",
    "Launch": "program lane input output count tag what root shift divisor published_input published_output windows "
    "input_bytes output_bytes window",
}
Lowering = Callable[[RankProgram], RankProgram]
CHANNELS, LINE, PACKET_BYTES = 8, 128, 16
ITEM, SHIFT = 4, 2  # float32
LINE_OF_PARTS = 64  # bytes: the least that a part has, so that few elements make many windows
GARBAGE = 0xA5


def part_bytes(plan: Plan) -> int:
    """Of a whole part; some slices where the plan has loops."""
    return 3 * plan.unit or LINE_OF_PARTS


class Layouts:
    """Offsets and sizes, as a host program prints them."""

    def __init__(self, compiler: str, folder: Path) -> None:
        source, program = folder / "layouts.cpp", folder / "layouts"
        source.write_text(_source())
        subprocess.run([compiler, "-std=c++17", f"-I{ROOT}/algorithms/device", source, "-o", program], check=True)
        lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split("\n")
        rows = [line.split() for line in lines if line]
        self.fields = {(struct, name): (int(offset), int(size)) for struct, name, offset, size in rows}

    def size(self, struct: str) -> int:
        """Bytes of the whole."""
        return self.fields[struct, "."][1]

    def offset(self, struct: str, field: str) -> int:
        """Of one field."""
        return self.fields[struct, field][0]

    def image(self, struct: str, **values: int) -> bytes:
        """The bytes of one struct; what is not named is zero."""
        image = bytearray(self.size(struct))
        for name, value in values.items():
            offset, size = self.fields[struct, name]
            image[offset : offset + size] = value.to_bytes(size, "little", signed=value < 0)
        return bytes(image)


def _source() -> str:
    def row(struct: str, name: str, offset: str, size: str) -> str:
        return f'  std::printf("{struct} {name} %zu %zu\\n", (std::size_t){offset}, (std::size_t){size});'

    lines = []
    for struct, names in FIELDS.items():
        lines.append(row(struct, ".", "0", f"sizeof(commrt::{struct})"))
        for name in names.split():
            size = f"sizeof(((commrt::{struct}*)0)->{name})"
            lines.append(row(struct, name, f"offsetof(commrt::{struct}, {name})", size))
    includes = '#include <cstddef>\n#include <cstdio>\n#include "launch.h"\n'
    return includes + "int main() {\n" + "\n".join(lines) + "\n}\n"


@dataclass(frozen=True)
class Setting:
    """What differs between schedules besides the order of events."""

    count: int
    lap: int
    epoch: int
    in_place: bool
    misaligned: int  # bytes of the output's address beyond a multiple of 16

    @classmethod
    def drawn(cls, plan: Plan, chance: random.Random) -> Setting:
        """Three windows, the last one short."""
        count = 2 * plan.parts * part_bytes(plan) // ITEM + chance.randrange(1, 7)
        in_place = plan.collective in ("all_reduce", "broadcast") and chance.random() < 0.5
        return cls(count, chance.choice([4, 6]), chance.randrange(8), in_place, chance.choice([0, 0, 4, 8]))


class Ranks:
    """The ranks of one plan: their memory, and their launches."""

    def __init__(
        self, layouts: Layouts, plan: Plan, setting: Setting, chance: random.Random, lowered: Lowering = with_syncs
    ) -> None:
        self.plan, self.setting, self.lowered = plan, setting, lowered
        self.memory = Memory(chance)
        self.machine = Machine(self.memory, chance)
        self._layouts, self._chance = layouts, chance
        self._part = part_bytes(plan)
        self._halves = {
            "scratch": max(1, plan.scratch_slots) * -(-self._part // LINE) * LINE,
            "packets": max(1, plan.packet_slots) * -(-(self._part // 8 + 1) * PACKET_BYTES // LINE) * LINE,
        }
        self._bases = [self._base() for _ in range(plan.ranks)]
        scratches = [base["scratch"] for base in self._bases]
        self._multicast = self.memory.alias(scratches, 2 * self._halves["scratch"]) if "switch" in plan.requires else 0
        self.lanes = [self._lane(rank) for rank in range(plan.ranks)]

    def _base(self) -> dict[str, int]:
        """What one rank owns, by name."""
        size, ranks = self._layouts.size, self.plan.ranks
        sizes = {
            "lines": ranks * 2 * CHANNELS * size("Line"), "control": size("Control"), "abort": 8,
            "scratch": 2 * self._halves["scratch"], "packets": 2 * self._halves["packets"],
        }  # fmt: skip
        base = {name: self.memory.allocate(nbytes) for name, nbytes in sizes.items()}
        self.memory.write(base["scratch"], self._chance.randbytes(sizes["scratch"]))
        self.memory.write(base["control"], self.setting.epoch.to_bytes(8, "little"))  # Control::entered
        return base

    def _lines(self, owner: int, writer: int) -> int:
        return self._bases[owner]["lines"] + writer * 2 * CHANNELS * self._layouts.size("Line")

    def _lane(self, rank: int) -> int:
        own, setting = self._bases[rank], self.setting
        peers = [
            self._layouts.image(
                "Peer", out=self._lines(peer, rank), scratch=self._bases[peer]["scratch"],
                packets=self._bases[peer]["packets"], view=self._bases[peer]["control"],
                **{"in": self._lines(rank, peer)},
            )
            for peer in range(self.plan.ranks)
        ]  # fmt: skip
        return self._place(
            self._layouts.image(
                "Lane", epoch=setting.epoch, synced=setting.epoch, lap=setting.lap, flag=setting.epoch % setting.lap,
                rank=rank, ranks=self.plan.ranks, scratch=own["scratch"], packets=own["packets"],
                scratch_half=self._halves["scratch"], packets_half=self._halves["packets"], control=own["control"],
                peers=self._place(b"".join(peers)), abort=own["abort"], multicast=self._multicast,
            )
        )  # fmt: skip

    def _place(self, data: bytes) -> int:
        address = self.memory.allocate(max(8, len(data)))
        self.memory.write(address, data)
        return address

    # ---- one operation ----

    def inputs(self) -> list[np.ndarray[Any, Any]]:
        """Small integers: exact, whatever the order they are summed in."""
        elements = groups(self.plan.collective, self.plan.ranks)[0] * self.setting.count
        return [np.array([self._chance.randrange(1000) for _ in range(elements)], "f4") for _ in range(self.plan.ranks)]

    def launch(self, program: Program, rank: int, data: np.ndarray[Any, Any], threads: int, tag: int = 77) -> int:
        """One rank's kernel; the address of its output."""
        setting, layouts, plan = self.setting, self._layouts, self.plan
        nbytes = groups(plan.collective, plan.ranks)[1] * setting.count * ITEM
        source = self.memory.allocate(data.nbytes + 16) + (setting.misaligned if setting.in_place else 0)
        self.memory.write(source, data.tobytes())
        output = source if setting.in_place else self._place(bytes([GARBAGE]) * (nbytes + 16)) + setting.misaligned
        launch = layouts.image(
            "Launch", program=self._program(rank), lane=self.lanes[rank], input=source, output=output,
            count=setting.count, tag=tag, what=3, shift=SHIFT, published_input=source, published_output=output,
            input_bytes=data.nbytes, output_bytes=nbytes, window=plan.parts * self._part // ITEM,
        )  # fmt: skip
        blocks = len(plan.program(rank).blocks)
        self.machine.launch(program, [self._place(launch)], blocks, threads)
        return output

    def _program(self, rank: int) -> int:
        native, keep = as_native(self.lowered(self.plan.program(rank)), self.plan, 1)
        ops = b"".join(self._copied("Op", native.ops[k]) for k in range(native.nops))
        refs = b"".join(self._copied("Ref", native.refs[k]) for k in range(native.nrefs))
        peers = np.array([native.peers[k] for k in range(native.npeers)], "u4").tobytes()
        begin = np.array([native.begin[k] for k in range(native.nblocks + 1)], "u4").tobytes()
        del keep
        return self._place(
            self._layouts.image(
                "Program", ops=self._place(ops), refs=self._place(refs), peers=self._place(peers),
                begin=self._place(begin), nblocks=native.nblocks, parts=native.parts,
                scratch_slots=native.scratch_slots, packet_slots=native.packet_slots, unit=native.unit,
                most_part=self._part, synchronising=native.synchronising, id=native.id,
            )
        )  # fmt: skip

    def _copied(self, struct: str, native: Any) -> bytes:
        return self._layouts.image(struct, **{name: getattr(native, name) for name in FIELDS[struct].split()})

    # ---- afterwards ----

    def array(self, address: int, count: int) -> np.ndarray[Any, Any]:
        """So many elements."""
        return np.frombuffer(self.memory.read(address, count * ITEM), "f4")

    def word(self, address: int) -> int:
        """A u64."""
        return int.from_bytes(self.memory.read(address, 8), "little")

    def lane_word(self, rank: int, field: str) -> int:
        """A word of a rank's lane."""
        return self.word(self.lanes[rank] + self._layouts.offset("Lane", field))

    def completed(self, rank: int) -> int:
        """The last operation that a rank says has ended well."""
        return self.word(self._bases[rank]["control"] + self._layouts.offset("Control", "completed"))

    def abort(self) -> None:
        """What a host does to end its kernels."""
        for base in self._bases:
            self.memory.write(base["abort"], (1).to_bytes(8, "little"))


def expected(plan: Plan, data: Sequence[np.ndarray[Any, Any]], count: int) -> Iterator[np.ndarray[Any, Any]]:
    """What every rank's output must be."""
    for rank in range(plan.ranks):
        own = slice(rank * count, (rank + 1) * count)
        if plan.collective == "all_reduce":
            yield np.sum(data, axis=0)
        elif plan.collective == "reduce_scatter":
            yield np.sum(data, axis=0)[own]
        elif plan.collective == "all_gather":
            yield np.concatenate(data)
        elif plan.collective == "all_to_all":
            yield np.concatenate([array[own] for array in data])
        else:
            yield data[0]  # broadcast from rank 0
