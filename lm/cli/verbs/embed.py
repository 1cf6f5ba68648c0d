"""`lm embed from=FOLDER text=TEXT`: texts as vectors, by a model that objective=contrastive has trained, or any other."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from lm.cli.verb import OfTexts
from lm.errors import ConfigError
from lm.printing import answer, note
from lm.spelling import did_you_mean
from lm.storage.model_folder import read_config
from lm.units import counted, table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lm.generation.embed import Embedding

_SHOWN = 60  # letters of a text
_MATRIX = ".npy"


class Embed(OfTexts):
    """usage: lm embed from=FOLDER [text=TEXT ...] [texts=FILE out=FILE] [key=value ...]

    Gives a vector of length 1 for each text, so that the product of two is
    their cosine, which is the higher the more the texts are alike to a model
    that objective=contrastive has trained. Of one text the vector is printed,
    of several the cosine of each two.

    texts=FILE out=FILE reads a text from each line of a file, {"text": ...}:
    out=a.jsonl has each line with its `embedding`, and killed, the same command
    goes on; out=a.npy is a matrix of NumPy, float32, with a row for each line.
    """

    done = "embedded"

    texts: str | None = None
    """File of JSON lines, each with a text, .txt of plain ones, or .csv or .tsv. To `out` go JSON lines with `embedding` added; to one
    that ends in .npy the vectors alone."""
    prompt: str | None = None
    """Name of a text that is written before each one, as the model has learned it: query, document, or another. null: none."""
    dims: int | None = Field(None, gt=0)
    """The first so many numbers of each vector, made to length 1; of use where objective.first_dims has trained them. null: all."""

    def show(self, folder: Path, texts: list[str]) -> None:
        import numpy as np

        from lm.generation.embed import EMBEDDING, shortest

        embedding = self._embedding(folder, self._before(folder), texts)
        self.note_cut(embedding)
        found = np.stack(embedding.all())
        vectors = [shortest(vector) for vector in found]
        if self.format == "json":
            answer(json.dumps([{"text": text, EMBEDDING: vector} for text, vector in zip(texts, vectors, strict=True)], ensure_ascii=False))
        else:
            answer(table(_cosines(texts, found), indent="") if len(texts) > 1 else json.dumps(vectors[0]))

    def write_file(self, folder: Path, files: tuple[Path, Path]) -> None:
        from lm.generation.embed import EMBEDDING

        matrix = files[1].suffix == _MATRIX
        lines, texts = self.read_lines(files, self.text_of, None if matrix else EMBEDDING)
        before = self._before(folder)
        embedding = self._embedding(folder, before, texts)
        if not matrix:
            self.write_lines(files[1], lines, [self.field, before, str(self.dims)], embedding)
            return
        self.note_cut(embedding)
        embedding.matrix(files[1], self.telling(len(lines)), self.overwrite)
        note(f"{self.out}: {counted(len(lines), 'text')} {self.done}.")

    def _embedding(self, folder: Path, before: str, texts: list[str]) -> "Embedding":
        """Returns the work on these texts, each with `before` in front of it."""
        from lm.generation.embed import Embedding, read_texts

        model, tokenizer = self.load(folder)
        return Embedding(model, read_texts(model, tokenizer, [before + text for text in texts]), dims=self.dims)

    def _before(self, folder: Path) -> str:
        """Returns what is written before each text. Raises ConfigError for a prompt that the model does not know."""
        known: dict[str, str] = read_config(folder).get("prompts") or {}
        if self.prompt is None:
            if known:
                note(f"prompt: none is written before the texts, and the model knows {', '.join(known)}: prompt={next(iter(known))}")
            return ""
        if self.prompt not in known:
            which = did_you_mean(self.prompt, known) if known else "It knows none: write what goes before into the texts."
            raise ConfigError(f"prompt: {self.prompt[:80]!r} is no prompt that the model knows. {which}")
        return known[self.prompt]


def _cosines(texts: list[str], vectors: "NDArray[np.float32]") -> list[list[str]]:
    """Returns a table with a row and a column for each text; columns have the numbers of their texts."""
    numbers = [str(number) for number in range(1, len(texts) + 1)]
    rows = zip(numbers, (vectors @ vectors.T).tolist(), texts, strict=True)
    return [["", *numbers, "text"], *([number, *(f"{cosine:.4f}" for cosine in row), text[:_SHOWN]] for number, row, text in rows)]
