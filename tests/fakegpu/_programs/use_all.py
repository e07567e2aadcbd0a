"""Uses the cuda backend in every way once; the first error. One line of JSON."""

from __future__ import annotations

import ctypes
import json

import exchange

from commrt.backends.cuda import plugin


def use() -> None:
    rank = exchange.Rank(plugin)
    plugin.export(rank.memory)
    page = plugin.allocate(4096, "pinned")
    buffer = ctypes.create_string_buffer(8192)
    pinned = (ctypes.addressof(buffer) + 4095) // 4096 * 4096
    plugin.pin(pinned, 4096)
    stream = plugin.stream()
    stream.submit(lambda: None)
    kernel = plugin.build(exchange.SOURCE, "exchange")
    kernel.launch(1, rank.arguments(rank.memory.address, 1), stream)
    stream.synchronize()
    plugin.unpin(pinned)
    page.close()


def main() -> None:
    try:
        use()
        error = ""
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    print(json.dumps({"error": error}))


if __name__ == "__main__":
    main()
