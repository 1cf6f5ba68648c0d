"""Masked diffusion: how many tokens are hidden, which, what each counts, and that the loss bounds that of the text."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.cli.views.rows import shown
from lm.data.kinds import BytesConfig, DiffusionConfig
from lm.data.layout.best_fit import BestFit
from lm.data.layout.windows import Windows
from lm.data.order import spread
from lm.data.rows.diffusion import DiffusionRows
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.documents import Documents
from lm.generation.evaluate import Evaluator
from lm.losses.cross_entropy import LossSums, losses_and_gradient, token_losses
from lm.losses.measure import Measure
from lm.losses.tokens import causal_reader
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import LM, EncoderConfig
from lm.schema import from_tree
from tests.nn.models import BASE, random_model, with_kinds

MakeStore = Callable[..., TokenStore]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return BytesConfig().build(extra=DiffusionConfig().specials())


def make(store: TokenStore, tokenizer: Tokenizer, seq_len: int, mask: bool = True) -> DiffusionRows:
    return DiffusionRows(Windows(store, seq_len, mask, ahead=0), tokenizer, seed=1)


def encoder(**changes: Any) -> LM:
    return random_model(from_tree(EncoderConfig, with_kinds(BASE | {"kind": "encoder"} | changes)))


def documents(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [[*tokenizer.prefix, *draw.integers(0, 256, length).tolist(), *tokenizer.suffix] for _ in range(count)]


def fields(batch: Batch) -> tuple[Tensor, Tensor]:
    assert batch.labels is not None and batch.shares is not None
    return batch.labels, batch.shares


def test_any_number_of_tokens_is_hidden_as_often_and_counts_by_how_many(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    rows = make(make_store(documents(tokenizer, 400, 61)), tokenizer, 64, mask=False)
    batch = rows.batch(np.arange(len(rows)))
    labels, shares = fields(batch)
    hidden, known = batch.tokens == tokenizer.mask, labels != IGNORED
    assert torch.equal(hidden, shares > 0) and torch.equal(batch.tokens[known & ~hidden], labels[known & ~hidden])
    n, k = known.sum(1), hidden.sum(1)
    assert k.min() == 1 and torch.equal(k[n == 63].max(), torch.tensor(63))
    assert torch.allclose(shares.sum(1), n.float(), rtol=1e-5), "a row counts as much as its tokens, however many are hidden"
    counts = np.bincount(((k - 1) * 8 // n).numpy(), minlength=8)
    alike = sum(np.bincount(np.arange(size) * 8 // size, minlength=8) / size for size in n.tolist())
    assert np.abs(counts - alike).max() <= 5, "spread over the numbers: of independent ones 6.6 would be a standard deviation"
    places = hidden[(k > 20) & (k < 44)].float().mean(0)[1:-1]
    assert places.min() > 0.35 and places.max() < 0.65


@pytest.mark.parametrize("read", [256, 217, 100, 64, 31, 16, 7])
@pytest.mark.parametrize("n_rows", [256, 300, 670, 1424, 5362])
def test_the_rows_of_a_validation_are_spread_over_the_numbers_whatever_part_they_are(
    make_store: MakeStore, tokenizer: Tokenizer, n_rows: int, read: int
) -> None:
    """Seen to fail: of every 2.6th row, 256 of 670, from 0.53 to 0.98 of the tokens were hidden, of another seed from none to 0.4;
    and of every 7th part of the rows as many."""
    store = make_store([[65] * (16 * n_rows)])
    for seed in range(4):
        rows = DiffusionRows(Windows(store, 16, True, ahead=0), tokenizer, seed)
        batch = rows.batch(spread(len(rows), read))
        hidden = (batch.tokens == tokenizer.mask).float().mean(1)
        assert len(rows) == n_rows and hidden.mean() == pytest.approx(17 / 32, abs=0.01 + 0.4 / read**0.5)
        assert hidden.std() == pytest.approx(1 / 12**0.5, abs=0.01 + 0.4 / read**0.5)


def test_what_begins_a_document_is_shown_and_not_predicted(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    (bos,) = tokenizer.prefix
    rows = make(make_store(documents(tokenizer, 60, 20)), tokenizer, 32)
    batch = rows.batch(np.arange(len(rows)))
    begins = batch.tokens == bos
    assert begins.sum() == 60 and (fields(batch)[0][begins] == IGNORED).all() and not fields(batch)[1][begins].any()


@pytest.mark.parametrize("fit", [False, True])
def test_bytes_are_told_of_the_tokens_that_are_predicted(make_store: MakeStore, tokenizer: Tokenizer, fit: bool) -> None:
    """Where tokens are not bytes, by the mean of a label. Seen to fail: the token that begins a document was one of the labels."""
    store = make_store(documents(tokenizer, 60, 20))
    rows = DiffusionRows(BestFit(store, 32, 0) if fit else Windows(store, 32, True, ahead=0), tokenizer, seed=1)
    labels, _ = fields(rows.batch(np.arange(len(rows))))
    assert rows.n_labels == (labels != IGNORED).sum() and rows.bytes_per_label * rows.n_labels == pytest.approx(store.n_bytes)


def test_draws_depend_on_seed_step_and_row_alone(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    rows = make(make_store(documents(tokenizer, 20, 40)), tokenizer, 32)
    whole = rows.batch(np.arange(8), draw=3)
    part = rows.batch(np.array([5, 2]), draw=3)
    assert torch.equal(part.tokens, whole.tokens[[5, 2]]) and torch.equal(fields(part)[1], fields(whole)[1][[5, 2]])
    assert not torch.equal(rows.batch(np.arange(8), draw=4).tokens, whole.tokens)


def test_padding_is_neither_hidden_nor_counted(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    made = DiffusionRows(BestFit(make_store(documents(tokenizer, 30, 20)), 32, 0), tokenizer, seed=1)
    batch = made.batch(np.arange(len(made)))
    labels, shares = fields(batch)
    assert batch.positions is not None
    empty = batch.positions < 0
    assert empty.any() and (labels[empty] == IGNORED).all() and not shares[empty].any()
    assert torch.allclose(shares.sum(1), (labels != IGNORED).sum(1).float(), rtol=1e-5)


def exact(model: LM, tokens: list[int], mask: int) -> float:
    """The bound, in nats a token, of one document by its definition: over all orders of its tokens the mean of -log p of each in turn, from
    those before it. Computed from all subsets: with m tokens left to tell, each as likely to be the next."""
    n, total = len(tokens), 0.0
    for m in range(1, n + 1):
        subsets = [*itertools.combinations(range(n), m)]
        rows = torch.tensor([[mask if i in subset else token for i, token in enumerate(tokens)] for subset in subsets])
        logits: Tensor = model(Batch(rows))
        nats = F.cross_entropy(logits.transpose(1, 2), torch.tensor([tokens] * len(rows)), reduction="none")
        total += float(sum(nats[row, list(subset)].mean() for row, subset in enumerate(subsets))) / len(subsets)
    return total / n


def test_the_mean_loss_is_the_bound_over_all_orders_of_the_tokens(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    """Of a model whose guess at a token depends on which others it sees: each set of hidden tokens comes as often as it should, by five
    standard deviations of 4,000 draws, and with these chances the mean loss is the bound."""
    assert tokenizer.mask is not None
    model, text = encoder(vocab_size=320, max_seq_len=8), [3, 200, 7, 7, 30]
    rows, n, draws = make(make_store([text]), tokenizer, len(text)), len(text), 4000
    drawn = [rows.batch(np.array([0]), draw) for draw in range(draws)]
    tokens, shares = torch.cat([batch.tokens for batch in drawn]), torch.cat([fields(batch)[1] for batch in drawn])
    sets, counts = (tokens == tokenizer.mask).unique(dim=0, return_counts=True)
    chance = torch.tensor([1 / n / math.comb(n, k) for k in sets.sum(1).tolist()])
    assert len(sets) == 2**n - 1 and float(chance.sum()) == pytest.approx(1)
    assert ((counts - draws * chance).abs() < 5 * (draws * chance * (1 - chance)).sqrt()).all()
    assert torch.allclose(shares, (tokens == tokenizer.mask) * n / (tokens == tokenizer.mask).sum(1, keepdim=True))
    with torch.no_grad():
        logits = model(Batch(torch.tensor(text).where(~sets, tokenizer.mask)))
        nats = F.cross_entropy(logits.transpose(1, 2), torch.tensor([text] * len(sets)), reduction="none")
        found = (nats * sets * n / sets.sum(1, keepdim=True)).sum(1) / n @ chance
        assert float(found) == pytest.approx(exact(model, text, tokenizer.mask), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}], ids=str)
def test_shares_count_alike_in_the_plain_loss_its_gradient_and_in_chunks(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 30, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 30, (40,)).where(torch.rand(40) < 0.8, IGNORED)
    shares = torch.rand(40, dtype=torch.float64) * (torch.rand(40) < 0.6)
    smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    plain = sum(
        token_losses(logits[i : i + 1], labels[i : i + 1], smoothing, z_loss).total * shares[i] for i in range(40) if labels[i] != IGNORED
    )
    assert isinstance(plain, Tensor)
    (wanted,) = torch.autograd.grad(plain, logits)
    assert torch.allclose(token_losses(logits, labels, smoothing, z_loss, shares=shares).total.double(), plain, rtol=1e-5)
    sums, _, gradient = losses_and_gradient(logits.detach().clone(), labels, smoothing, z_loss, shares=shares)
    assert torch.allclose(sums.total, plain) and torch.allclose(gradient.double(), wanted, atol=1e-6)

    model = encoder(vocab_size=30, max_seq_len=8)
    batch = Batch(torch.randint(0, 30, (5, 8)), labels.view(5, 8), shares=shares.float().view(5, 8))

    def gradients(sums: LossSums) -> Tensor:
        model.zero_grad()
        sums.total.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    assert batch.labels is not None and batch.shares is not None
    read = causal_reader(batch.labels, smoothing, z_loss, chunk=7, shares=batch.shares)
    whole = model(batch)
    reference = token_losses(whole.flatten(0, 1), labels, smoothing, z_loss, shares=shares.float())
    chunked: LossSums = model(batch, read=read)
    assert torch.allclose(chunked.total, reference.total, rtol=1e-5) and torch.allclose(chunked.nll, reference.nll, rtol=1e-5)
    assert torch.allclose(gradients(chunked), gradients(reference), atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        quiet: LossSums = model(batch, read=read)
    assert torch.allclose(quiet.total, reference.total, rtol=1e-5)


def test_no_logits_are_computed_of_labels_that_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = encoder(vocab_size=30, max_seq_len=64), list[int]()
    labels, shares = torch.zeros(16, 64, dtype=torch.int64), torch.zeros(16, 64)
    shares[:, :4] = 16.0
    head = model.head.forward
    monkeypatch.setattr(model.head, "forward", lambda hidden: (read.append(len(hidden)), head(hidden))[1])
    with torch.no_grad():
        model(Batch(labels), read=causal_reader(labels, shares=shares))
    assert 64 <= sum(read) < 128


def test_a_validation_tells_the_bound_by_document_and_guesses_at_hidden_tokens_alone(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    model = encoder(vocab_size=320, max_seq_len=32)
    rows = make(make_store(documents(tokenizer, 60, 30)), tokenizer, 32)
    ids = np.arange(len(rows))
    told = Documents(rows, ids, tokenizer, 8)
    evaluator = Evaluator(model, tokenizer, 8, Measure())
    found = evaluator.totals(rows, ids, closely=True, documents=told)
    figures = found.figures()
    batch = rows.batch(ids)
    labels, shares = fields(batch)
    with torch.no_grad():
        nats = F.cross_entropy(model(batch).transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)
    assert figures["tokens"] == int((labels != IGNORED).sum())
    assert figures["val_loss"] == pytest.approx(float((nats * shares).sum() / (labels != IGNORED).sum()), rel=1e-5)
    assert figures["val_bits_per_byte"] == pytest.approx(float((nats * shares).sum()) / math.log(2) / figures["bytes"], rel=1e-5)
    sums = told.found(told.flat()).sums
    assert sum(each[0] for each in sums.values()) == pytest.approx(found.nats, rel=1e-6)
    assert found.curves is not None and found.curves.calibration[:, 0].sum() == (shares > 0).sum()
    assert sum(each["tokens"] * each["loss"] for each in found.curves.by_place()) == pytest.approx(found.nats, rel=1e-6)


def test_of_a_row_only_hidden_tokens_are_shown_as_told(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    """Seen to fail: all tokens were, as if the model learned to repeat what it reads."""
    rows = make(make_store([[65, 66] * 8]), tokenizer, 16)
    batch = rows.batch(np.array([0]))
    reads, says = ("".join(text for text, _ in line).split(":")[1].strip().split("│") for line in shown(batch, tokenizer))
    assert [one == "<|mask|>" for one in reads] == [one != "·" for one in says] and 1 < says.count("·") < 16


def test_without_a_mask_token_it_is_refused(make_store: MakeStore, byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="objective=diffusion: the tokenizer has no mask token"):
        make(make_store([[1] * 40]), byte_tokenizer, 8)
