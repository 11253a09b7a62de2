"""Tickets: the text form round-trips, or a user error says what is wrong."""

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
    """Return any bytes as a ticket with a valid checksum."""
    checksum = blake3.blake3(b"meshllm" + version.encode() + body).digest()[:4]
    text = base64.b32encode(body + checksum).decode()
    return f"meshllm{version}{text.rstrip('=').lower()}"


def body(ticket: Ticket) -> bytes:
    digits = ticket.encode()[8:].upper()
    return base64.b32decode(digits + "=" * (-len(digits) % 8))[:-4]


@pytest.mark.property
@given(tickets)
def test_a_ticket_round_trips(ticket: Ticket) -> None:
    assert parse_ticket(ticket.encode()) == ticket


def test_the_text_form_of_a_ticket_is_stable() -> None:
    assert TICKET.encode() == WORD
    assert parse_ticket(WORD) == TICKET


def test_white_space_and_case_are_ignored() -> None:
    text = f"  {WORD[:40].upper()}\n  {WORD[40:]}\t\n"

    assert parse_ticket(text) == TICKET


@pytest.mark.parametrize(
    "quoted", ["'{}'", '"{}"\n', "`{}`", "<{}>", "\N{LEFT DOUBLE QUOTATION MARK}{}"]
)
def test_quotes_around_a_ticket_are_ignored(quoted: str) -> None:
    assert parse_ticket(quoted.format(WORD)) == TICKET


def test_the_longest_ticket_is_read() -> None:
    ticket = replace(TICKET, addresses=("x" * MAX_ADDRESS_BYTES,) * MAX_ADDRESSES)

    assert parse_ticket(ticket.encode()) == ticket


def test_one_wrong_character_is_detected() -> None:
    for place in range(8, len(WORD)):
        other = "a" if WORD[place] != "a" else "b"
        with pytest.raises(UserError, match="mistyped or cut short"):
            parse_ticket(WORD[:place] + other + WORD[place + 1 :])


def test_a_truncated_ticket_is_detected() -> None:
    for length in range(len(WORD)):
        with pytest.raises(UserError) as caught:
            parse_ticket(WORD[:length])
        assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Invalid ticket"),
        ("sesame", "Invalid ticket `sesame`"),
        ("meshllm1" + "a" * 9000, "Invalid ticket"),
        ("meshllm2abc", "version `2` is not supported; expected `1`"),
        ("meshllm", "version ``"),
        ("meshllm1é", "mistyped"),
        ("meshllm1aaaa", "mistyped"),
        (word(b""), "mistyped"),
        (word(body(TICKET)[:56]), "mistyped"),
        (word(body(TICKET) + b"\5abc"), "mistyped"),
        (word(body(TICKET) + b"\2\xff\xff"), "mistyped"),
        (word(body(TICKET)[:32] + b"\2" + body(TICKET)[33:]), "Role 2 of this ticket is unknown"),
        (word(body(TICKET)[:32] + b"\xff" + body(TICKET)[33:]), "Role 255 of this ticket"),
        (word(body(TICKET) + b"\0"), "Invalid ticket address ``"),
        (word(body(TICKET) + b"\3a\x1bb"), "Invalid ticket address"),
        (word(body(TICKET) + b"\1a" * MAX_ADDRESSES), "18 ticket addresses"),
    ],
)
def test_an_invalid_ticket_is_refused(text: str, words: str) -> None:
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
    with pytest.raises(UserError, match="Invalid ticket address"):
        replace(TICKET, addresses=(address,))


def test_the_number_of_addresses_is_limited() -> None:
    with pytest.raises(UserError, match="17 ticket addresses; at most 16"):
        replace(TICKET, addresses=("a",) * 17)


def test_a_proof_is_valid_for_one_secret_role_and_handshake() -> None:
    proof = TICKET.prove(b"handshake")

    assert proof.role is Role.CLIENT
    assert proof.proves(SECRET)
    assert not proof.proves(bytes(16))
    assert not replace(proof, role=Role.NODE).proves(SECRET)
    assert not replace(proof, context=b"another").proves(SECRET)


def test_the_secret_is_not_in_the_repr() -> None:
    assert repr(SECRET) not in f"{TICKET} {TICKET.prove(b'')}"
