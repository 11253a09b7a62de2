"""Messages and tensors over a link for training, each within a time."""

import asyncio

from meshllm.errors import LinkLost, PeerFault
from meshllm.node.net.secure import SecureLink
from meshllm.protocol.training.codec import (
    TENSOR_CHUNK_BYTES,
    TensorBytes,
    TrainingMessage,
    decode,
    encode,
)

IDLE_S = 30.0  # s without a message, or without room for one, after which a link is given up


async def send(link: SecureLink, message: TrainingMessage) -> None:
    """Send a message; raise `LinkLost` if the other side does not read."""
    try:
        async with asyncio.timeout(IDLE_S):
            await link.send(encode(message))
    except TimeoutError:
        raise LinkLost(f"The peer read nothing for {IDLE_S:.0f} s") from None


async def send_tensors(link: SecureLink, data: bytes) -> None:
    """Send the bytes of tensors after the message that announces them."""
    whole = memoryview(data)
    for at in range(0, len(data), TENSOR_CHUNK_BYTES):
        await send(link, TensorBytes(whole[at : at + TENSOR_CHUNK_BYTES]))


async def receive(link: SecureLink, idle_s: float = IDLE_S) -> TrainingMessage:
    """Receive the next message of a known kind; raise `LinkLost` if none comes in time."""
    try:
        async with asyncio.timeout(idle_s):
            while True:
                _, data = await link.receive()
                if (message := decode(data)) is not None:
                    return message
    except TimeoutError:
        raise LinkLost(f"The peer sent nothing for {idle_s:.0f} s") from None


async def receive_tensors(link: SecureLink, size: int) -> bytes:
    """Receive the bytes of tensors that were announced."""
    received = bytearray()
    while len(received) < size:
        message = await receive(link)
        due = min(TENSOR_CHUNK_BYTES, size - len(received))
        if not isinstance(message, TensorBytes) or len(message.data) != due:
            raise PeerFault(f"{type(message).__name__} instead of the next {due} bytes of tensors")
        received += message.data
    return bytes(received)
