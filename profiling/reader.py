"""Streams the events of a trace file, plain or gzip, in constant memory.

A Chrome trace is one JSON object with a `traceEvents` list of up to millions of events (or just
that list). `json.load` would need ten times the file's size; here each event is decoded on its own
out of a sliding window of text. Numbers with a fraction arrive as `Decimal`, so that nanoseconds
are exact.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

Progress = Callable[[float], None]

_Decode = Callable[[str, int], tuple[Any, int]]
_decode: _Decode = json.JSONDecoder(parse_float=Decimal, strict=False).raw_decode
_decode_metadata: _Decode = json.JSONDecoder(strict=False).raw_decode
_CHUNK = 1 << 22
_MARGIN = 1 << 18
_LONGEST_EVENT = 1 << 24
_SPACE = " \t\r\n"
_SEPARATOR = re.compile(r"[ \t\r\n]*,[ \t\r\n]*")


class TraceError(ValueError):
    """A trace that cannot be read: the message names the file, the event and the field."""


class TraceReader:
    """Iterates over `(number, event)`; `metadata` is complete after the last one.

    Args:
        path: a trace, plain or gzip (recognised by its first bytes).
        progress: called now and then with the share of the file that has been read, 0 to 1.

    Raises:
        TraceError: the file is missing, truncated or not JSON.
    """

    def __init__(self, path: str | Path, progress: Progress | None = None) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self._progress = progress or (lambda share: None)
        self._buffer = ""
        self._at = 0
        self._event: int | None = None

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            with open(self.path, "rb") as self._raw:
                self._bytes = max(os.fstat(self._raw.fileno()).st_size, 1)
                self._text = _as_text(self._raw)
                yield from self._document()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._error(f"damaged gzip data ({error})") from None
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be read ({error.strerror or error})") from None
        self._progress(1.0)

    def _document(self) -> Iterator[tuple[int, dict[str, Any]]]:
        opening = self._peek()
        if opening == "[":
            yield from self._events()
            return
        self._expect("{", "an object or a list of events")
        while self._peek() != "}":
            key = self._value()
            if not isinstance(key, str):
                raise self._error(f"expected a key, got {key!r}")
            self._expect(":", f"a colon after {key!r}")
            if key == "traceEvents":
                yield from self._events()
            else:
                self.metadata[key] = self._value(_decode_metadata)
            if self._peek() == ",":
                self._at += 1
            elif self._peek() != "}":
                raise self._error(f"expected a comma or a closing brace after {key!r}")

    def _events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        self._expect("[", "traceEvents to be a list")
        self._event = 0
        is_open = self._peek() != "]"
        while is_open:
            yield from self._events_in_window()
            event = self._value()
            if not isinstance(event, dict):
                raise self._error(f"expected an object, got {event!r:.40}")
            yield self._event, event
            is_open = self._is_comma_next()
            self._event += 1
        self._at += 1
        self._event = None

    def _events_in_window(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The fast path: events that certainly end inside the window, and a comma behind each."""
        buffer, at, number = self._buffer, self._at, self._event or 0
        decode, separator = _decode, _SEPARATOR.match
        last = len(buffer) - _MARGIN
        while at < last:
            try:
                event, end = decode(buffer, at)
            except (json.JSONDecodeError, RecursionError):
                break
            comma = separator(buffer, end)
            if comma is None or type(event) is not dict:
                break
            yield number, event
            at = comma.end()
            number += 1
        self._at, self._event = at, number

    def _is_comma_next(self) -> bool:
        """Moves behind a comma, or onto the bracket that closes the list."""
        found = _SEPARATOR.match(self._buffer, self._at)
        if found and found.end() < len(self._buffer):
            self._at = found.end()
            return True
        if self._peek() == ",":
            self._at += 1
            return True
        if self._peek() != "]":
            raise self._error("expected a comma or the end of the list after it")
        return False

    def _value(self, decode: _Decode = _decode) -> Any:
        """Decodes one value; reads on while the error could be that the window ends too early."""
        if len(self._buffer) - self._at < _MARGIN:
            self._fill()
        if self._at >= len(self._buffer) or self._buffer[self._at] in _SPACE:
            self._peek()
        while True:
            try:
                value, self._at = decode(self._buffer, self._at)
                # A number at the very end of the window may go on behind it.
                if self._at < len(self._buffer) or not self._fill():
                    return value
            except RecursionError:
                raise self._error("nested too deeply") from None
            except json.JSONDecodeError as error:
                if len(self._buffer) - self._at > _LONGEST_EVENT or not self._fill():
                    raise self._error(self._reason(error)) from None

    def _peek(self) -> str:
        """The next character that is not space; the position moves to it."""
        while True:
            while self._at < len(self._buffer):
                if self._buffer[self._at] not in _SPACE:
                    return self._buffer[self._at]
                self._at += 1
            if not self._fill():
                raise self._error("the file ends too early (truncated)")

    def _expect(self, character: str, what: str) -> None:
        if self._peek() != character:
            raise self._error(f"expected {what}, got {self._buffer[self._at : self._at + 20]!r}")
        self._at += 1

    def _fill(self) -> bool:
        """Drops what was read, appends the next chunk; False at the end of the file."""
        chunk = self._text.read(_CHUNK)
        if chunk:
            self._buffer = self._buffer[self._at :] + chunk
            self._at = 0
            self._progress(self._raw.tell() / self._bytes)
        return bool(chunk)

    def _reason(self, error: json.JSONDecodeError) -> str:
        is_cut = error.pos >= len(self._buffer.rstrip()) or error.msg.startswith("Unterminated")
        if is_cut:
            return "the file ends too early (truncated)"
        return f"{error.msg} at character {error.pos - self._at} of it"

    def _error(self, message: str) -> TraceError:
        place = "metadata" if self._event is None else f"event {self._event}"
        return TraceError(f"{self.path}: {place}: {message}")


def _as_text(raw: IO[bytes]) -> IO[str]:
    is_gzip = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    stream = gzip.GzipFile(fileobj=raw) if is_gzip else raw
    return io.TextIOWrapper(stream, encoding="utf-8", errors="replace")
