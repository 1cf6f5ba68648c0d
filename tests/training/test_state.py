from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lm.errors import CheckpointError
from lm.storage.checkpoint import CheckpointReader, Piece, step_folder
from lm.training.callbacks.saving import Saver
from lm.training.launch.ranks import Ranks
from lm.training.optim.adafactor import AdafactorConfig
from lm.training.optim.adamw import AdamWConfig
from lm.training.optim.base import OptimConfig, begin_state
from lm.training.optim.lion import LionConfig
from lm.training.optim.muon import MuonConfig
from lm.training.optim.sgd import SGDConfig
from lm.training.optim.soap import SoapConfig
from lm.training.run_config import CheckpointConfig
from lm.training.strategies.base import Strategy
from lm.training.weights.averages import EMA
from lm.training.weights.initial import load_pieces
from tests.conftest import on_linux
from tests.runs import save_checkpoint
from tests.training.optim.optimizers import built

CONFIGS: list[OptimConfig] = [
    AdamWConfig(),
    MuonConfig(),
    SGDConfig(momentum=0.9),
    SGDConfig(),
    SoapConfig(),
    AdafactorConfig(beta1=0.9),
    LionConfig(),
]
IDS = ["adamw", "muon", "sgd-momentum", "sgd", "soap", "adafactor", "lion"]
MATRICES = {"inner.weight"}


class Tied(nn.Module):
    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width, dtype=dtype)
        self.inner = nn.Linear(width, width, dtype=dtype)
        self.head = nn.Linear(width, 10, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(tokens)).relu())


def train(model: Tied, optimizer: torch.optim.Optimizer, steps: range, ema: EMA | None = None) -> None:
    for step in steps:
        tokens = torch.randint(0, 10, (6,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1)).backward()
        optimizer.step()
        if ema is not None:
            ema.update(0, torch.tensor(False))


def prepared(cfg: OptimConfig, model: Tied) -> tuple[torch.optim.Optimizer, EMA]:
    optimizer = built(cfg, model.named_parameters(), MATRICES)
    begin_state(optimizer)
    return optimizer, EMA(Strategy(), model, Strategy().weights(model), 0.9)


def pieces(model: Tied, optimizer: torch.optim.Optimizer, ema: EMA) -> list[Piece]:
    return [*Strategy().weights(model), *Strategy().optimizer(model, optimizer), *ema.pieces()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cfg", CONFIGS, ids=IDS)
def test_a_resumed_optimizer_goes_on_bitwise(cfg: OptimConfig, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied(dtype=dtype)
    optimizer, ema = prepared(cfg, model)
    train(model, optimizer, range(4), ema)
    Saver(tmp_path, CheckpointConfig(keep_last=1), Ranks(), lambda folder: None).save(4, pieces(model, optimizer, ema), {"step": 4})
    train(model, optimizer, range(4, 8), ema)

    torch.manual_seed(1)
    other = Tied(dtype=dtype)
    resumed, average = prepared(cfg, other)
    train(other, resumed, range(2), average)
    reader = CheckpointReader(step_folder(tmp_path, 4))
    load_pieces(pieces(other, resumed, average), reader)
    train(other, resumed, range(4, 8), average)
    assert reader.names() == ["embed.weight", "inner.weight", "inner.bias"]  # the tied head once
    saved = {kind: reader.dtype(name, kind) for name in reader.names() for kind in reader.kinds(name)}
    assert saved == {kind: dtype if kind == "weight" else torch.float32 for kind in saved}
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        for key, tensor in optimizer.state[p].items():
            assert torch.equal(tensor, resumed.state[q][key])
    for a, b in zip(ema.pieces(), average.pieces(), strict=True):
        assert torch.equal(a.tensor, b.tensor)


@on_linux
def test_a_checkpoint_that_was_read_is_let_go_of(tmp_path: Path) -> None:
    """Seen to fail: a resumed run kept the files to its end, whose place on the disk was not free after they were removed."""
    model = Tied()
    optimizer, ema = prepared(CONFIGS[0], model)
    Saver(tmp_path, CheckpointConfig(), Ranks(), lambda folder: None).save(4, pieces(model, optimizer, ema), {"step": 4})
    reader = CheckpointReader(step_folder(tmp_path, 4))
    kept = reader.read("inner.weight")
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    load_pieces(pieces(model, optimizer, ema), reader)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(reader.read("inner.weight"), kept)


def test_pieces_carry_neutral_names(tmp_path: Path) -> None:
    found = {}
    for cfg, label in zip(CONFIGS, IDS, strict=True):
        model = Tied()
        found[label] = {(p.name, p.kind) for p in Strategy().optimizer(model, prepared(cfg, model)[0])}
    names = ["embed.weight", "inner.weight", "inner.bias"]
    adam = {(name, kind) for name in names for kind in ("step", "exp_avg", "exp_avg_sq")}
    assert found["adamw"] == adam
    assert found["muon"] == {(name, kind) for name, kind in adam if name != "inner.weight"} | {("inner.weight", "momentum")}
    assert found["sgd-momentum"] == {(name, "momentum") for name in names}
    assert found["lion"] == found["sgd-momentum"]
    assert found["sgd"] == set()
    assert found["soap"] == adam | {("inner.weight", f"{side}{of}") for side in ("left", "right") for of in ("", "_basis")}
    factored = {(name, kind) for name in names for kind in ("step", "exp_avg", "row", "column") if name != "inner.bias"}
    assert found["adafactor"] == factored | {("inner.bias", kind) for kind in ("step", "exp_avg", "exp_avg_sq")}


def test_a_missing_optimizer_state_names_the_remedy(tmp_path: Path) -> None:
    model = Tied()
    save_checkpoint(tmp_path / "x", Strategy().weights(model), {})
    optimizer, _ = prepared(AdamWConfig(), model)
    with pytest.raises(CheckpointError, match=r"optimizer's step of embed\.weight is missing.*resume\.fresh_optimizer=true"):
        load_pieces(Strategy().optimizer(model, optimizer), CheckpointReader(tmp_path / "x"))


def test_the_average_follows_its_formula_and_swapping_gives_the_weights_back_bitwise() -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = built(SGDConfig(lr=0.5), model.named_parameters(), MATRICES)
    expected = model.inner.weight.detach().double()
    ema = EMA(Strategy(), model, Strategy().weights(model), 0.75)
    for step in range(5):
        train(model, optimizer, range(step, step + 1), ema)
        expected = 0.75 * expected + 0.25 * model.inner.weight.detach().double()
    own = model.inner.weight.detach().clone()
    with ema.swapped():
        torch.testing.assert_close(model.inner.weight.double(), expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(model.inner.weight, own)
    assert torch.equal(model.inner.weight, own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapped_averages_come_back_bitwise(dtype: torch.dtype) -> None:
    """Where both are float32 the weights are where the averages were: a copy of them stood beside both in each validation."""
    torch.manual_seed(0)
    model = Tied(dtype=dtype)
    optimizer, ema = prepared(CONFIGS[0], model)
    train(model, optimizer, range(3), ema)
    state = [piece.tensor for piece in (*Strategy().weights(model), *ema.pieces())]
    before = [tensor.clone() for tensor in state]
    with ema.swapped():
        assert all(torch.equal(weight, average.to(dtype)) for weight, average in zip(state[:3], before[3:], strict=True))
        assert torch.equal(state[3], before[0]) is (dtype == torch.float32)
    assert all(map(torch.equal, state, before))


def test_an_error_while_swapped_gives_the_weights_back() -> None:
    model = Tied()
    own = model.inner.weight.detach().clone()
    ema = EMA(Strategy(), model, Strategy().weights(model), 0.5)
    nn.init.zeros_(model.inner.weight)
    with pytest.raises(KeyError), ema.swapped():
        assert torch.equal(model.inner.weight, own)
        raise KeyError("a bug")
    assert not model.inner.weight.any()
