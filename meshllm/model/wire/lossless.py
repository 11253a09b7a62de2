"""Floats in fewer bytes without loss, for slow links.

The last byte of a float in little endian is its sign and most of its exponent. The values of a
hidden state are of similar size, so that byte holds some 3 bits; what is before it is nearly noise.
The first bytes of all values come first, as they are, then the last byte of each as one raw deflate
stream (RFC 1951) of Huffman codes alone, for there is nothing to match. Of bfloat16 some 70 % are
left, of the other types 85 to 92 %.

How many bytes are left depends on the values, and encryption does not hide it: with the weights at
hand one could tell by it which of a few guesses was the prompt. Zeros are put behind the stream up
to a multiple of a sixteenth of the values, so that rows of one kind have one length, or two.
Nothing that one session sends is packed with what another does.
"""

import zlib

import numpy as np

from meshllm.errors import ModelError

_RAW = -zlib.MAX_WBITS
_MEMORY = 9  # of zlib; codes for as many bytes together as it can
_GRAINS = 16  # of the values, and of which the stream takes some


def deflate(values: memoryview, itemsize: int) -> memoryview | None:
    """Pack the bytes of floats of ``itemsize`` bytes each; None where that makes them no fewer."""
    table = np.frombuffer(values, np.uint8).reshape(-1, itemsize)
    coder = zlib.compressobj(1, zlib.DEFLATED, _RAW, _MEMORY, zlib.Z_HUFFMAN_ONLY)
    last = coder.compress(table[:, -1].tobytes()) + coder.flush()
    if (size := _filled(len(last), len(table))) >= len(table):
        return None
    return memoryview(b"".join((table[:, :-1].tobytes(), last.ljust(size, b"\0"))))


def inflate(packed: bytes | bytearray | memoryview, count: int, itemsize: int) -> bytearray:
    """Return the bytes of ``count`` floats that `deflate` packed; nothing larger is ever made.

    Raises:
        ModelError: nobody packs floats so.
    """
    first = memoryview(packed)
    edge = count * (itemsize - 1)
    decoder = zlib.decompressobj(_RAW)
    try:
        last = decoder.decompress(first[edge:], count + 1)  # one too many shows that there are more
    except zlib.error as error:
        raise ModelError(f"{count} values that cannot be unpacked: {error}") from None
    rest = decoder.unused_data
    size = _filled(len(packed) - edge - len(rest), count)
    if len(last) != count or not decoder.eof or any(rest) or len(packed) != edge + size:
        raise ModelError(f"{count} values packed as nobody packs them")
    whole = bytearray(count * itemsize)
    table = np.frombuffer(whole, np.uint8).reshape(count, itemsize)
    table[:, :-1] = np.frombuffer(first[:edge], np.uint8).reshape(count, itemsize - 1)
    table[:, -1] = np.frombuffer(last, np.uint8)
    return whole


def _filled(size: int, count: int) -> int:
    """Return the bytes that are left of the last byte of so many values, packed to ``size``."""
    grain = -(-count // _GRAINS)
    return -(-size // grain) * grain
