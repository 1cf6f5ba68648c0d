"""`lm fill from=FOLDER text=TEXT`: the masks of a text are filled in, by an encoder."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lm.cli.verb import OfTexts
from lm.generation.config import FillConfig
from lm.printing import answer, note

if TYPE_CHECKING:
    from lm.data.tokenizer.tokenizer import Tokenizer
    from lm.generation.fill import Filled, Filling


class Fill(OfTexts, FillConfig):
    """usage: lm fill from=FOLDER [text=TEXT ...] [texts=FILE out=FILE] [key=value ...]

    Fills in the masks of a text, "The<|mask|> sat.", by an encoder that was
    trained by objective=mlm, or diffusion: with the latter max_tokens=64 puts
    masks behind the text, and so continues it; at_once=4 is four times as fast.

    texts=FILE out=FILE fills in each line of a file, {"text": ...}; killed, the
    same command goes on.
    """

    done = "filled in"
    other_names = OfTexts.other_names | FillConfig.other_names

    texts: str | None = None
    """File of JSON lines, each with a text, .txt of plain ones, or .csv or .tsv. To `out` go JSON lines with `filled`
    added: the text, and the tokens of its masks."""
    format: Literal["text", "json"] = "text"
    """json: a list of each text, filled in, with the tokens of its masks and log p of each."""

    def show(self, folder: Path, texts: list[str]) -> None:
        filling = self._filling(folder, texts)
        found = filling.all()
        if self.format == "json":
            answer(json.dumps([{"text": text, **filling.added(one)} for text, one in zip(texts, found, strict=True)], ensure_ascii=False))
            return
        for one in found:
            answer(one.text)
            self._note_likeliest(one, filling.tokenizer)

    def _note_likeliest(self, found: "Filled", tokenizer: "Tokenizer") -> None:
        for each in found.tokens if self.likeliest else []:
            told = [(each.token, each.logprob), *each.top]
            names = [tokenizer.special_names.get(token) or tokenizer.decode([token]) for token, _ in told]
            note("  ".join(f"{logprob:.4f} {name!r}" for name, (_, logprob) in zip(names, told, strict=True)))

    def write_file(self, folder: Path, files: tuple[Path, Path]) -> None:
        from lm.generation.fill import FILLED

        lines, texts = self.read_lines(files, self.text_of, FILLED)
        how = self.model_dump(mode="json", include={*FillConfig.model_fields})
        self.write_lines(files[1], lines, [self.field, json.dumps(how)], self._filling(folder, texts))

    def _filling(self, folder: Path, texts: list[str]) -> "Filling":
        from lm.generation.fill import Filling

        return Filling(*self.load(folder), texts, self)
