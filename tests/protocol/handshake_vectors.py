"""An independent reference implementation of the handshake, from primitives, for test vectors.

``python -m tests.protocol.handshake_vectors`` writes `handshake_vectors.json`, for implementations
in other languages.
"""

import hmac
import json
from hashlib import sha256, sha512
from pathlib import Path
from typing import Any

import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PATH = Path(__file__).with_name("handshake_vectors.json")
SEEDS = {"listener": bytes([1]) * 32, "dialer": bytes([2]) * 32}
EPHEMERALS = {"listener": bytes(range(32)), "dialer": bytes(range(32, 64))}
NONCES = {"listener": bytes(range(16)), "dialer": bytes(range(16, 32))}
INSTANCES = {"listener": 7, "dialer": 3}
SALT = bytes(range(100, 116))
SECRET = bytes(range(200, 216))
PSK_LABEL = b"meshllm ticket psk 1"
PURPOSE = 1
VERSION = 3
MINOR, FEATURES = 0, 7
CAPABLE = bytes([MINOR]) + FEATURES.to_bytes(8, "little")
EXPIRES_S = 1_900_000_000
REFUSAL = "The ticket has expired"
REKEY_MESSAGES = 65536


def hkdf(secret: bytes, salt: bytes, label: str) -> bytes:
    """Derive 32 bytes (RFC 5869, one block)."""
    extracted = hmac.digest(salt or bytes(32), secret, "sha256")
    return hmac.digest(extracted, label.encode() + b"\1", "sha256")


def public(side: str) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(SEEDS[side]).public_key().public_bytes_raw()


def mesh() -> bytes:
    return blake3.blake3(public("listener") + SALT).digest()[:16]


def granted() -> bytes:
    """Return the dialer's credential in the role of a node, signed by the founder, the listener."""
    fields = public("dialer") + b"\0" + EXPIRES_S.to_bytes(8, "little") + public("listener")
    words = b"meshllm certificate 1" + mesh() + fields + bytes(64)
    return mesh() + SALT + fields + sign("listener", words)


def sign(side: str, words: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(SEEDS[side]).sign(words)


class Talk:
    """The transcript hash and shared secret of a handshake under a pre-shared key."""

    def __init__(self, psk: bytes) -> None:
        keys = {side: X25519PrivateKey.from_private_bytes(EPHEMERALS[side]) for side in EPHEMERALS}
        self.points = {side: key.public_key().public_bytes_raw() for side, key in keys.items()}
        other = X25519PublicKey.from_public_bytes(self.points["listener"])
        self.secret = keys["dialer"].exchange(other) + psk
        self.digest = sha256(b"meshllm handshake 1" + psk).digest()

    def say(self, message: bytes) -> bytes:
        self.digest = sha256(self.digest + message).digest()
        return message

    def hello(self, side: str) -> bytes:
        return bytes([VERSION]) + self.points[side] + NONCES[side]

    def key(self, label: str) -> bytes:
        return hkdf(self.secret, self.digest, f"meshllm {label} 1")

    def seal(self, side: str, words: bytes) -> bytes:
        return self.say(AESGCM(self.key(side)).encrypt(bytes(12), words, None))

    def identify(self, side: str, words: bytes) -> bytes:
        signed = b"meshllm " + side.encode() + b" identity 1" + self.digest + public(side) + words
        return self.seal(side, public(side) + sign(side, signed) + words)


def agreement_key(side: str) -> bytes:
    """Return the X25519 form of an Ed25519 key, from its private half."""
    private = sha512(SEEDS[side]).digest()[:32]
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def introduction(psk: bytes, said: Talk) -> bytes:
    """Return who dials, sealed to the listener."""
    start = sha256(b"meshllm handshake 1" + psk).digest()
    digest = sha256(start + said.hello("dialer") + public("listener")).digest()
    ephemeral = X25519PrivateKey.from_private_bytes(EPHEMERALS["dialer"])
    other = X25519PublicKey.from_public_bytes(agreement_key("listener"))
    key = hkdf(ephemeral.exchange(other) + psk, digest, "meshllm introducing dialer 1")
    words = len(granted()).to_bytes(2, "little") + granted()
    label = b"meshllm introducing dialer identity 1"
    signature = sign("dialer", label + digest + public("dialer") + words)
    return AESGCM(key).encrypt(bytes(12), public("dialer") + signature + words, None)


def talk(proof: str, *, refused: bool = False) -> dict[str, Any]:
    """Return the messages of one handshake; the dialer sends a credential or a ticket proof."""
    psk = mesh() if proof == "credential" else hmac.digest(SECRET, PSK_LABEL, "sha256")
    said = Talk(psk)
    shown = said.hello("dialer") + (introduction(psk, said) if proof == "credential" else b"")
    mac = hmac.digest(psk, b"meshllm dialer hail 1" + shown, "sha256")
    first = said.say(shown + mac)
    second = said.say(said.hello("listener")) + said.identify("listener", CAPABLE)

    claim = bytes([PURPOSE]) + INSTANCES["dialer"].to_bytes(8, "little") + CAPABLE
    if proof == "ticket":
        context = said.digest + public("dialer")
        claim += b"\0" + hmac.digest(SECRET, b"meshllm ticket 1\0" + context, "sha256")
    third = said.identify("dialer", claim)

    own = mesh() + SALT
    new = granted() if proof == "ticket" else b""
    welcome = b"\1" + INSTANCES["listener"].to_bytes(8, "little")
    welcome += len(own).to_bytes(2, "little") + len(new).to_bytes(2, "little") + own + new
    fourth = said.seal("listener", b"\0" + REFUSAL.encode() if refused else welcome)
    messages = [message.hex() for message in (first, second, third, fourth)]
    return {"proof": proof, "refused": refused, "messages": messages, "links": links(said)}


def links(said: Talk) -> dict[str, Any]:
    """Return the keys of the link, and how each seals its first and its 65537th message."""
    labels = [f"{side} channel {channel}" for side in EPHEMERALS for channel in range(2)]
    return {label: link(said.key(label)) for label in labels}


def link(key: bytes) -> dict[str, str]:
    """Seal the text `hidden state` with the key, and with the next key."""
    later = hkdf(key, b"", "meshllm rekey 1")
    return {
        "key": key.hex(),
        "sealed 0": sealed(key, 0).hex(),
        f"sealed {REKEY_MESSAGES}": sealed(later, REKEY_MESSAGES).hex(),
    }


def sealed(key: bytes, number: int) -> bytes:
    head = number.to_bytes(8, "little") + bytes(2)
    return head + AESGCM(key).encrypt(number.to_bytes(12, "little"), b"hidden state", head)


def make() -> dict[str, Any]:
    """Return all vectors with what they are made of."""
    sides = {
        side: {
            "seed": SEEDS[side].hex(),
            "node": public(side).hex(),
            "ephemeral": EPHEMERALS[side].hex(),
            "nonce": NONCES[side].hex(),
            "instance": INSTANCES[side],
        }
        for side in SEEDS
    }
    talks = [talk("credential"), talk("ticket"), talk("ticket", refused=True)]
    return {
        **sides,
        "mesh": mesh().hex(),
        "salt": SALT.hex(),
        "secret": SECRET.hex(),
        "purpose": PURPOSE,
        "version": VERSION,
        "minor": MINOR,
        "features": FEATURES,
        "expires_s": EXPIRES_S,
        "refusal": REFUSAL,
        "credential": granted().hex(),
        "talks": talks,
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(make(), indent=2) + "\n")
