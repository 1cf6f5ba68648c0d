"""What labels are read off: a token, or the mean of a text's tokens."""

import torch

from lm.nn.batch import Batch
from lm.nn.transformer import build_model
from tests.nn.models import config

NAMES = ["calm", "wild"]


def test_a_mean_is_of_a_texts_own_tokens_in_whatever_row_it_stands() -> None:
    """Side by side, with padding, or alone: and it is the mean of the hidden states."""
    plain = build_model(config(vocab_size=40, head={"labels": NAMES, "tied": False}), seed=0)
    model = build_model(plain.cfg.replace(head={"labels": NAMES, "tied": False, "pooling": "mean"}))
    model.load_state_dict(plain.state_dict())
    texts = [torch.arange(3, 3 + n) for n in (5, 1, 4)]
    rows = torch.zeros(2, 8, dtype=torch.long)
    positions, documents = torch.full((2, 8), -1), torch.full((2, 8), -1, dtype=torch.int32)
    for number, (row, at, text) in enumerate(zip((0, 0, 1), (0, 5, 0), texts, strict=True)):
        place = (row, slice(at, at + len(text)))
        rows[place], positions[place], documents[place] = text, torch.arange(len(text)), number
    with torch.no_grad():
        packed = model(Batch(rows, positions=positions, documents=documents))
        for number, text in enumerate(texts):
            alone = model(text.unsqueeze(0))[0]
            mean = plain(text.unsqueeze(0), read=lambda hidden, head, ctx: head(hidden.mean(1)))[0]
            torch.testing.assert_close(alone, mean.expand_as(alone))
            torch.testing.assert_close(packed[documents == number], alone)
