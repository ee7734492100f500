"""The secret that a trainer and its workers share, and keys derived from it. It never appears in a message or repr."""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import Final, Self

from weightsync.errors import ConfigurationError

#: The environment variable a process reads its key from if none is given.
VARIABLE: Final = "WEIGHTSYNC_KEY"
_LENGTH: Final = struct.Struct("!Q")


class SharedKey:
    """A secret that both ends hold, used to authenticate their messages.

    It is pickled in clear text with its scheme, because the workers that the trainer starts need it.

    Args:
        secret: at least one byte. Use ``secrets.token_hex(32)`` to generate one.

    Raises ConfigurationError: it is empty, neither bytes nor str, or text that UTF-8 cannot encode.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes | str) -> None:
        if not isinstance(secret, bytes | str):
            raise ConfigurationError(f"key= is of type {type(secret).__name__}: pass bytes or str.")
        try:
            self._secret = secret.encode() if isinstance(secret, str) else secret
        except UnicodeEncodeError:  # also what os.environ makes of bytes that are no UTF-8
            raise ConfigurationError(
                f"key= (or {VARIABLE}) is text that UTF-8 cannot encode: set text, such as secrets.token_hex(32), or "
                "pass bytes as key=."
            ) from None
        if not self._secret:
            raise ConfigurationError(f"key= (or {VARIABLE}) is empty: set a secret, or leave it out.")

    @classmethod
    def given(cls, key: SharedKey | bytes | str | None) -> Self | SharedKey | None:
        """Return the given key, else the one in the environment, else None.

        Raises ConfigurationError: as for the constructor.
        """
        if isinstance(key, SharedKey):
            return key
        if key is None:
            key = os.environ.get(VARIABLE)
        return None if key is None else cls(key)

    def derived(self, purpose: str, *parts: str | bytes) -> bytes:
        """Derive 32 bytes for one purpose. They reveal nothing about the secret or about other derived keys."""
        mac = hmac.new(self._secret, digestmod=hashlib.sha256)
        for part in (purpose, *parts):
            data = part.encode() if isinstance(part, str) else part
            # The length prefixes distinguish ("ab", "c") from ("a", "bc").
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


#: The types a key may be given as.
Secret = SharedKey | bytes | str
