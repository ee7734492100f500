"""The key that a trainer and its workers share, and what is derived from it. It appears in no text and no repr."""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import Final, Self

from weightsync.errors import ConfigurationError

#: Where a process finds its key if none is given.
VARIABLE: Final = "WEIGHTSYNC_KEY"
_LENGTH: Final = struct.Struct("!Q")


class SharedKey:
    """A secret that both ends hold. What is computed with it, nobody without it can compute.

    It is pickled with the scheme that was given it, in clear: workers that the trainer starts need it.

    Args:
        secret: at least one byte; 32 random ones are good, as ``secrets.token_hex(32)`` gives.

    Raises:
        ConfigurationError: it is empty, or neither bytes nor a str.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes | str) -> None:
        if not isinstance(secret, bytes | str):
            raise ConfigurationError(f"key= is a {type(secret).__name__}: give bytes or a str.")
        self._secret = secret.encode() if isinstance(secret, str) else secret
        if not self._secret:
            raise ConfigurationError(f"key= (or {VARIABLE}) is empty: give a secret, or leave it out.")

    @classmethod
    def given(cls, key: SharedKey | bytes | str | None) -> Self | SharedKey | None:
        """The key that was given, else the environment's; None if there is neither.

        Raises:
            ConfigurationError: it is empty, or of another type.
        """
        if isinstance(key, SharedKey):
            return key
        if key is None:
            key = os.environ.get(VARIABLE)
        return None if key is None else cls(key)

    def derived(self, purpose: str, *parts: str | bytes) -> bytes:
        """32 bytes for one purpose, which tell nothing of the key nor of those for another."""
        mac = hmac.new(self._secret, digestmod=hashlib.sha256)
        for part in (purpose, *parts):
            data = part.encode() if isinstance(part, str) else part
            # The lengths keep ("ab", "c") apart from ("a", "bc").
            mac.update(_LENGTH.pack(len(data)) + data)
        return mac.digest()

    def __repr__(self) -> str:
        return "SharedKey(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedKey) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.derived("hash"))

    def __reduce__(self) -> tuple[type[SharedKey], tuple[bytes]]:
        return SharedKey, (self._secret,)


#: What a key is given as.
Secret = SharedKey | bytes | str
