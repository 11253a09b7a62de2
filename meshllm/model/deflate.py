"""Floats in fewer bytes without loss, for slow links; knows nothing about messages.

The last byte of a float in little endian is its sign and most of its exponent. The values of a
hidden state are of similar size, so that byte holds some 3 bits; what is before it is nearly noise.
The first bytes of all values come first, as they are, then the last byte of each as one raw deflate
stream (RFC 1951) of Huffman codes alone, for there is nothing to match. About two thirds are left
of bfloat16, 85 % of the other types.

What rows weigh tells something of how large their values are, not which: the codes follow from how
often each byte occurs, and nothing that one session sends is packed with what another does.
"""

import zlib

import numpy as np

from meshllm.errors import ModelError

_RAW = -zlib.MAX_WBITS
_MEMORY = 9  # of zlib; codes for as many bytes together as it can


def deflate(values: memoryview, itemsize: int) -> memoryview | None:
    """Pack the bytes of floats of ``itemsize`` bytes each; None where that makes them no fewer."""
    table = np.frombuffer(values, np.uint8).reshape(-1, itemsize)
    coder = zlib.compressobj(1, zlib.DEFLATED, _RAW, _MEMORY, zlib.Z_HUFFMAN_ONLY)
    last = coder.compress(table[:, -1].tobytes()) + coder.flush()
    if len(last) >= len(table):
        return None
    return memoryview(b"".join((table[:, :-1].tobytes(), last)))


def inflate(packed: bytes | bytearray | memoryview, count: int, itemsize: int) -> bytearray:
    """Return the bytes of ``count`` floats that `deflate` packed; nothing larger is ever made.

    Raises:
        ModelError: nobody packs floats so.
    """
    first = memoryview(packed)
    edge = count * (itemsize - 1)
    decoder = zlib.decompressobj(_RAW)
    try:
        last = decoder.decompress(first[edge:], count)
        # One byte more shows whether there is more, and lets the decoder see the end of the stream.
        rest = b"" if decoder.eof else decoder.decompress(decoder.unconsumed_tail, 1)
    except zlib.error as error:
        raise ModelError(f"{count} values that cannot be unpacked: {error}") from None
    if len(last) != count or rest or not decoder.eof or decoder.unused_data:
        raise ModelError(f"{count} values packed as nobody packs them")
    whole = bytearray(count * itemsize)
    table = np.frombuffer(whole, np.uint8).reshape(count, itemsize)
    table[:, :-1] = np.frombuffer(first[:edge], np.uint8).reshape(count, itemsize - 1)
    table[:, -1] = np.frombuffer(last, np.uint8)
    return whole
