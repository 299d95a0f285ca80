"""Messages to bytes and back: MessagePack with a version envelope and a size cap. Never pickle.

Wire form: ``[version, message, xxh3-64 of the message's bytes]``, where ``message`` is
``[tag, field, …]``. The version is read before the message is decoded, so a newer peer's unknown
tags give VersionMismatch, no parse error. The checksum is there because a message that was changed
on its way could still decode, and then make a wrong answer of a right one.
"""

from __future__ import annotations

import msgspec
import xxhash

from mesh.errors import MessageTooLarge, ProtocolError, VersionMismatch
from mesh.messages import PROTOCOL_VERSION, AnyMessage

MAX_MESSAGE_BYTES = 16 << 20
"""Over a million token ids at five bytes each, ten times the largest context served."""

_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_number_decoder = msgspec.msgpack.Decoder(int)
_message_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Encode one message.

    Raises:
        MessageTooLarge: the encoded form is over ``MAX_MESSAGE_BYTES``.
    """
    raw = _encoder.encode(message)
    checksum = xxhash.xxh3_64_intdigest(raw)
    data = _encoder.encode((PROTOCOL_VERSION, msgspec.Raw(raw), checksum))
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(f"{type(message).__name__} of {len(data)} bytes is over the cap")
    return data


def decode(data: bytes | memoryview) -> AnyMessage:
    """Decode and validate one message.

    Raises:
        MessageTooLarge: over ``MAX_MESSAGE_BYTES``.
        VersionMismatch: the peer speaks another version.
        ProtocolError: not a well-formed message of a known type.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(f"message of {len(data)} bytes is over the cap")
    try:
        parts = _envelope_decoder.decode(data)
        version = _number_decoder.decode(parts[0]) if parts else None
        if version != PROTOCOL_VERSION:
            raise VersionMismatch(f"peer speaks version {version}, this process {PROTOCOL_VERSION}")
        if len(parts) != 3:
            raise ProtocolError(f"an envelope of {len(parts)} parts")
        raw = bytes(parts[1])
        if _number_decoder.decode(parts[2]) != xxhash.xxh3_64_intdigest(raw):
            raise ProtocolError("the message was changed on its way")
        return _message_decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a valid message: {error}") from error
