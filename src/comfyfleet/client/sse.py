"""Server-Sent Events read from bytes as they come, by the rules of the HTML standard. What they mean is others'."""

from __future__ import annotations

import codecs

import msgspec


class ServerEvent(msgspec.Struct, frozen=True):
    data: str
    event: str = "message"
    id: str = ""
    """The last one that was told, by this event or before it."""


class EventParser:
    """Feed it bytes in any portions; it answers the events that are whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._is_first = True
        self._after_return = False
        self._data: list[str] = []
        self._event = ""
        self.last_id = ""
        self.retry_s: float | None = None

    def feed(self, content: bytes) -> list[ServerEvent]:
        text = self._decoder.decode(content)
        if self._is_first and text:
            self._is_first = False
            text = text.removeprefix("\ufeff")
        if self._after_return and text:
            # The other half of a line's end that was cut in two.
            text = text.removeprefix("\n")
            self._after_return = False
        if text.endswith("\r"):
            self._after_return = True
        *lines, self._rest = (self._rest + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        found = []
        for line in lines:
            if (event := self._line(line)) is not None:
                found.append(event)
        return found

    def _line(self, line: str) -> ServerEvent | None:
        if not line:
            return self._whole()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "data":
                self._data.append(value)
            case "event":
                self._event = value
            case "id" if "\0" not in value:
                self.last_id = value
            case "retry" if value.isascii() and value.isdigit():
                self.retry_s = int(value) / 1000
            case _:
                # A comment, or a field of another day.
                pass
        return None

    def _whole(self) -> ServerEvent | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        if not data:
            return None
        return ServerEvent("\n".join(data), event or "message", self.last_id)
