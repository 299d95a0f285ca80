"""KV blocks between processes: bytes in, bytes out; knows no model.

Receiver-driven: the decode worker grants blocks (``TransferReceiver``), the prefill worker writes
straight into them (``TransferSender``) over a ``Transport``. See ``docs/transfer-protocol.md``.
"""
