"""`lm classify from=FOLDER text=TEXT`: which kind a text, or a pair of texts, is of, by a model that objective=classify has trained."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lm.cli.verb import OfTexts
from lm.errors import ConfigError
from lm.printing import answer
from lm.schema import MaybeEmpty
from lm.units import table

if TYPE_CHECKING:
    from lm.generation.classify import Given

_SHOWN, _COLUMNS, _LIKELIEST = 60, 8, 3  # letters of a text, labels as columns, and else so many of each text
_SPEAKERS = ("user", "assistant")


class Classify(OfTexts):
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

    done = "classified"

    text_pair: MaybeEmpty | list[MaybeEmpty] | None = None
    """Of pairs the second text of each `text`. null: there is none."""
    texts: str | None = None
    """File of JSON lines, each with a text, .txt of plain ones, or .csv or .tsv. To `out` go JSON lines with `predicted` added: the
    likeliest label, and all probabilities."""
    chat: bool = False
    """`text` is a user's message and `text_pair` the answer, under the tokenizer's chat template. Lines of a file tell by themselves."""
    field: str | None = None
    """With texts: the field of the text, or of a chat's messages; a dot leads into an object: meta.text. null: text, or where a line has
    none what training reads as a chat."""
    field_pair: str | None = None
    """With texts: of pairs the field of the second text. null: there is none."""
    format: Literal["text", "json"] = "text"
    """json: a list of each text with all probabilities."""

    def files(self) -> tuple[Path, Path] | None:
        """As that of `OfTexts`; refuses what goes with only one of the two as well."""
        if self.text is None and self.text_pair is not None:
            raise ConfigError("text: give text=TEXT, or texts=FILE and out=FILE.")
        files = super().files()
        if files is None and self.field_pair is not None:
            raise ConfigError("field_pair: it is of texts=FILE, which is not set. Set it, or leave it out.")
        if files is not None and self.chat:
            raise ConfigError("chat: lines of a file tell by their fields whether they are chats. Leave it out.")
        return files

    def show(self, folder: Path, texts: list[str]) -> None:
        given = self._given(texts)
        from lm.generation.classify import classify, predicted

        chats = [[{"role": role, "content": text} for role, text in zip(_SPEAKERS, each, strict=False)] for each in given]
        model, tokenizer = self.load(folder)
        found = classify(model, tokenizer, chats if self.chat else given)
        if self.format == "json":
            told = [
                dict(zip(("text", "text_pair"), each, strict=False)) | predicted(chances, model.cfg.head)
                for each, chances in zip(given, found, strict=True)
            ]
            answer(json.dumps(told, ensure_ascii=False))
            return
        answer(table(_rows(given, found), indent=""))

    def _given(self, texts: list[str]) -> list[tuple[str, ...]]:
        if self.text_pair is None:
            return [(text,) for text in texts]
        second = [self.text_pair] if isinstance(self.text_pair, str) else self.text_pair
        if len(texts) != len(second):
            raise ConfigError(f"text_pair: {len(second)} were given for {len(texts)} of text. Give each text its second one.")
        return list(zip(texts, second, strict=True))

    def write_file(self, folder: Path, files: tuple[Path, Path]) -> None:
        from lm.generation.classify import PREDICTED, Telling

        fields = [self.field, *([self.field_pair] if self.field_pair is not None else [])]
        lines, given = self.read_lines(files, lambda line, where: _asked(line, fields, where), PREDICTED)
        self.write_lines(files[1], lines, fields, Telling(*self.load(folder), given))


def _rows(given: list[tuple[str, ...]], found: list[dict[str, float]]) -> list[list[str]]:
    """Returns a table with a column for each label; of many labels the likeliest of each text."""
    texts = [" | ".join(text[: _SHOWN // len(each)] for text in each) for each in given]
    if len(found[0]) <= _COLUMNS:
        head = [*found[0], "text"]
        return [head, *([*(f"{chance:.4f}" for chance in each.values()), text] for text, each in zip(texts, found, strict=True))]
    best = [sorted(each.items(), key=lambda one: -one[1])[:_LIKELIEST] for each in found]
    told = [", ".join(f"{name} {chance:.4f}" for name, chance in each) for each in best]
    return [["likeliest", "text"], *([likeliest, text] for likeliest, text in zip(told, texts, strict=True))]


def _asked(line: object, fields: list[str | None], where: str) -> "Given":
    """Returns the text, pair or chat of a line; without `text`, and without fields that are asked for, of a usual form of a chat."""
    from lm.data.records.forms import CHATS
    from lm.generation.answering import chat_of
    from lm.generation.whole import require_texts, values_of

    names = [field or "text" for field in fields]
    texts = values_of(line, names, where)
    if isinstance(line, dict):
        forms = [form.fields for form in CHATS] + [("chosen", "rejected")]
        of_form = not texts and fields == [None] and any(line.keys() >= {*form} for form in forms)
        if of_form or (len(texts) == 1 and (isinstance(texts[0], list) or (fields[0] in forms[-1] and line.keys() >= {*forms[-1]}))):
            return chat_of(line, fields[0], where)
    return require_texts(texts, names, where, line)
