"""FLOPs by formula against those that torch counts."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lm.cost.count import count
from lm.losses.tokens import causal_reader
from lm.nn.batch import Batch
from lm.nn.transformer import build_model
from lm.schema import Tree
from tests.nn.models import config


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"residual": {"kind": "hyper", "streams": 3}},
        {"head": {"tied": False}},
        {"attention": {"n_heads": 4, "n_kv_heads": 2, "forget": True}},
        {"residual": {"kind": "loop", "times": 3}},
        {"mtp": {"depth": 1}},
        {"mtp": {"depth": 2}, "head": {"tied": True, "transform": "gelu"}},
    ],
)
def test_a_forward_in_training_has_the_flops_of_the_formula(more: Tree) -> None:
    cfg = config(**more)
    assert cfg.vocab_size is not None and cfg.max_seq_len is not None
    ids = torch.randint(0, cfg.vocab_size, (2, cfg.max_seq_len))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as found, torch.no_grad():
        build_model(cfg, seed=0).train()(Batch(ids), read=causal_reader(ids))
    assert found.get_total_flops() == count(cfg, cfg.max_seq_len).forward_flops_per_token * ids.numel()


@pytest.mark.parametrize("terms", ["query_and_key", "query", "key"])
def test_keys_and_queries_of_distances_are_made_once_for_all_tokens(terms: str) -> None:
    """Which the formula, of one token, leaves out."""
    cfg = config(attention={"n_heads": 4, "n_kv_heads": 2, "disentangled": {"n_buckets": 5, "terms": terms}}, position={"kind": "none"})
    assert cfg.max_seq_len is not None
    ids = torch.zeros(2, cfg.max_seq_len, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as found, torch.no_grad():
        build_model(cfg, seed=0).train()(Batch(ids), read=causal_reader(ids))
    widths = {"query_and_key": cfg.d_model + cfg.d_model // 2, "query": cfg.d_model // 2, "key": cfg.d_model}
    once = cfg.n_layers * 2 * 10 * cfg.d_model * widths[terms]
    assert found.get_total_flops() - once == count(cfg, cfg.max_seq_len).forward_flops_per_token * ids.numel()
