"""`lm classify from=FOLDER text=TEXT`: which kind a text, or a pair of texts, is of, by a model that objective=classify has trained."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lm.cli.verb import Verb
from lm.errors import ConfigError
from lm.generation.config import Dtype
from lm.printing import answer, due, note, status
from lm.schema import MaybeEmpty, Tree
from lm.storage.model_folder import folder_hash, resolve_model
from lm.units import counted, table

if TYPE_CHECKING:
    from lm.generation.classify import Given

_SHOWN, _COLUMNS, _LIKELIEST = 60, 8, 3  # letters of a text, labels as columns, and else so many of each text
_SPEAKERS = ("user", "assistant")


class Classify(Verb):
    """usage: lm classify from=FOLDER [text=TEXT ...] [texts=FILE out=FILE] [key=value ...]

    Tells how likely each label of a classifier is for a text: a model that was
    trained by objective=classify. text=TEXT text_pair=TEXT is for one that was
    trained on pairs. texts=FILE out=FILE does so for each line of a file,
    {"text": ...}, or of pairs with field=premise field_pair=hypothesis, say;
    killed, the same command goes on.

    A reward model tells its number of chats, as its chat template writes them:
    chat=true text=QUESTION text_pair=ANSWER, or lines such as
    {"messages": [...]} or {"prompt": ..., "completion": ...}; of preferences
    field=chosen or field=rejected says which answer.
    """

    from_: str
    """Run, model or checkpoint folder."""
    text: MaybeEmpty | list[MaybeEmpty] | None = None
    """What to classify; may be given several times."""
    text_pair: MaybeEmpty | list[MaybeEmpty] | None = None
    """Of pairs the second text of each `text`. null: there is none."""
    texts: str | None = None
    """File of JSON lines, each with a text. The lines go to `out` with `predicted` added: the likeliest label, and all probabilities."""
    chat: bool = False
    """`text` is a user's message and `text_pair` the answer, under the tokenizer's chat template. Lines of a file tell by themselves."""
    field: str | None = None
    """With texts: the field of the text, or of a chat's messages; a dot leads into an object: meta.text. null: text, or where a line has
    none what training reads as a chat."""
    field_pair: str | None = None
    """With texts: of pairs the field of the second text. null: there is none."""
    out: str | None = None
    """With texts: the file to write, which is there when it is complete."""
    overwrite: bool = False
    """With out: replace a file, and what a start that asked otherwise has left of it."""
    merge: bool = True
    """An adapter becomes part of the weights; otherwise it computes beside them."""
    device: str = "auto"
    """auto (CUDA where there is a GPU), cpu, cuda, cuda:N or mps (the GPU of a Mac)."""
    dtype: Dtype | None = None
    """As lm generate holds the matrices: saved, fp32, bf16, fp16, int8 or int4. null: as they were saved."""
    format: Literal["text", "json"] = "text"
    """json: a list of each text with all probabilities."""

    def run(self, rest: list[str]) -> None:
        """Prints a table on stdout, notes on stderr."""
        self.refuse(rest)
        if (self.text is None) == (self.texts is None) or (self.text is None and self.text_pair is not None):
            raise ConfigError("text: give text=TEXT, or texts=FILE and out=FILE.")
        if (self.texts is None) != (self.out is None) or (self.texts is not None and self.format != "text"):
            raise ConfigError("texts, out, format: a file of texts needs out=FILE, and has a format of its own. Write texts=FILE out=FILE.")
        if self.texts is None and (self.field is not None or self.field_pair is not None):
            raise ConfigError("field, field_pair: they are of texts=FILE, which is not set. Set it, or leave them out.")
        if self.texts is not None and self.chat:
            raise ConfigError("chat: lines of a file tell by their fields whether they are chats. Leave it out.")
        folder = resolve_model(self.from_)
        if self.texts is not None and self.out is not None:
            self._classify_file(folder, Path(os.path.expanduser(self.texts)), Path(os.path.expanduser(self.out)))
            return
        given = self._given()
        from lm.generation.classify import classify, predicted
        from lm.generation.load import load

        chats = [[{"role": role, "content": text} for role, text in zip(_SPEAKERS, each, strict=False)] for each in given]
        model, tokenizer = load(folder, self.device, self.merge, self.dtype)
        found = classify(model, tokenizer, chats if self.chat else given)
        if self.format == "json":
            told = [
                dict(zip(("text", "text_pair"), texts, strict=False)) | predicted(each, model.cfg.head)
                for texts, each in zip(given, found, strict=True)
            ]
            answer(json.dumps(told, ensure_ascii=False))
            return
        answer(table(_rows(given, found), indent=""))

    def _given(self) -> list[tuple[str, ...]]:
        first, second = ([each] if isinstance(each, str) else each or [] for each in (self.text, self.text_pair))
        if self.text_pair is None:
            return [(text,) for text in first]
        if len(first) != len(second):
            raise ConfigError(f"text_pair: {len(second)} were given for {len(first)} of text. Give each text its second one.")
        return list(zip(first, second, strict=True))

    def _classify_file(self, folder: Path, texts: Path, out: Path) -> None:
        from lm.generation.answering import require_new
        from lm.generation.classify import classify_file
        from lm.generation.load import load

        require_new(out, self.overwrite)
        fields = [self.field, *([self.field_pair] if self.field_pair is not None else [])]
        lines, given = _read(texts, fields)
        asked = {"from": folder_hash(folder), **self.model_dump(include={"dtype", "merge"}), "fields": fields}
        model, tokenizer = load(folder, self.device, self.merge, self.dtype)
        began = time.monotonic()

        def told(done: int) -> None:
            if due(time.monotonic() - began):
                status(f"{done:,} of {counted(len(lines), 'text')} classified")

        try:
            n = classify_file(model, tokenizer, lines, given, out, asked, told, self.overwrite)
        except KeyboardInterrupt:
            note(f"{self.out}: what is classified is kept, and the same command goes on behind it.")
            raise
        note(f"{self.out}: {counted(len(lines), 'text')} classified, {n:,} now.")


def _rows(given: list[tuple[str, ...]], found: list[dict[str, float]]) -> list[list[str]]:
    """Returns a table with a column for each label; of many labels the likeliest of each text."""
    texts = [" | ".join(text[: _SHOWN // len(each)] for text in each) for each in given]
    if len(found[0]) <= _COLUMNS:
        head = [*found[0], "text"]
        return [head, *([*(f"{chance:.4f}" for chance in each.values()), text] for text, each in zip(texts, found, strict=True))]
    best = [sorted(each.items(), key=lambda one: -one[1])[:_LIKELIEST] for each in found]
    told = [", ".join(f"{name} {chance:.4f}" for name, chance in each) for each in best]
    return [["likeliest", "text"], *([likeliest, text] for likeliest, text in zip(told, texts, strict=True))]


def _read(path: Path, fields: list[str | None]) -> "tuple[list[Tree], list[Given]]":
    """Returns the lines of a file of texts, and the texts, pairs or chats. Raises ConfigError for one that is none."""
    from lm.generation.answering import read_lines
    from lm.generation.classify import PREDICTED

    lines, found = [], []
    for line, where in read_lines(path, "texts"):
        found.append(_asked(line, fields, where))
        if PREDICTED in line:
            raise ConfigError(f"{where}: it has the field {PREDICTED} already, which is written here. Rename it.")
        lines.append(line)
    if not lines:
        raise ConfigError(f'{path}: it holds no text. Write a line such as {{"text": "a text"}} for each.')
    return lines, found


def _asked(line: object, fields: list[str | None], where: str) -> "Given":
    """Returns the text, pair or chat of a line; without `text`, and without fields that are asked for, of a usual form of a chat."""
    from lm.data.records.fields import BadRecord, value_of
    from lm.data.records.forms import CHATS
    from lm.generation.answering import chat_of

    names, texts = [field or "text" for field in fields], list[object]()
    if isinstance(line, dict):
        with suppress(BadRecord):
            texts = [value_of(line, name, "field", where) for name in names]
        forms = [form.fields for form in CHATS] + [("chosen", "rejected")]
        of_form = not texts and fields == [None] and any(line.keys() >= {*form} for form in forms)
        if of_form or (len(texts) == 1 and (isinstance(texts[0], list) or (fields[0] in forms[-1] and line.keys() >= {*forms[-1]}))):
            return chat_of(line, fields[0], where)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{where}: it is no object with a text in {' and '.join(names)}. Fix the line, or set field.")
    return tuple(map(str, texts))
