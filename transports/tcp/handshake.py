"""What precedes all else on a connection: both ends prove that they know the communicator's token. All sizes are fixed.

    caller -> callee   MAGIC, size of the communicator, caller's rank, callee's rank, nonce
    callee -> caller   MAGIC, nonce, HMAC(token, "callee", opening, nonce)
    caller -> callee   HMAC(token, "caller", opening, nonce)

Both nonces are fresh for each connection, so what was recorded proves nothing later; the labels keep one end's proof
from being played back as the other's. The callee looks at the ranks only once they are proven. What follows is neither
encrypted nor signed: the token keeps strangers out, not those who can rewrite packets.
"""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass, field

MAGIC = b"commrt\x01\x01"
_RANKS = struct.Struct("!III")
_NONCE_NBYTES = 32
_PROOF_NBYTES = 32
OPENING_NBYTES = len(MAGIC) + _RANKS.size + _NONCE_NBYTES
ANSWER_NBYTES = len(MAGIC) + _NONCE_NBYTES + _PROOF_NBYTES
PROOF_NBYTES = _PROOF_NBYTES


class HandshakeError(Exception):
    """The other end does not know the token, or is not who was meant."""


@dataclass(frozen=True)
class Caller:
    """The end that connects, for one connection."""

    token: bytes
    size: int
    rank: int
    callee: int
    nonce: bytes = field(default_factory=lambda: os.urandom(_NONCE_NBYTES))

    @property
    def opening(self) -> bytes:
        """The first message."""
        return MAGIC + _RANKS.pack(self.size, self.rank, self.callee) + self.nonce

    def proof(self, answer: bytes) -> bytes:
        """The last message. Raises HandshakeError if the callee's answer proves nothing."""
        nonce, proof = answer[len(MAGIC) : -_PROOF_NBYTES], answer[-_PROOF_NBYTES:]
        if not hmac.compare_digest(proof, _prove(self.token, b"callee", self.opening, nonce)):
            raise HandshakeError("whoever listens there does not know the communicator's token")
        return _prove(self.token, b"caller", self.opening, nonce)


@dataclass(frozen=True)
class Callee:
    """The end that listens, for one connection. `opening`: the caller's first message."""

    token: bytes
    size: int
    rank: int
    opening: bytes
    nonce: bytes = field(default_factory=lambda: os.urandom(_NONCE_NBYTES))

    @property
    def answer(self) -> bytes:
        """The second message. Raises HandshakeError if the first is not of this protocol."""
        if not self.opening.startswith(MAGIC):
            raise HandshakeError("not a caller of this protocol")
        return MAGIC + self.nonce + _prove(self.token, b"callee", self.opening, self.nonce)

    def caller(self, proof: bytes) -> int:
        """The rank that calls. Raises HandshakeError if the caller's proof is none, or it meant somebody else."""
        if not hmac.compare_digest(proof, _prove(self.token, b"caller", self.opening, self.nonce)):
            raise HandshakeError("a caller that does not know the communicator's token")
        size, caller, callee = _RANKS.unpack_from(self.opening, len(MAGIC))
        if (size, callee) != (self.size, self.rank) or caller >= self.rank:
            raise HandshakeError(f"rank {caller} of {size} calls rank {callee} at rank {self.rank} of {self.size}")
        return int(caller)


def _prove(token: bytes, label: bytes, opening: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token, b"commrt tcp " + label + opening + nonce, "sha256")
