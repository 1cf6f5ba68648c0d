"""Multi-token prediction: its loss by hand, within documents, in training only."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.losses.cross_entropy import LossSums
from lm.losses.tokens import _later_labels, causal_reader
from lm.nn.batch import IGNORED, Batch
from lm.nn.context import Context
from lm.nn.mtp import MTPBlock, shifted
from lm.nn.transformer import DecoderLM
from lm.ops.attention.mask import Mask, arange_positions
from lm.testing.models import tokens
from tests.nn.models import CLOSE, MIXTURES, config, packed, redrawn

pytestmark = pytest.mark.usefixtures("doubles")

S = 9


def with_mtp(depth: int = 2, **changes: object) -> DecoderLM:
    return redrawn(config(mtp={"depth": depth, "weight": 0.4}, **changes)).train()


def labels_of(ids: Tensor) -> Tensor:
    return shifted(ids, 1, IGNORED)


def loss(model: DecoderLM, batch: Batch) -> LossSums:
    assert batch.labels is not None
    out: LossSums = model(batch, read=causal_reader(batch.labels))
    return out


def hidden_by_hand(model: DecoderLM, ids: Tensor, depth: int) -> list[Tensor]:
    """h_k = norm_k(block_k(W_k [norm(embedding of token i + k), norm(h_(k-1))])), and h_0 is what the head reads."""
    at = arange_positions(S, ids.device)
    ctx = Context(model.position, Mask(at, at, square=True), model.position.angles(at))
    hidden, out = model.norm(model.through_blocks(model.embedded(model.embed(ids), ctx, None), ctx)), []
    for k, block in enumerate(model.mtp, 1):
        assert isinstance(block, MTPBlock)
        later = model.embed(torch.cat([ids[:, k:], torch.zeros(len(ids), k, dtype=torch.int64)], 1)) * model.cfg.embed.scale
        hidden = block.norm(block.block(block.join(torch.cat([block.token_norm(later), block.hidden_norm(hidden)], -1)), ctx))
        out.append(hidden)
    return out


SCALED = {"embed": {"scale": 0.3}, "norm": {"kind": "rms", "eps": 1.0}}  # a norm that lets the scale through


@pytest.mark.parametrize(("depth", "changes"), [(1, {}), (3, {}), (2, SCALED)])
@torch.no_grad()
def test_the_loss_is_the_weighted_mean_of_those_of_tokens_further_ahead(depth: int, changes: dict[str, object]) -> None:
    model, ids = with_mtp(depth, **changes), tokens(2, S)
    sums = loss(model, Batch(ids, labels=labels_of(ids)))
    expected = []
    for k, hidden in enumerate(hidden_by_hand(model, ids, depth), 1):  # place i predicts token i + 1 + k
        logits = model.head(hidden)[:, : S - 1 - k]
        expected.append(F.cross_entropy(logits.flatten(0, 1), ids[:, 1 + k :].flatten(), reduction="sum"))
    torch.testing.assert_close(sums.total - sums.nll, 0.4 * torch.stack(expected).mean())
    plain = F.cross_entropy(model(Batch(ids))[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(sums.nll, plain)


@torch.no_grad()
def test_evaluation_and_sampling_leave_the_further_blocks_out() -> None:
    model, ids = with_mtp(), tokens(2, S)
    batch = Batch(ids, labels=labels_of(ids))
    training = loss(model, batch)
    called: list[object] = []
    for block in model.mtp:
        block.register_forward_hook(lambda *given: called.append(given))
    model.eval()
    measured = loss(model, batch)
    assert measured.total == measured.nll and not called
    torch.testing.assert_close(measured.nll, training.nll)
    cache = model.new_cache(2, S)
    torch.testing.assert_close(model(Batch(ids), cache=cache), model(Batch(ids)), **CLOSE)
    assert len(cache.stores) == 3 and not called


@torch.no_grad()
def test_nothing_is_predicted_beyond_a_document() -> None:
    model = with_mtp(2)
    row = packed([5, 1, 6])
    row.labels = labels_of(row.tokens)
    for last in (4, 5, 11):
        row.labels[0, last] = 7  # the end of each text
    together, apart = loss(model, row), torch.zeros(())
    for span in (slice(0, 5), slice(5, 6), slice(6, 12)):
        apart = apart + loss(model, Batch(row.tokens[:, span], labels=row.labels[:, span])).total
    torch.testing.assert_close(together.total, apart)


@pytest.mark.parametrize("depth", [1, 2, 3])
@torch.no_grad()
def test_nothing_is_predicted_that_a_prefix_has_shown(depth: int) -> None:
    """A place before the prefix's end sees keys with which later tokens have been joined. Whatever a target is, the hidden states that
    it is read from are the same. Seen to fail with labels of all places."""
    model, ids, prefix = with_mtp(depth), tokens(1, 12), (torch.arange(12) < 6).unsqueeze(0)
    labels = labels_of(ids).masked_fill(torch.arange(12) < 5, IGNORED)
    mask = Mask(at := arange_positions(12, ids.device), at, square=True, k_prefix=prefix)

    def states(given: Tensor) -> list[Tensor]:
        found: list[list[Tensor]] = []
        model(Batch(given, prefix=prefix), read=lambda hidden, head, ctx: found.append(ctx.mtp))
        return found[0]

    counted, expected = 0, states(ids)
    for n in range(1, depth + 1):
        for place in (_later_labels(labels, n, mask)[0] != IGNORED).nonzero()[:, 0].tolist():
            other = ids.clone()
            other[0, place + n + 1] = (ids[0, place + n + 1] + 1) % 7
            assert torch.equal(states(other)[n - 1][0, place], expected[n - 1][0, place]), (n, place)
            counted += 1
    assert counted >= depth


@torch.no_grad()
def test_matrices_of_further_blocks_are_matrices_to_an_optimizer() -> None:
    model = with_mtp(1)
    assert {"mtp.0.join.weight", "mtp.0.block.attention.q.weight", "mtp.0.block.ffn.up.weight"} <= model.matrices()


def test_gradient_reaches_the_further_blocks_and_all_below() -> None:
    model, ids = with_mtp(2, ffn=MIXTURES[2] | {"balance_loss": 0.1}), tokens(4, 30)
    sums = loss(model, Batch(ids, labels=labels_of(ids)))
    assert sums.loads is not None and list(model.mixtures()) == ["blocks.1", "blocks.2", "mtp.0.block", "mtp.1.block"]
    assert sums.loads.shape == (4, 6)
    sums.total.backward()
    silent = [name for name, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.abs().sum() > 0)]
    assert not silent


@torch.no_grad()
def test_a_depth_beyond_the_row_predicts_nothing_more() -> None:
    model, ids = with_mtp(3), tokens(1, 2)
    sums = loss(model, Batch(ids, labels=labels_of(ids)))
    assert sums.total.isfinite() and sums.total == sums.nll
