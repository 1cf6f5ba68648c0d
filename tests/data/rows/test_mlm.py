"""Masking: the paper's parts, and nothing else changed."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from lm.data.kinds import BPEConfig, BytesConfig, MLMConfig
from lm.data.layout.windows import Windows
from lm.data.rows.mlm import MLMRows
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import IGNORED, Batch
from lm.schema import from_tree

MakeStore = Callable[..., TokenStore]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return BytesConfig().build(extra=MLMConfig().specials())


def documents(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [[*tokenizer.prefix, *draw.integers(0, 256, length).tolist(), *tokenizer.suffix] for _ in range(count)]


def make(store: TokenStore, tokenizer: Tokenizer, seq_len: int, mask: bool = True, **options: object) -> MLMRows:
    return MLMRows(MLMConfig(**options), Windows(store, seq_len, mask, ahead=0), tokenizer, seed=1)  # type: ignore[arg-type]


def labels(batch: Batch) -> torch.Tensor:
    assert batch.labels is not None
    return batch.labels


def restored(batch: Batch) -> torch.Tensor:
    return torch.where(labels(batch) == IGNORED, batch.tokens, labels(batch))


def test_parts_are_those_of_the_paper_within_a_percent_over_a_million_tokens(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    rows = make(make_store(documents(tokenizer, 1, 1_200_000), vocab_size=300), tokenizer, 512)
    original = torch.from_numpy(rows.packing.read(np.arange(2200)).tokens)
    batch = rows.batch(np.arange(2200), draw=7)
    predicted = labels(batch) != IGNORED
    assert predicted.float().mean().item() == pytest.approx(0.15, rel=0.01)
    shown, truth = batch.tokens[predicted], original[predicted]
    assert torch.equal(labels(batch)[predicted], truth) and torch.equal(restored(batch), original)
    hidden, same = (shown == tokenizer.mask), shown == truth
    n_predicted = len(truth)
    assert hidden.float().mean().item() == pytest.approx(0.8, rel=0.01)
    others = shown[~hidden & ~same]
    assert len(others) / n_predicted == pytest.approx(0.1 * 255 / 256, rel=0.03)  # three standard errors of a tenth of 170,000
    counts = torch.bincount(others, minlength=260)
    assert (counts[:256] > 0).all() and not counts[256:].any()
    assert counts[:256].double().std() < 1.3 * counts[:256].double().mean().sqrt()


def test_predicted_tokens_are_hidden_replaced_or_kept_as_said_within_a_percent_of_a_million(
    make_store: MakeStore, tokenizer: Tokenizer
) -> None:
    """A percent is over three standard errors of the smallest part. Seen to fail with random_frac
    counted from 0 instead of behind hidden_frac."""
    rows = make(make_store(documents(tokenizer, 1, 1_200_000), vocab_size=300), tokenizer, 512, mask_frac=0.9)
    batch = rows.batch(np.arange(2200), draw=3)
    predicted = labels(batch) != IGNORED
    shown, truth = batch.tokens[predicted], labels(batch)[predicted]
    n, by_chance = len(truth), 1 / 256  # so often is the replacement the token itself
    assert n > 1_000_000
    hidden, same = int((shown == tokenizer.mask).sum()), int((shown == truth).sum())
    replaced = (n - hidden - same) / (1 - by_chance)
    parts = [hidden / n, replaced / n, (same - replaced * by_chance) / n]
    assert parts == pytest.approx([0.8, 0.1, 0.1], rel=0.01)


def test_specials_and_padding_are_never_predicted(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    rows = make(make_store(documents(tokenizer, 30, 9), vocab_size=300), tokenizer, 16, mask_frac=0.99)
    batch = rows.batch(np.arange(len(rows)))
    assert batch.documents is not None and batch.positions is not None
    special = torch.isin(restored(batch), torch.from_numpy(tokenizer.special_ids()))
    assert (labels(batch)[special] == IGNORED).all() and int(special.sum()) > 60
    assert (labels(batch)[batch.positions < 0] == IGNORED).all() and (batch.documents[-1, -1] == -1) == (batch.positions[-1, -1] == -1)
    assert (labels(batch) != IGNORED)[~special].float().mean() > 0.9


def test_the_last_row_is_padded_for_all_to_see(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    rows = make(make_store([[1] * 20], vocab_size=300), tokenizer, 16, mask=False)
    batch = rows.batch(np.arange(2))
    assert batch.positions is not None and batch.positions[1].tolist() == [0, 1, 2, 3] + [-1] * 12
    assert rows.batch(np.array([0])).positions is None


def test_masks_are_a_function_of_seed_draw_and_row(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    store = make_store(documents(tokenizer, 4, 500), vocab_size=300)
    rows = make(store, tokenizer, 64)
    whole, turned = rows.batch(np.arange(16), 3), rows.batch(np.arange(16)[::-1].copy(), 3)
    assert torch.equal(whole.tokens, turned.tokens.flip(0)) and torch.equal(labels(whole), labels(turned).flip(0))
    assert torch.equal(rows.batch(np.array([5]), 3).tokens[0], whole.tokens[5])
    other_draw, other_seed = (
        rows.batch(np.arange(16), 4),
        MLMRows(MLMConfig(), Windows(store, 64, True, 0), tokenizer, 2).batch(np.arange(16), 3),
    )
    for other in (other_draw, other_seed):
        both = ((labels(other) != IGNORED) & (labels(whole) != IGNORED)).float().mean().item()
        assert both == pytest.approx(0.15**2, abs=0.02)


def test_whole_words_are_predicted_together(make_store: MakeStore) -> None:
    text = "tokenisation of uncommonly longish words, naïvely 日本語 done " * 60
    tokenizer = BPEConfig(vocab_size=290).build([text], MLMConfig().specials())
    rows = make(make_store([tokenizer.document(text)], vocab_size=300), tokenizer, 128, whole_words=True)
    batch = rows.batch(np.arange(4))
    predicted = (labels(batch) != IGNORED).tolist()
    inside = 0
    for row, marks in zip(restored(batch).tolist(), predicted, strict=True):
        texts = [tokenizer.token_text(token) or b"" for token in row]
        for at in range(1, len(row)):
            if texts[at - 1] and texts[at] and (texts[at][:1].isalnum() or texts[at][0] >= 0x80):
                assert marks[at] == marks[at - 1]
                inside += marks[at]
    assert inside > 20


def test_a_tokenizer_without_a_mask_token_is_refused(make_store: MakeStore, byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="objective=mlm: the tokenizer has no mask token"):
        make(make_store([[1] * 40]), byte_tokenizer, 8)


def test_more_than_all_of_the_predicted_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"hidden_frac=0\.8 and random_frac=0\.5 are 1\.3 together"):
        from_tree(MLMConfig, {"random_frac": 0.5})
