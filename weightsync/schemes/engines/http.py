"""Calls of an engine's HTTP routes, which `HttpCalls.abort` ends at once."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import re
import socket
import threading
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from weightsync.errors import ConfigurationError, EngineError, TransportError, with_type

#: Seconds to wait for a connection, whatever the deadline of a send. `HttpCalls.abort` cannot end this wait.
CONNECT_SECONDS: Final = 5.0
#: How many characters of an engine's error are quoted.
_QUOTED: Final = 2000
#: A call has succeeded if its status is at least _SUCCESS and below _REDIRECTED.
_SUCCESS: Final = 200
_REDIRECTED: Final = 300
#: How much of an answer is read.
_MAX_ANSWER_NBYTES: Final = 2**22
#: The names and values of headers that can be sent.
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[^\r\n\u0100-\U0010ffff]*")

logger = logging.getLogger("weightsync")


class UnreachedError(TransportError):
    """No connection was made: the call did not reach the engine."""


class NotDoneError(EngineError):
    """The engine answered ``"success": false`` without an error: it has not done what it was asked to do."""


class HttpCalls:
    """Calls the routes of one server, one call at a time, each over a connection of its own.

    A call has no timeout: the deadline of the send that waits for it ends the wait, and `abort` ends the call.

    Args:
        url: of the server, such as ``"http://localhost:8000"``.
        headers: sent with each call, such as an ``Authorization``.

    Raises:
        ConfigurationError: the URL is not one of http or https, or a header cannot be sent.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._url_parts = _parse_url(url)
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **_require_sendable({} if headers is None else headers)}
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._aborted = False
        #: Seconds to wait for an answer; None: forever.
        self._patience: float | None = None
        #: The call that has not been answered yet, for messages; empty: none.
        self.awaited = ""

    def post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Call a route, and return its answer, decoded if it is JSON.

        Raises:
            EngineError: the engine answered with an error.
            UnreachedError: no connection could be made.
            TransportError: the connection broke; or the calls were aborted.
        """
        connection = self._connection()
        self.awaited = f"POST {self.url}/{route}"
        try:
            self._connect(connection, route)
            path = f"{self._url_parts.path.rstrip('/')}/{route.lstrip('/')}"
            connection.request("POST", path, json.dumps(body or {}).encode(), self._headers)
            with connection.getresponse() as response:
                status, text = response.status, _read(response).decode(errors="replace")
        except UnreachedError:
            raise
        except (OSError, http.client.HTTPException) as error:
            why = "the link was closed" if self._aborted else f"{type(error).__name__}: {error}"
            raise TransportError(f"POST {self.url}/{route} got no answer: {why}.") from error
        finally:
            self._set_socket(None)
            connection.close()
            self.awaited = ""
        if not _SUCCESS <= status < _REDIRECTED:
            raise EngineError(f"POST {self.url}/{route} was answered {status}: {text[:_QUOTED]}", status)
        answer = _decode_answer(text)
        if isinstance(answer, Mapping) and (answer.get("success") is False or answer.get("error")):
            kind = EngineError if answer.get("error") else NotDoneError
            raise kind(f"POST {self.url}/{route} was answered {text[:_QUOTED]}", status)
        return answer

    def command(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Call a route that is answered with JSON, or with nothing, and return its answer.

        Raises:
            EngineError: as for `post`; or the answer is neither, so it did not come from the engine.
            TransportError: as for `post`.
        """
        answer = self.post(route, body)
        if isinstance(answer, str) and answer.strip():
            raise EngineError(
                f"POST {self.url}/{route} was answered with text that is not JSON, so not by the engine: "
                f"{answer[:_QUOTED]!r}. Is the URL that of the engine's own server?"
            )
        return answer

    def command_if_aborted(self, route: str) -> bool:
        """If the calls were aborted, make one more, for up to `CONNECT_SECONDS`. Returns whether it succeeded."""
        if not self._aborted:
            return False
        calls = HttpCalls(self.url, self._headers)
        calls._patience = CONNECT_SECONDS
        try:
            calls.command(route)
        except (EngineError, TransportError) as error:
            logger.debug("after the link was closed: %s", error)
            return False
        return True

    def _connect(self, connection: http.client.HTTPConnection, route: str) -> None:
        try:
            connection.connect()
        except OSError as error:
            raise UnreachedError(f"POST {self.url}/{route} found no connection: {with_type(error)}.") from error
        self._set_socket(connection.sock)

    def open(self) -> None:
        """Allow calls again after `abort`."""
        with self._lock:
            self._aborted = False

    def abort(self) -> None:
        """End the call in progress with a TransportError, and all calls after it until `open`."""
        with self._lock:
            self._aborted = True
            held = self._socket
            if held is not None:
                with contextlib.suppress(OSError):  # it has ended already
                    held.shutdown(socket.SHUT_RDWR)

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url_parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._url_parts.hostname or "", self._url_parts.port, timeout=CONNECT_SECONDS)

    def _set_socket(self, sock: socket.socket | None) -> None:
        with self._lock:
            self._socket = sock
            if sock is not None and self._aborted:
                raise ConnectionAbortedError("the link was closed")
        if sock is not None:
            sock.settimeout(self._patience)


def _parse_url(url: str) -> SplitResult:
    if not isinstance(url, str):
        raise ConfigurationError(f"{url!r} is not the URL of an engine: give one such as 'http://localhost:8000'.")
    parts = urlsplit(url)
    if "@" in parts.netloc:  # it would not be sent, and messages name the URL
        raise ConfigurationError(
            "the URL of an engine has a user or a password, which is sent nowhere: pass headers={'Authorization': ...}."
        )
    if parts.query or parts.fragment:  # likewise
        raise ConfigurationError(
            "the URL of an engine has a query or a fragment, which is sent nowhere: pass what it says as headers=."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or not _has_usable_port(parts):
        raise ConfigurationError(f"{url!r} is not the URL of an engine: give one such as 'http://localhost:8000'.")
    return parts


def _has_usable_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:  # it is no number, or too large
        return False


def _require_sendable(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Headers that http.client accepts: its error for any other would quote the value, which may be secret."""
    if not isinstance(headers, Mapping):
        raise ConfigurationError(
            f"headers= is of type {type(headers).__name__}: give a dict of names and values, both str."
        )
    for name, value in headers.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigurationError(f"headers= has {name!r}, which is not the name of an HTTP header.")
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise ConfigurationError(
                f"headers= has {name!r}, whose value cannot be sent: give text of Latin-1 characters without a line "
                "break (a token that was read from a file may end in one)."
            )
    return headers


def _read(response: http.client.HTTPResponse) -> bytes:
    """The body, up to `_MAX_ANSWER_NBYTES`. Raises IncompleteRead: the connection ended before the body."""
    body = response.read(_MAX_ANSWER_NBYTES)
    if response.length and len(body) < _MAX_ANSWER_NBYTES:
        raise http.client.IncompleteRead(body, response.length)
    return body


def _decode_answer(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
