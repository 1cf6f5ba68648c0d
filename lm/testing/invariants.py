"""What holds for every model, whatever fills its slots: functions of a model in float64, or of its config, that raise AssertionError."""

import contextlib
import itertools
from dataclasses import replace

import torch
from torch import Tensor

from lm.cost.count import count
from lm.cost.memory import Setting, memory
from lm.errors import ConfigError
from lm.losses.auxiliary import Auxiliary
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.head import Head
from lm.nn.model_config import ModelConfig, model_config
from lm.nn.transformer import LM, EncoderDecoderLM, build_model
from lm.testing.models import VOCAB, Doubles, random_model, same, tokens

S, M = 21, 13  # tokens, and tokens of a source
CHUNKS = [11, 1, 1, 6, 1, 1]
DOCUMENTS, SOURCES = [9, 5, 7], [4, 6, 3]


def check_model(cfg: ModelConfig) -> None:
    """Puts models of this config through what holds for every forward, in float64."""
    assert model_config(cfg.tree()) == cfg, "a config does not come back from its tree"
    gradient_reaches_every_parameter(random_model(cfg).double())
    with torch.no_grad(), Doubles():
        model = random_model(cfg).double()
        checks = [no_token_sees_the_future, cached_equals_full] if model.causal else [tokens_see_both_sides]
        checks += [every_token_reads_the_source] if isinstance(model, EncoderDecoderLM) else []
        for check in [*checks, packed_equals_separate, padding_changes_nothing]:
            check(model)


def check_sizes(cfg: ModelConfig) -> None:
    """Draws are a function of the seed, the meta device knows all shapes, and the formulas answer."""
    model, again, other = (build_model(cfg, seed=seed) for seed in (3, 3, 4))
    weights = dict(model.named_parameters())
    assert all(p.isfinite().all() for p in weights.values()), "a weight is drawn that is not finite"
    assert all(p.equal(weights[name]) for name, p in again.named_parameters()), "two builds of one seed draw different weights"
    assert not all(p.equal(weights[name]) for name, p in other.named_parameters()), "another seed draws the same weights"
    shapes = {name: p.shape for name, p in build_model(cfg, device="meta").named_parameters()}
    assert shapes == {name: p.shape for name, p in weights.items()}, "on the meta device the model has other weights"
    said = repr(again)
    for p in again.parameters():
        p.data = p.new_empty(0)  # as an engine leaves it that holds the weights in pieces
    assert repr(again) == said, "extra_repr asks the shape of a weight. Keep the number"
    counts, held = count(cfg, S), memory(model, Setting(2, S, 1024))
    assert counts.parameters >= counts.active > 0 and counts.forward_flops_per_token > 0, "the counts of the model are not positive"
    assert held.activations > 0 and counts.cache_bytes_per_token + counts.cache_bytes_per_row > 0, "a model that keeps nothing"


@torch.no_grad()
def check_rows_of_the_cache(cfg: ModelConfig) -> None:
    """A cache forgets its last tokens, and its rows change places, as beam search and speculation ask of it."""
    model = random_model(cfg).double()
    if not model.causal:
        return
    batch, rows = a_batch(model), torch.tensor([1, 0])
    with Doubles():
        full, cache = model(batch), model.new_cache(2, S, slack=4)
        model(columns(batch, 0, 11), cache=cache)
        model(columns(batch, 4, 8, None), cache=cache)  # tokens that are taken back
        cache.rewind(4)
        same(model(columns(batch, 11, 15, None), cache=cache), full[:, 11:15], "a cache that was rewound still holds what it should forget")
        cache.reorder(rows)
        moved = Batch(batch.tokens[rows], segments=None if batch.segments is None else batch.segments[rows])
        out = model(columns(moved, 15, S, None), cache=cache)
        same(out, full[rows, 15:], "a cache whose rows were exchanged does not go on with them")


@torch.no_grad()
def check_positions(cfg: ModelConfig) -> None:
    """An attention hears of a position that acts within it, or refuses it: the same weights give other logits with it than without."""
    found = {}
    for kind in ("none", "rope", "alibi"):  # which have no weights
        with contextlib.suppress(ConfigError), Doubles():
            model = random_model(model_config(cfg.tree() | {"position": {"kind": kind}})).double()
            found[kind] = model(a_batch(model))
    without = found.pop("none", None)
    for kind, remedy in (("rope", "Rotate queries and keys by ctx.position.rotate"), ("alibi", "Add ctx.position.bias to the scores")):
        heard = without is None or kind not in found or (found[kind] - without).abs().max() > 1e-3
        assert heard, f"position={kind} changes nothing. {remedy}, or refuse such positions in `require`"


def cached_equals_full(model: LM) -> None:
    """In chunks, and one by one."""
    batch = a_batch(model)
    full, cache = model(batch), model.new_cache(2, S, slack=4)
    assert full.std() >= 1, "the logits are too small to tell: blind"
    try:
        out = [model(columns(batch, *span, slice(None) if span[0] == 0 else None), cache=cache) for span in _spans(CHUNKS)]
    except RuntimeError as error:  # of shapes, as of queries of one token beside no keys of the others
        remedy = "Put what later tokens need into ctx.cache, and go on with what it gives"
        raise AssertionError(f"decoding with a cache breaks where the full forward does not ({error}). {remedy}") from error
    same(torch.cat(out, 1), full, "decoding with a cache is not the full forward")


def no_token_sees_the_future(model: LM) -> None:
    """A later token changes nothing before it."""
    batch = a_batch(model)
    full, after = model(batch), model(replace(batch, tokens=_changed(batch.tokens, 14)))
    same(after[:, :14], full[:, :14], "causality does not hold: a token sees a later one")
    assert (after[:, 14] - full[:, 14]).abs().max() > 1e-3, "a token does not matter to itself"


def tokens_see_both_sides(model: LM) -> None:
    """In an encoder."""
    batch = a_batch(model)
    moved = (model(batch) - model(replace(batch, tokens=_changed(batch.tokens, 10)))).abs().amax((0, 2)) > 1e-4
    assert moved[9] and moved[10] and moved[11], "a neighbour is not seen"


def every_token_reads_the_source(model: LM) -> None:
    """In an encoder-decoder."""
    batch = a_batch(model)
    assert batch.source_tokens is not None
    moved = (model(batch) - model(replace(batch, source_tokens=_changed(batch.source_tokens, 5)))).abs().amax((0, 2)) > 1e-4
    assert moved.all(), "a source is not read"


def packed_equals_separate(model: LM) -> None:
    """Documents side by side do not see each other."""
    batch = a_batch(model)
    together = model(_packed(batch))
    for (start, stop), source in zip(_spans(DOCUMENTS), _spans(SOURCES), strict=True):
        alone = model(columns(batch, start, stop, slice(*source)))
        same(together[:, start:stop], alone, "packed documents are not what they are in rows of their own")


def padding_changes_nothing(model: LM) -> None:
    """On either side."""
    batch = a_batch(model)
    alone, out = model(batch), model(_padded(batch, 4, 3))
    same(out[:, 4 : 4 + S], alone, "padding changes what the tokens of a row give")
    assert out.isfinite().all(), "padding gives numbers that are not finite"


def gradient_reaches_every_parameter(model: LM) -> None:
    """Of those that learn, from the output or from what layers report. In float64: a gradient that a later norm nearly cancels would be
    rounded to 0 in float32."""

    def read(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        loss: Tensor = head(hidden).square().sum()
        return sum(Auxiliary.of(ctx.reported, 1.0).losses.values(), loss)

    trained = model.training
    with torch.enable_grad():
        model.train()(a_batch(model, b=4), read=read).backward()
    model.train(trained)
    wanting = [name for name, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.abs().sum() > 0)]
    assert not wanting, f"no gradient reaches {wanting}"


def a_batch(model: LM, b: int = 2) -> Batch:
    """Returns random tokens, with segments and a source where the model reads them."""
    segments = None
    if model.segment is not None:
        segments = torch.randint(0, model.segment.num_embeddings, (b, S), generator=torch.Generator().manual_seed(1))
    source = tokens(b, M, 51) if isinstance(model, EncoderDecoderLM) else None
    return Batch(tokens(b, S), segments=segments, source_tokens=source)


def columns(batch: Batch, start: int, stop: int, source: slice | None = slice(None)) -> Batch:
    """Returns some tokens of each row and some of its source, as a batch of their own without positions."""
    given = {name: value[:, start:stop] for name in ("tokens", "segments") if (value := getattr(batch, name)) is not None}
    if batch.source_tokens is not None and source is not None:
        given["source_tokens"] = batch.source_tokens[:, source]
    return Batch(**given)


def _packed(batch: Batch) -> Batch:
    """The same tokens as three documents a row, each with a source of its own."""
    b = len(batch.tokens)
    out = replace(batch, positions=_restarting(DOCUMENTS, b), documents=_numbered(DOCUMENTS, b))
    if batch.source_tokens is not None:
        out = replace(out, source_positions=_restarting(SOURCES, b), source_documents=_numbered(SOURCES, b))
    return out


def _restarting(lengths: list[int], b: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths]).expand(b, -1)


def _numbered(lengths: list[int], b: int) -> Tensor:
    return torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)]).expand(b, -1)


def _padded(batch: Batch, left: int, right: int) -> Batch:
    """`left` columns of padding before the tokens and `right` after them; the source gets them the other way round."""

    def pad(x: Tensor, fill: int, left: int = left, right: int = right) -> Tensor:
        return torch.nn.functional.pad(x, (left, right), value=fill)

    out = replace(batch, tokens=pad(batch.tokens, 3), positions=pad(_restarting([S], 2), -1))
    if batch.segments is not None:
        out = replace(out, segments=pad(batch.segments, 0))
    if batch.source_tokens is not None:
        source, positions = pad(batch.source_tokens, 3, right, left), pad(_restarting([M], 2), -1, right, left)
        out = replace(out, source_tokens=source, source_positions=positions)
    return out


def _changed(ids: Tensor, at: int) -> Tensor:
    out = ids.clone()
    out[:, at] = (out[:, at] + 1) % VOCAB
    return out


def _spans(lengths: list[int]) -> list[tuple[int, int]]:
    stops = list(itertools.accumulate(lengths))
    return list(zip([0, *stops], stops, strict=False))
