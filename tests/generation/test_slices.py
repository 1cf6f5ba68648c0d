"""A frozen model in slices over the ranks. As a program, this file is one of the ranks."""

import gc
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import distributed

import lm
from lm.data.kinds import BytesConfig
from lm.data.tokenizer.fitting import grown
from lm.errors import CheckpointError
from lm.generation.load import unfilled
from lm.generation.slices import sliced
from lm.generation.teacher import frozen
from lm.losses.teacher import SoftTargets
from lm.nn.batch import Batch
from lm.nn.model_config import model_config
from lm.training.weights.initial import parent
from tests.nn.models import BASE, BIASED, random_model, with_kinds
from tests.training.launch.processes import launch

WORLD, VOCAB = 3, 260


def rank(folder: Path) -> None:
    distributed.init_process_group("gloo")
    whole, own = frozen(str(folder), in_slices=False), frozen(str(folder), in_slices=True)
    tokens = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(distributed.get_rank()))
    batch, block = Batch(tokens), own.blocks[0].attention.q.weight
    for mode in (torch.inference_mode, torch.no_grad, torch.no_grad):  # as a validation may come first
        with mode():
            assert torch.equal(own(batch), whole(batch))
            soft = own(batch, read=lambda hidden, head, ctx: SoftTargets(hidden.flatten(0, -2), head, 1.0))
            expected = whole(batch).flatten(0, -2).float().softmax(-1)
            torch.testing.assert_close(soft.probabilities(slice(0, 14), VOCAB), expected, atol=1e-2, rtol=1e-2)
        assert own.blocks[0].attention.q.weight is block
    mine = sum(p.to_local().numel() for unit in own.units() for p in unit.parameters() if hasattr(p, "to_local"))
    n = sum(p.numel() for unit in whole.units() for p in unit.parameters())
    assert 0.8 * n / WORLD < mine < 1.2 * n / WORLD and not any(p.requires_grad for p in own.parameters())
    assert frozen(str(folder), in_slices=True) is own and own.embed.weight.dtype == torch.bfloat16
    left = weakref.ref(own)
    del own, block
    gc.collect()  # which each rank does when it likes, also between a validation of the parent and the first step
    assert frozen(str(folder), in_slices=True) is left()
    more = grown(BytesConfig().build(), [f"<|{i}|>" for i in range(8)])  # than the embedding has rows
    with torch.no_grad():
        wide, cut = (parent(str(folder), None, more, in_slices)(batch) for in_slices in (False, True))
    assert torch.equal(wide, cut) and wide.shape[-1] == more.vocab_size > VOCAB
    (folder / f"rank{distributed.get_rank()}").write_text("done")


@pytest.mark.slow
@pytest.mark.parametrize("ffn", [pytest.param({}, id="dense", marks=pytest.mark.slow), pytest.param({"ffn": BIASED}, id="experts")])
def test_ranks_compute_with_slices_as_with_the_whole(tmp_path: Path, server: Path, ffn: dict[str, object]) -> None:
    net = random_model(model_config(with_kinds(BASE | {"vocab_size": VOCAB} | ffn))).to(torch.bfloat16)
    lm.save(net, BytesConfig().build(), tmp_path / "model")
    launch(server, [__name__, str(tmp_path / "model")], tmp_path, 120, WORLD)
    assert len([*(tmp_path / "model").glob("rank?")]) == WORLD


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = lm.save(random_model(model_config(with_kinds(BASE | {"vocab_size": VOCAB}))), BytesConfig().build(), tmp_path / "model")
    model, _, weights = unfilled(folder)
    weights["norm.weight"] = weights["norm.weight"][:-1]
    with pytest.raises(CheckpointError, match=r"do not fit the model: norm\.weight"):
        sliced(model, weights, str(folder))


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
    os._exit(0)  # gloo's threads may abort at a regular end
