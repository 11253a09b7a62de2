"""Tickets: one word that comes back whole, or a line that says what is wrong with it."""

import base64
from dataclasses import replace

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import UserError
from meshllm.protocol.trust.credential import Role
from meshllm.protocol.trust.identity import NodeKey
from meshllm.protocol.trust.ticket import MAX_ADDRESS_BYTES, MAX_ADDRESSES, Ticket, parse_ticket
from tests.property.strategies import nodes, u64

ADDRESSES = ("ws://10.0.0.7:7700", "wss://mesh.example/join")
SECRET = bytes(range(16, 32))
TICKET = Ticket(NodeKey(bytes(32)).node, ADDRESSES, Role.CLIENT, 1_900_000_000, SECRET)
WORD = (
    "meshllm1hnvcppgow2sc2yvdvdicu3ynonsteflxdxrehjr2ybekdc2z3iuqcafth5yqaaaaaaibceqtcqkrmfyyde"
    "nbwha5dypre53thixs6mjqfyyc4mbog45donzqgalxo43thixs63lfonuc4zlymfwxa3dff5vg62loqqmkh2q"
)

printable = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=60)
ids = st.binary(min_size=16, max_size=16)
tickets = st.builds(
    Ticket,
    nodes,
    st.lists(printable, max_size=MAX_ADDRESSES).map(tuple),
    st.sampled_from(Role),
    u64,
    ids,
)


def word(body: bytes, version: str = "1") -> str:
    """Write any bytes as a ticket with a good checksum."""
    checksum = blake3.blake3(b"meshllm" + version.encode() + body).digest()[:4]
    text = base64.b32encode(body + checksum).decode()
    return f"meshllm{version}{text.rstrip('=').lower()}"


def body(ticket: Ticket) -> bytes:
    digits = ticket.encode()[8:].upper()
    return base64.b32decode(digits + "=" * (-len(digits) % 8))[:-4]


@pytest.mark.property
@given(tickets)
def test_a_ticket_comes_back_from_its_word(ticket: Ticket) -> None:
    assert parse_ticket(ticket.encode()) == ticket


def test_a_ticket_is_written_as_it_always_was() -> None:
    assert TICKET.encode() == WORD
    assert parse_ticket(WORD) == TICKET


def test_what_copying_does_to_a_ticket_does_no_harm() -> None:
    text = f"  {WORD[:40].upper()}\n  {WORD[40:]}\t\n"

    assert parse_ticket(text) == TICKET


def test_the_longest_ticket_is_read() -> None:
    ticket = replace(TICKET, addresses=("x" * MAX_ADDRESS_BYTES,) * MAX_ADDRESSES)

    assert parse_ticket(ticket.encode()) == ticket


def test_one_wrong_character_is_noticed() -> None:
    for place in range(8, len(WORD)):
        other = "a" if WORD[place] != "a" else "b"
        with pytest.raises(UserError, match="mistyped or cut short"):
            parse_ticket(WORD[:place] + other + WORD[place + 1 :])


def test_a_ticket_cut_anywhere_is_noticed() -> None:
    for length in range(len(WORD)):
        with pytest.raises(UserError) as caught:
            parse_ticket(WORD[:length])
        assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no ticket"),
        ("sesame", "`sesame` is no ticket"),
        ("meshllm1" + "a" * 9000, "is no ticket"),
        ("meshllm2abc", "version `2`; this is version 1"),
        ("meshllm", "version ``"),
        ("meshllm1é", "mistyped"),
        ("meshllm1aaaa", "mistyped"),
        (word(b""), "mistyped"),
        (word(body(TICKET)[:56]), "mistyped"),
        (word(body(TICKET) + b"\5abc"), "mistyped"),
        (word(body(TICKET) + b"\2\xff\xff"), "mistyped"),
        (word(body(TICKET)[:32] + b"\7" + body(TICKET)[33:]), "mistyped"),
        (word(body(TICKET) + b"\0"), "`` is no address"),
        (word(body(TICKET) + b"\3a\x1bb"), "is no address"),
        (word(body(TICKET) + b"\1a" * MAX_ADDRESSES), "18 addresses"),
    ],
)
def test_what_is_no_ticket_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_ticket(text)


@pytest.mark.property
@given(
    st.text(max_size=200) | st.binary(max_size=200).map(word) | st.text().map("meshllm1".__add__)
)
def test_garbage_is_a_user_error_or_a_ticket(text: str) -> None:
    try:
        ticket = parse_ticket(text)
    except UserError:
        return
    assert parse_ticket(ticket.encode()) == ticket


@pytest.mark.parametrize("address", ["", "with space", "ws://é", "x" * 256, "tab\t"])
def test_a_ticket_holds_only_addresses(address: str) -> None:
    with pytest.raises(UserError, match="is no address for a ticket"):
        replace(TICKET, addresses=(address,))


def test_a_ticket_holds_only_so_many_addresses() -> None:
    with pytest.raises(UserError, match="17 addresses; a ticket holds 16"):
        replace(TICKET, addresses=("a",) * 17)


def test_a_proof_is_of_one_secret_one_role_and_one_handshake() -> None:
    proof = TICKET.prove(b"handshake")

    assert proof.role is Role.CLIENT
    assert proof.proves(SECRET)
    assert not proof.proves(bytes(16))
    assert not replace(proof, role=Role.NODE).proves(SECRET)
    assert not replace(proof, context=b"another").proves(SECRET)


def test_a_secret_does_not_show() -> None:
    assert repr(SECRET) not in f"{TICKET} {TICKET.prove(b'')}"
