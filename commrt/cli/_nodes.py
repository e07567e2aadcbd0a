"""The options that place a command's ranks on several nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from commrt.launcher import Node


@dataclass(frozen=True)
class NodeFlags:
    """Which node this is. Give the same command on each, save for --node-rank."""

    nodes: Annotated[
        int | None, typer.Option("--nodes", show_default="this host alone", help="Nodes, each with that many ranks.")
    ] = None
    node_rank: Annotated[int | None, typer.Option("--node-rank", help="Which of the nodes this is, from 0.")] = None
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", metavar="HOST:PORT", help="An address of node 0, where all meet.")
    ] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Meet without COMMRT_SECRET_FILE: whoever reaches the port can join.")
    ] = False

    def node(self) -> Node | None:
        """None for this host alone. Raises ConfigError for flags that contradict one another."""
        from commrt.launcher import Node

        return Node.from_flags(self.nodes, self.node_rank, self.rendezvous, self.insecure)
