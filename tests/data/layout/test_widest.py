"""The widest batch of every kind of rows, which a check begins with."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm.data.kinds import (
    BytesConfig,
    CausalConfig,
    DiffusionConfig,
    DPOConfig,
    FIMConfig,
    MixConfig,
    MLMConfig,
    PrefixConfig,
    Seq2SeqConfig,
    SFTConfig,
    SpansConfig,
    TextConfig,
    UL2Config,
)
from lm.data.loader import Steps
from lm.data.rows.base import Rows
from lm.data.rows.build import build_rows, build_splits
from lm.data.sizes import Sizes
from lm.data.store.prepare import prepare
from lm.nn.batch import Batch
from lm.nn.model_config import ModelConfig
from lm.schema import from_tree

Build = Callable[..., Rows]
SEQ_LEN = 96
N = 60


def records(path: Path) -> Path:
    """Of every shape in one; the longest source is not where the longest target is, and neither stands first."""
    rows = []
    for n in range(N):
        source, target = "ab " * (1 + n * 7 % 19 + 8 * (n == 20)), "cd " * (1 + n * 5 % 11 + 9 * (n == 40))
        turns = [{"role": "user", "content": source}, {"role": "assistant", "content": target}]
        rows.append({"text": source + target, "source": source, "target": target, "messages": turns,
                     "prompt": source[:12], "chosen": target, "rejected": target[: len(target) // 2] or "x"})  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def run(cfg: Any, model: ModelConfig, **data: Any) -> Rows:
        given = {
            "kind": "text",
            "files": str(records(tmp_path / "a.jsonl")),
            "seq_len": SEQ_LEN,
            "cache_dir": str(tmp_path / "cache"),
            "val_frac": 0.2,
        }
        config = from_tree(TextConfig, {**given, **data})
        prepared = prepare(config, BytesConfig(), log=lambda line: None, specials=cfg.specials())
        return build_rows(cfg, config, prepared.train, prepared.tokenizer, model)

    return run


def widths(rows: Rows, ids: Any) -> tuple[int, int]:
    batch = rows.batch(np.asarray(ids))
    return batch.tokens.shape[1], 0 if batch.source_tokens is None else batch.source_tokens.shape[1]


PAIR, CHAT, BOTH = {"record": {"kind": "pair"}}, {"record": {"kind": "chat"}}, {"record": {"kind": "preference"}}
CASES = {
    "causal": (CausalConfig(), "decoder", {}),
    "best fit": (CausalConfig(), "decoder", {"packing": "fit"}),
    "prefix": (PrefixConfig(), "decoder", {}),
    "fim": (FIMConfig(), "decoder", {}),
    "mlm": (MLMConfig(), "encoder_decoder", {}),
    "diffusion": (DiffusionConfig(), "encoder_decoder", {}),
    "spans": (SpansConfig(sentinels=40), "encoder_decoder", {}),
    "spans, one stack": (SpansConfig(sentinels=40), "decoder", {}),
    "ul2": (UL2Config(sentinels=60), "encoder_decoder", {}),
    "seq2seq": (Seq2SeqConfig(target_len=40), "encoder_decoder", {**PAIR}),
    "seq2seq, one stack": (Seq2SeqConfig(), "decoder", {**PAIR}),
    "sft": (SFTConfig(), "decoder", {**CHAT}),
    "sft, unpacked": (SFTConfig(), "decoder", {**CHAT, "packing": "none"}),
    "dpo": (DPOConfig(), "decoder", {**BOTH}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_widest_rows_are_as_wide_as_all_rows_together(case: str, build: Build, request: pytest.FixtureRequest) -> None:
    cfg, model, data = CASES[case]
    rows = build(cfg, request.getfixturevalue(model), **data)
    everything = widths(rows, np.arange(len(rows)))
    for n in (2, len(rows) + 3):
        ids = rows.widest(n)
        assert len(ids) == n and len(set(ids.tolist())) == min(n, len(rows))
        assert widths(rows, ids) == everything
    alone = [sum(widths(rows, [i])) for i in range(len(rows))]
    assert sum(widths(rows, rows.widest(1))) >= (max(alone) if everything[1] == 0 else everything[1])
    assert (len(set(alone)) > 1) == (case in ("seq2seq", "seq2seq, one stack", "sft, unpacked", "dpo", "spans", "ul2"))


def test_the_widest_rows_of_a_mixture_are_those_of_its_widest_source(tmp_path: Path, decoder: ModelConfig) -> None:
    short, long = tmp_path / "short.jsonl", records(tmp_path / "long.jsonl")
    short.write_text("".join(json.dumps({"source": f"a{n}", "target": "b"}) + "\n" for n in range(N)))
    sources = [{"name": path.stem, "data": {"kind": "text", "files": str(path), **PAIR, "val_frac": 0.2}} for path in (short, long)]
    cfg = from_tree(MixConfig, {"kind": "mix", "sources": sources, "seq_len": SEQ_LEN, "cache_dir": str(tmp_path / "cache")})
    prepared = prepare(cfg, BytesConfig(), log=lambda line: None)
    rows = build_splits(Seq2SeqConfig(), cfg, prepared, decoder, 0).train
    assert widths(rows, rows.widest(2)) == widths(rows, np.arange(len(rows)))


@pytest.mark.parametrize("case", CASES)
def test_a_step_goes_to_ranks_and_micro_batches_by_the_width_of_its_rows(case: str, build: Build, request: pytest.FixtureRequest) -> None:
    """Each row of it once, with less padding than in their order, and about as much to do for each rank."""
    cfg, model, data = CASES[case]
    rows = build(cfg, request.getfixturevalue(model), **data)
    n = len(rows) // 8 * 8
    ids = rows.at(0, range(n, 2 * n))
    grouped = rows.by_width(ids)
    assert sorted(grouped.tolist()) == sorted(ids.tolist())

    def places(order: Any) -> int:
        return sum(sum(widths(rows, order[at : at + 4])) for at in range(0, n, 4))

    alike = case not in ("seq2seq", "seq2seq, one stack", "sft, unpacked", "dpo")
    assert grouped.tolist() == ids.tolist() if alike else places(grouped) < 0.9 * places(ids)
    steps = [Steps(rows, 0, Sizes(n), 4, rank, world=2, train_rows=None, widest_first=False) for rank in range(2)]
    (first, second), whole = [rank[1] for rank in steps], Steps(rows, 0, Sizes(n), n, 0, world=1, train_rows=None, widest_first=False)[1][0]
    assert sorted(chain(*map(texts, [*first, *second]))) == sorted(texts(whole)) and len(first) == len(second) == n // 8
    assert all(abs(a.tokens.shape[1] - b.tokens.shape[1]) <= 16 for a, b in zip(first, second, strict=True)) or case in ("spans", "ul2")


def texts(batch: Batch) -> list[tuple[int, ...]]:
    """The tokens of each row."""
    places = torch.zeros_like(batch.tokens) if batch.positions is None else batch.positions
    return [tuple(row[at >= 0].tolist()) for row, at in zip(batch.tokens, places, strict=True)]
