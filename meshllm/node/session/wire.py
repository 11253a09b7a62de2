"""Conversions between tensors and blobs, and between errors and fault codes.

`meshllm.model` and `meshllm.protocol` do not import each other: they meet here.
"""

import logging

from torch import Tensor

from meshllm.errors import (
    Busy,
    IntegrityFault,
    LinkLost,
    MeshError,
    ModelError,
    PeerFault,
    TimedOut,
)
from meshllm.model.device import is_out_of_memory
from meshllm.model.wire.payload import RowFormat, from_payload, is_finite, to_payload
from meshllm.protocol.session.blob import SessionKey, check, seal
from meshllm.protocol.session.messages import Blob, DType, FaultCode

logger = logging.getLogger(__name__)

_ERRORS: dict[FaultCode, type[MeshError]] = {
    FaultCode.OTHER: MeshError,
    FaultCode.BUSY: Busy,
    FaultCode.INTEGRITY: IntegrityFault,
    FaultCode.MODEL: ModelError,
    FaultCode.EPOCH: PeerFault,
    FaultCode.RULES: PeerFault,
    FaultCode.LOST: LinkLost,
    FaultCode.TIMED_OUT: TimedOut,
}


def sealed(key: SessionKey, hidden: Tensor, *, int8: bool = False, packed: bool = False) -> Blob:
    """Seal a hidden state ``[1, T, D]`` for the next rank: exact, int8, or losslessly packed.

    Raises:
        ModelError: it cannot be encoded, or a value is not finite.
    """
    hidden = hidden.detach().cpu()
    if not int8 and not is_finite(hidden):  # the next rank would blame this one; int8 checks it
        raise ModelError(
            "A value of the hidden state is infinite or NaN",
            hint="load the model with another `--dtype`",
        )
    code, shape, payload = to_payload(hidden, int8=int8, packed=packed)
    return seal(key, DType(code), shape, payload)


def opened(key: SessionKey, blob: Blob) -> Tensor:
    """Verify a blob and view it as a tensor; raise `IntegrityFault` or `PeerFault` if invalid."""
    check(key, blob)
    try:
        return from_payload(blob.dtype, blob.shape, blob.payload)
    except ModelError as error:
        raise PeerFault(str(error)) from None


def opened_rows(key: SessionKey, blob: Blob | None, rows: int, form: RowFormat) -> Tensor:
    """Verify the hidden state ``[1, rows, D]`` that the previous rank sent.

    Raises:
        PeerFault: it is missing, malformed or not finite, which no rank sends by mistake.
    """
    shape = (1, rows, form.width)
    if blob is None or blob.shape != shape:
        found = "no hidden state" if blob is None else f"a hidden state of shape {list(blob.shape)}"
        raise PeerFault(f"The previous rank sent {found} for {list(shape)}")
    hidden = opened(key, blob)
    if hidden.dtype != form.dtype:
        raise PeerFault(f"The previous rank sent a hidden state of {hidden.dtype}")
    if not is_finite(hidden):
        raise PeerFault("The previous rank sent a hidden state with infinite values or NaN")
    return hidden


def fault_code(error: Exception) -> FaultCode:
    """Return the fault code of an error in a job; log it if it is unexpected."""
    if is_out_of_memory(error):
        return FaultCode.BUSY
    if not isinstance(error, (MeshError, RuntimeError)):
        logger.error("a job failed", exc_info=error)
    match error:
        case IntegrityFault():
            return FaultCode.INTEGRITY
        case PeerFault():
            return FaultCode.RULES
        case _:
            return FaultCode.MODEL


def error_of(code: FaultCode, text: str, rank: int) -> MeshError:
    """Return the error that ends a generation for a fault that a rank reported."""
    return _ERRORS[code](f"rank {rank}: {text}")
