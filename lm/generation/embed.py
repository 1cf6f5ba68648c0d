"""`lm.embed`: texts as vectors, which are the more alike the more the texts are."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.data.rows.reading import Read, Reading, batch_of
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError, NumericsError, expect
from lm.generation.decode import decoding
from lm.generation.lines import require_new
from lm.generation.load import expect_loaded
from lm.generation.whole import Whole, numbered, of_text
from lm.losses.embeddings import first_of, row_vectors
from lm.nn.transformer import LM
from lm.ops.defaults import device_unset
from lm.schema import Tree
from lm.storage.atomic import disk_errors, replace_file

EMBEDDING = "embedding"  # the field that is added to each line
Vector = NDArray[np.float32]  # (d,)


@device_unset()
def embed(model: LM, tokenizer: Tokenizer, texts: Sequence[str], dims: int | None = None) -> Tensor:
    """(n, d) float32 on the CPU: a vector of length 1 of each text, so that a product of two is their cosine.

    dims: only the first so many numbers of each vector, made to length 1; of use where objective.first_dims has trained them.

    It is what the model's head would read at the first token of an encoder and the last one of a decoder, or the mean over all tokens with
    model.head.pooling=mean, as objective=contrastive trains it. The end of a text that is longer than the model's context is left out.
    Raises ConfigError for an encoder-decoder.
    """
    expect_loaded(model, tokenizer)
    expect("dims", dims, (int, type(None)), "Give a whole number, or leave it out")
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"texts: {texts!r:.80} is no list of texts. Give one, such as ['a text'].")
    embedding = Embedding(model, read_texts(model, tokenizer, texts), dims=dims)
    vectors = embedding.all()
    return torch.from_numpy(np.stack(vectors)) if vectors else torch.zeros(0, embedding.d)


def read_texts(model: LM, tokenizer: Tokenizer, texts: Sequence[str]) -> list[Read]:
    """Returns texts as the model reads them. Raises ConfigError for one that is not Unicode."""
    reading, found = Reading(model.cfg, tokenizer, model.max_seq_len), []
    for number, text in enumerate(texts, 1):
        with of_text(numbered(number, len(texts))):
            found.append(reading.text(text))
    return found


def require_embeds(model: LM) -> None:
    """Raises ConfigError for a model of whose states none is the vector of a text."""
    if model.cfg.kind == "encoder_decoder":
        raise ConfigError("embed: the model is an encoder-decoder, and its vectors are of no whole text. Use a decoder or an encoder.")


class Embedding(Whole[Vector]):
    """Texts that become vectors, each (d,) and of length 1. Raises ConfigError as `require_embeds`.

    dims: the first so many numbers of a vector are it; None: all, the model's width.
    """

    def __init__(self, model: LM, read: Sequence[Read], most: int | None = None, dims: int | None = None) -> None:
        require_embeds(model)
        self._model, whole = model, model.cfg.d_model
        self.d = whole if dims is None else dims
        if not 0 < self.d <= whole:
            raise ConfigError(f"dims: {dims} is given, and a vector of the model has {whole} numbers. Give at least 1, at most {whole}.")
        super().__init__(read, most)

    def found(self, texts: list[Read]) -> list[Vector]:
        batch = batch_of([[text] for text in texts], max(len(text.ids) for text in texts), pad=0).to(self._model.embed.weight.device)
        with decoding(self._model):
            vectors: Tensor = self._model(batch, read=row_vectors(batch, self._model.cfg))
        found: Vector = first_of(vectors, self.d).float().cpu().numpy()
        if not np.isfinite(found).all():
            raise NumericsError("model: its states hold NaN or infinity, and no vector can be read off them. Use another checkpoint.")
        return [*found]

    def added(self, found: Vector) -> Tree:
        return {EMBEDDING: shortest(found)}

    def matrix(self, out: Path, told: Callable[[int], None], anew: bool = False) -> None:
        """Writes a file of NumPy with a row for each text, (n, d), once all are there.  told, anew: as in `into`."""
        require_new(out, anew)
        vectors, so_far = np.empty((self.n, self.d), np.float32), 0
        for each in self.batches():
            for i, found in each:
                vectors[i] = found
            so_far += len(each)
            told(so_far)
        np.save(made := BytesIO(), vectors)
        with disk_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, made.getvalue())


def shortest(vector: Vector) -> list[float]:
    """Returns the numbers of a vector, written with as few digits as tell them from all other float32."""
    return [float(str(each)) for each in vector]
