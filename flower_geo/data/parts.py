"""Cut a stream of documents into the parts that training and held-out text are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["PART", "SEPARATOR", "Events", "cut", "separated"]

#: What a source yields: pieces of text, and None where a document ends.
Events = Iterator[str | None]

#: Characters a part aims at; a part is never longer than twice that.
PART = 8192

#: A line of a text file that holds only this ends a document.
SEPARATOR = "<|endoftext|>"


def separated(chunks: Iterable[str]) -> Events:
    """Turn the text of one file into events, reading separator lines as ends.

    The chunks may be cut anywhere, also inside a separator.
    """
    mark = f"\n{SEPARATOR}\n"
    # A file starts and ends a line, so that a separator may stand first or last.
    buffer = "\n"
    for chunk in chunks:
        buffer += chunk
        # The closing line end of one mark may open the next one.
        while (place := buffer.find(mark)) >= 0:
            yield buffer[:place]
            yield None
            buffer = buffer[place + len(mark) - 1 :]
        if len(buffer) > len(mark):
            yield buffer[: -len(mark)]
            buffer = buffer[-len(mark) :]
    if buffer.endswith(f"\n{SEPARATOR}"):
        buffer = buffer.removesuffix(SEPARATOR)
    yield buffer
    yield None


def cut(events: Iterable[str | None]) -> Iterator[tuple[int, str]]:
    """Yield (document number, text) parts; where cuts fall does not depend on the chunks.

    A document's parts joined give the document, without the empty lines at its
    start and the blanks at its end.  Blank parts are left out.
    """
    document, buffer = 0, ""
    for event in events:
        if event is not None:
            buffer = buffer + event if buffer else event.lstrip("\n")
            start = 0
            while len(buffer) - start >= 2 * PART:
                end = _boundary(buffer, start)
                part = buffer[start:end]
                if not part.isspace():
                    yield document, part
                start = end
            buffer = buffer[start:]
            continue
        buffer = buffer.rstrip()
        if buffer:
            yield document, buffer
        document, buffer = document + 1, ""


def _boundary(text: str, start: int) -> int:
    """The best place to cut near start + PART: a paragraph's end, a line's, a sentence's."""
    low, high = start + PART // 2, start + PART + PART // 2
    for mark, keep in (("\n\n", 2), ("\n", 1), (". ", 1), (" ", 0)):
        # A blank opens the word after it in byte-level BPE, so it goes with that word.
        place = text.rfind(mark, low, high)
        if place >= 0:
            return place + keep
    return start + PART
