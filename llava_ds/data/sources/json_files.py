"""Read JSON lists and JSONL, record by record, through a window of bounded size."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from llava_ds.constants import DataError
from llava_ds.files.places import open_data

WINDOW_BYTES = 1 << 20
MAX_RECORD_CHARS = 32 << 20

# Used only to find the end of a record. Numbers stay text, because Python limits their digits.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)
_SPACE = re.compile(r"[ \t\n\r]*")
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}"]', re.DOTALL)
_DATA_URI = b'"data:image'
_CUT_CHARS = 16  # a window may end inside an escape, a number or `false`: results this close to its end are uncertain


class _Window:
    """A moving window over a text file that tracks line and column.

    Bytes that are not UTF-8 become lone surrogates, so that one bad record does not hide the other records.
    """

    def __init__(self, file: BinaryIO, name: str, num_bytes: int) -> None:
        self.file, self.name, self.num_bytes = file, name, num_bytes
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.text = ""
        self.at = 0  # position in text: everything before it is done
        self.line, self.line_at = 1, 0  # line of text[line_at]
        self.column = 0  # characters of that line before text[0]
        self.more()

    def more(self) -> bool:
        """Drop the processed text and read at least as much as remains. Returns False at the end of the file."""
        left = len(self.text) - self.at
        if left > MAX_RECORD_CHARS:
            raise self.error(f"a record is longer than {MAX_RECORD_CHARS >> 20} million characters", self.at)
        data = self.file.read(max(self.num_bytes, left))
        added = self.decoder.decode(data, final=not data)
        self.line, self.column = self.place(self.at)
        self.column -= 1
        self.text, self.at, self.line_at = self.text[self.at :] + added, 0, 0
        return bool(data)

    def next_char(self) -> str:
        """Move to the next character that is not a space and return it; "" at the end of the file."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def current_line(self) -> int:
        """Line of the current position, counted incrementally from the previous call."""
        self.line += self.text.count("\n", self.line_at, self.at)
        self.line_at = self.at
        return self.line

    def place(self, at: int) -> tuple[int, int]:
        """Line and column, from 1, of a position in the text."""
        line = self.line + self.text.count("\n", self.line_at, at)
        newline = self.text.rfind("\n", 0, at)
        return line, at - newline if newline >= 0 else self.column + at + 1

    def error(self, what: str, at: int) -> DataError:
        line, column = self.place(at)
        return DataError(f"{self.name}, line {line}, column {column}: {what}: nothing after it can be read")


def read_json_list(path: str, window_bytes: int = WINDOW_BYTES) -> Iterator[tuple[int, str]]:
    """Yield line and text of every value in a JSON list.

    Raises DataError with line and column if the file is not a JSON list.
    """
    with open_data(path) as file:
        window = _Window(file, path, window_bytes)
        if window.next_char() != "[":
            raise window.error("can't be read as JSON: a list of records was expected", window.at)
        window.at += 1
        if window.next_char() == "]":
            window.at += 1
        else:
            while True:
                end = _end_of_value(window)
                yield window.current_line(), window.text[window.at : end]
                window.at = end
                found = window.next_char()
                if found not in (",", "]"):
                    what = f"found {found!r}" if found else "the file ends"
                    raise window.error(f"can't be read as JSON: {what} where , or ] was expected", window.at)
                window.at += 1
                if found == "]":
                    break
                window.next_char()
        if window.next_char():
            raise window.error("can't be read as JSON: the list is followed by something else", window.at)


def read_jsonl(path: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of every non-empty line."""
    with open_data(path) as file:
        number = 0
        while line := file.readline(MAX_RECORD_CHARS + 1):
            number += 1
            if len(line) > MAX_RECORD_CHARS:
                raise DataError(f"{path}, line {number}: is longer than {MAX_RECORD_CHARS >> 20} million bytes")
            text = line.decode("utf-8", "surrogateescape").strip()
            if number == 1:
                text = text.removeprefix("\ufeff")
            if text:
                yield number, text


def holds_data_uri(path: str) -> bool:
    """True if a JSON string in a file begins like an embedded image. Escaped quotes inside a text don't count."""
    with open_data(path) as file:
        tail = b""
        while chunk := file.read(WINDOW_BYTES):
            window = tail + chunk
            at = window.find(_DATA_URI, len(tail) == len(_DATA_URI))  # a match inside the tail was found before
            while at >= 0:
                if window[at - 1 : at] != b"\\":
                    return True
                at = window.find(_DATA_URI, at + 1)
            tail = window[-len(_DATA_URI) :]
    return False


def first_value(path: str) -> tuple[str, str]:
    """Return the first character that is not a space and, if it opens an object, the first one after the object.

    These two characters distinguish a list, JSONL, and a file with one object.
    """
    with open_data(path) as file:
        window = _Window(file, path, WINDOW_BYTES)
        first = window.next_char()
        if first != "{":
            return first, ""
        end = _end_of_value(window)
        window.at = end
        return first, window.next_char()


def _end_of_value(window: _Window) -> int:
    """Find the end of the value at the current position, reading more if necessary."""
    while True:
        text = window.text
        try:
            end = _DECODER.raw_decode(text, window.at)[1]
            if end + _CUT_CHARS < len(text) or text[end - 1] in '}]"':
                return end
            length = end - window.at
            if not window.more():
                return window.at + length
            continue  # the window may have cut a number
        except RecursionError:
            end = _end_of_nested(text, window.at)
            if end is not None:
                return end
            problem = window.error("can't be read as JSON: the file ends inside a record", window.at)
        except json.JSONDecodeError as error:
            problem = window.error(f"can't be read as JSON: {error.msg}", error.pos)
            if not error.msg.startswith("Unterminated string") and error.pos + _CUT_CHARS < len(text):
                raise problem from None
        if not window.more():
            raise problem


def _end_of_nested(text: str, start: int) -> int | None:
    """Find the end of a list or object too deeply nested to parse, by counting brackets."""
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text, start):
        token = match.group()
        if token == '"':
            return None  # the window cuts a string
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token, 0)
        if depth == 0:
            return match.end()
    return None
