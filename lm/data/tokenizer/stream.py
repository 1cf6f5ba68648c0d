"""Decodes token ids to text, one by one."""

import codecs

from lm.data.tokenizer.tokenizer import Tokenizer

_BEFORE = 32  # tokens at least that are decoded again with a new one, where its text depends on those before


class Stream:
    """Decodes token by token; the joined results of `push` and `flush` equal the result of `decode`. Of a tokenizer with byte tokens
    (SentencePiece) they differ where a run of these is no UTF-8: `decode` replaces all of it, and here its characters have been sent."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []  # the last ones
        self._sent = ""  # of their text
        self._cut = 0  # before this many of them no character is incomplete

    def push(self, token: int) -> str:
        """Returns the text that this token completes; the bytes of an incomplete character are held back."""
        data = self._tokenizer.token_text(token)
        if data is not None:
            return self._utf8.decode(data)
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith("\ufffd") else self._send(text)

    def flush(self) -> str:
        """Returns the text still held back, with incomplete characters as U+FFFD."""
        return self._utf8.decode(b"", final=True) or self._send(self._tokenizer.decode(self._ids))

    def _send(self, text: str) -> str:
        new = text[len(self._sent) :]
        self._sent += new
        if len(self._ids) - self._cut >= _BEFORE and (last := self._tokenizer.decode(self._ids[self._cut :])):
            self._ids, self._sent = self._ids[self._cut :], last
            self._cut = len(self._ids)
        return new
