"""The handshake that precedes all else on a connection: fixed sizes, no parser, mutual proof of the job's secret.

    client -> server   MAGIC, client nonce
    server -> client   MAGIC, server nonce, HMAC(secret, "server", both nonces)
    client -> server   HMAC(secret, "client", both nonces, hello), hello

Both nonces are fresh for each connection, so a recorded handshake proves nothing later. The labels keep one side's
proof from being played back as the other's. `Hello` has the protocol version in its first two bytes in every version,
so that sides that differ can say so. What follows the handshake is neither encrypted nor signed: the secret keeps
strangers out, not those who can rewrite packets.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import NamedTuple

MAGIC = b"commrt\x00\x01"
NONCE_NBYTES = 32
PROOF_NBYTES = 32
CLIENT_OPENING_NBYTES = len(MAGIC) + NONCE_NBYTES
SERVER_ANSWER_NBYTES = len(MAGIC) + NONCE_NBYTES + PROOF_NBYTES
MIN_SECRET_NBYTES = 16

_HELLO = struct.Struct("!HIIQ")
CLIENT_PROOF_NBYTES = PROOF_NBYTES + _HELLO.size


class Hello(NamedTuple):
    """Who joins. `generation` counts the worlds that the process has joined at this address before."""

    version: int
    size: int
    rank: int
    generation: int

    def pack(self) -> bytes:
        return _HELLO.pack(*self)


def fresh_nonce() -> bytes:
    return os.urandom(NONCE_NBYTES)


def _prove(secret: bytes, label: bytes, *parts: bytes) -> bytes:
    # Hashed first, so that the empty secret of an unauthenticated loopback job is a valid key too.
    key = hashlib.sha256(b"commrt bootstrap\x00" + secret).digest()
    return hmac.digest(key, b"\x00".join((label, *parts)), "sha256")


def client_opening(nonce: bytes) -> bytes:
    return MAGIC + nonce


def server_answer(secret: bytes, opening: bytes, nonce: bytes) -> bytes | None:
    """The answer to a client's opening; None if that is no opening of this protocol."""
    if not opening.startswith(MAGIC):
        return None
    return MAGIC + nonce + _prove(secret, b"server", opening[len(MAGIC) :], nonce)


def client_proof(secret: bytes, client_nonce: bytes, answer: bytes, hello: Hello) -> bytes | None:
    """The client's last word; None if the server's `answer` does not prove the secret."""
    server_nonce, proof = answer[len(MAGIC) : -PROOF_NBYTES], answer[-PROOF_NBYTES:]
    if not hmac.compare_digest(proof, _prove(secret, b"server", client_nonce, server_nonce)):
        return None
    packed = hello.pack()
    return _prove(secret, b"client", client_nonce, server_nonce, packed) + packed


def check_client_proof(secret: bytes, opening: bytes, server_nonce: bytes, message: bytes) -> Hello | None:
    """The hello of a client that knows the secret; None for any other."""
    proof, packed = message[:PROOF_NBYTES], message[PROOF_NBYTES:]
    if not hmac.compare_digest(proof, _prove(secret, b"client", opening[len(MAGIC) :], server_nonce, packed)):
        return None
    return Hello._make(_HELLO.unpack(packed))
