"""The handshake's proofs: bound to the secret, to both nonces, to the side and to the hello."""

from __future__ import annotations

import hmac
from typing import NamedTuple

import pytest

from commrt.bootstrap import auth
from commrt.bootstrap.auth import Hello

SECRET, OTHER = b"s" * 16, b"o" * 16
HELLO = Hello(1, 4, 2, 0)


class Exchanged(NamedTuple):
    opening: bytes
    server_nonce: bytes
    proof: bytes


def handshake(client_secret: bytes, server_secret: bytes) -> Exchanged | None:
    client_nonce, server_nonce = auth.fresh_nonce(), auth.fresh_nonce()
    opening = auth.client_opening(client_nonce)
    answer = auth.server_answer(server_secret, opening, server_nonce)
    assert answer is not None
    proof = auth.client_proof(client_secret, client_nonce, answer, HELLO)
    return None if proof is None else Exchanged(opening, server_nonce, proof)


@pytest.mark.parametrize("secret", [SECRET, b""], ids=["secret", "no secret"])
def test_equal_secrets_meet(secret: bytes) -> None:
    done = handshake(secret, secret)
    assert done is not None
    assert auth.check_client_proof(secret, done.opening, done.server_nonce, done.proof) == HELLO


@pytest.mark.parametrize(("mine", "theirs"), [(SECRET, OTHER), (SECRET, b""), (b"", SECRET)])
def test_the_client_finds_a_server_with_another_secret_out(mine: bytes, theirs: bytes) -> None:
    assert handshake(mine, theirs) is None


def test_the_server_refuses_a_proof_by_another_secret() -> None:
    done = handshake(OTHER, OTHER)
    assert done is not None
    assert auth.check_client_proof(SECRET, done.opening, done.server_nonce, done.proof) is None


def test_a_replayed_proof_is_refused() -> None:
    done = handshake(SECRET, SECRET)
    assert done is not None
    assert auth.check_client_proof(SECRET, done.opening, auth.fresh_nonce(), done.proof) is None


def test_the_servers_own_proof_played_back_is_refused() -> None:
    nonce = auth.fresh_nonce()
    opening = auth.client_opening(auth.fresh_nonce())
    answer = auth.server_answer(SECRET, opening, nonce)
    assert answer is not None
    played_back = answer[-auth.PROOF_NBYTES :] + HELLO.pack()
    assert auth.check_client_proof(SECRET, opening, nonce, played_back) is None


def test_a_changed_hello_is_refused() -> None:
    done = handshake(SECRET, SECRET)
    assert done is not None
    changed = done.proof[: auth.PROOF_NBYTES] + HELLO._replace(rank=3).pack()
    assert auth.check_client_proof(SECRET, done.opening, done.server_nonce, changed) is None


def test_another_protocol_is_not_answered() -> None:
    assert auth.server_answer(SECRET, b"GET / HT" + b"x" * 32, auth.fresh_nonce()) is None


def test_proofs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    genuine = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(1)
        return genuine(a, b)

    monkeypatch.setattr(auth.hmac, "compare_digest", counting)
    done = handshake(SECRET, SECRET)
    assert done is not None
    auth.check_client_proof(OTHER, done.opening, done.server_nonce, done.proof)
    assert len(compared) == 2
