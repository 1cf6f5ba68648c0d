"""Blocks that are computed again for the backward: the same bits, counted once."""

import torch

from lm.nn.batch import Batch
from lm.testing.models import tokens
from tests.nn.models import MIXTURES, config, redrawn
from tests.nn.test_moe import loss_of
from tests.nn.test_mtp import S, labels_of, loss, with_mtp


def test_blocks_that_are_run_again_for_the_backward_count_once() -> None:
    model = redrawn(config(ffn=MIXTURES[2] | {"balance_loss": 0.5, "router_z_loss": 0.2})).train()
    ids, labels = tokens(2, 12), tokens(2, 12, seed=2)
    wanted = [p for p in model.parameters() if p.requires_grad]
    plain = loss_of(model, ids, labels)
    expected = torch.autograd.grad(plain.total, wanted)
    model.checkpoint_blocks(1)
    again = loss_of(model, ids, labels)
    assert plain.loads is not None and again.loads is not None
    assert plain.loads.sum(1).tolist() == [2 * 12 * 2] * 2  # two layers of three have experts
    torch.testing.assert_close(torch.autograd.grad(again.total, wanted), expected, rtol=0, atol=0)
    assert torch.equal(again.loads, plain.loads)


def test_further_blocks_are_computed_again_in_the_backward_where_blocks_are() -> None:
    runs, gradients = [], []
    for every in (0, 1, 2):
        model, ids = with_mtp(2, ffn=MIXTURES[2] | {"balance_loss": 0.1}), tokens(2, S)
        model.checkpoint_blocks(every)
        called: list[object] = []
        for block in model.mtp:
            block.register_forward_pre_hook(lambda block, given, called=called: called.append(block))
        loss(model, Batch(ids, labels=labels_of(ids))).total.backward()
        runs.append([called.count(block) for block in model.mtp])
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert runs == [[1, 1], [2, 2], [1, 2]]  # they are blocks 3 and 4, counted from 0
    assert len(model.blocks) == 3
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0], rtol=0, atol=0)
