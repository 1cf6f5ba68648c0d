"""Products of float8 numbers: what they are, what is left as it was, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lm
from lm.adapters.adapter import LoRAConfig
from lm.adapters.float8 import multiply_in_float8, require_float8
from lm.cli.compose.compose import compose
from lm.errors import ConfigError
from lm.losses.cross_entropy import LossSums
from lm.losses.tokens import causal_reader
from lm.nn.batch import Batch
from lm.nn.transformer import LM, DecoderConfig, build_model
from lm.ops.float8 import GRADIENTS, NUMBERS, by_float8, reference, rounded
from lm.ops.linear import product
from lm.ops.recompute import Recompute, Recomputed
from lm.schema import Tree, from_tree
from lm.storage.run_folder import Metrics
from tests.ops.test_recompute import Calls

WIDE: Tree = {
    "vocab_size": 97, "max_seq_len": 16, "d_model": 32, "n_layers": 2, "norm": {"kind": "rms"}, "position": {"kind": "rope"},
    "attention": {"kind": "gqa", "n_heads": 4}, "ffn": {"kind": "mlp", "hidden": 64},
}  # fmt: skip


def wide(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    q, scale = rounded(x, dtype)
    return q.float() * scale


def close(found: torch.Tensor, right: torch.Tensor) -> None:
    """To the rounding of a bfloat16 output."""
    torch.testing.assert_close(found.float(), right, rtol=2**-7, atol=2**-8 * float(right.abs().max()))


@pytest.mark.parametrize("rows", [(4, 12), (3, 7)], ids=["a multiple of 16", "another number"])
def test_products_and_gradients_are_those_of_the_rounded_numbers(rows: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(*rows, 32, dtype=torch.bfloat16, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    bias, gradient = torch.randn(48), torch.randn(*rows, 48).bfloat16()
    out = by_float8(x, weight, bias)
    close(out.detach(), reference(x.detach(), weight.detach()) + bias)
    assert (
        out.detach() - torch.nn.functional.linear(x.detach().float(), weight.detach(), bias)
    ).abs().max() > 0.02  # it is not the plain product
    out.backward(gradient)
    assert x.grad is not None and weight.grad is not None and weight.grad.dtype == torch.float32
    g = wide(gradient.float(), GRADIENTS).flatten(0, 1)
    close(x.grad, (g @ wide(weight.detach(), NUMBERS)).view(*rows, 32))
    ins = x.detach().float().flatten(0, 1)
    whole = len(ins) % 16 == 0
    close(weight.grad, g.t() @ wide(ins, NUMBERS) if whole else gradient.float().flatten(0, 1).t() @ ins)


@pytest.mark.parametrize("dtype", [NUMBERS, GRADIENTS])
def test_rounding_has_the_largest_number_exactly_and_keeps_what_is_no_number(dtype: torch.dtype) -> None:
    x = torch.tensor([-3.0, 0.1, 1e-30, 2.0])
    found = wide(x, dtype)
    torch.testing.assert_close(found[0], x[0])
    assert (found - x).abs().max() <= 3 * 2 ** (-4 if dtype == NUMBERS else -3)
    assert not wide(torch.zeros(3), dtype).any()
    for bad in (float("nan"), float("inf")):
        assert not wide(torch.tensor([1.0, bad]), dtype).isfinite().all()


def test_layers_that_fit_multiply_so_in_training_alone() -> None:
    model = build_model(from_tree(DecoderConfig, WIDE), seed=0)
    plain, ids = build_model(from_tree(DecoderConfig, WIDE), seed=0), torch.randint(0, WIDE["vocab_size"], (4, 16))
    assert multiply_in_float8(model) == "14 of 14 linear layers in blocks multiply float8"

    def gradients(of: LM) -> tuple[torch.Tensor, torch.Tensor]:
        of.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            sums: LossSums = of(Batch(ids), read=causal_reader(ids))
        sums.total.backward()
        return sums.total.detach(), torch.cat([p.grad.flatten() for p in of.parameters() if p.grad is not None])

    (loss, found), (right, wanted) = gradients(model), gradients(plain)
    assert loss != right and float(loss) == pytest.approx(float(right), rel=0.01)
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.99
    with torch.no_grad():
        torch.testing.assert_close(model(ids), plain(ids), rtol=0, atol=0)


def test_a_width_that_does_not_fit_leaves_its_layers_as_they_are() -> None:
    model = build_model(from_tree(DecoderConfig, WIDE | {"ffn": {"kind": "mlp", "hidden": 40}}), seed=0)
    assert multiply_in_float8(model) == "8 of 14 linear layers in blocks multiply float8"
    block = model.blocks[0]
    assert block.attention.q.multiply is by_float8 and block.ffn.down.multiply is product


@pytest.mark.parametrize(("how", "products"), [("none", 42), ("block", 56), ("selective", 42)])
def test_products_are_computed_again_only_where_nothing_is_kept(how: Recomputed, products: int) -> None:
    """14 layers, 3 products each; of them `block` runs the forward's again."""
    model, ids = build_model(from_tree(DecoderConfig, WIDE), seed=0), torch.randint(0, 97, (1, 16))
    multiply_in_float8(model)
    model.recomputes(Recompute(how))
    with torch.autocast("cpu", torch.bfloat16), Calls() as calls:
        sums: LossSums = model(Batch(ids), read=causal_reader(ids))
        sums.total.backward()
    assert calls.of({"aten::_scaled_mm"}) == products


def test_the_kernel_is_given_rows_and_columns_as_a_gpu_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's takes any order. The gradient of a row is transposed here, as a convolution leaves it."""
    orders, kernel = [], torch._scaled_mm

    def looked_at(a: torch.Tensor, b: torch.Tensor, **given: Any) -> torch.Tensor:
        orders.append((a.stride(), b.stride()) == ((a.shape[1], 1), (1, b.shape[0])))
        return kernel(a, b, **given)

    monkeypatch.setattr(torch, "_scaled_mm", looked_at)
    x, weight = torch.randn(1, 64, 32).bfloat16().requires_grad_(), torch.randn(48, 32, requires_grad=True)
    out = by_float8(x, weight)
    out.backward(torch.randn(1, 48, 64).bfloat16().transpose(1, 2))
    assert orders == [True] * 3


def test_a_gpu_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"trainer\.float8=true: NVIDIA A100 has no such products"):
        require_float8()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    require_float8()


@pytest.mark.slow
def test_a_run_multiplies_so_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for chosen in ("true", "false"):
        given = [f"run.dir={tmp_path}", f"run.name={chosen}", "debug=fast", "trainer.precision=bf16-mixed", f"trainer.float8={chosen}"]
        lm.train(lm.config(overrides=[*given, "model=micro", "model.ffn.hidden=250", "data.seq_len=32", "trainer.val_every=4"]))
        losses.append([line["loss"] for line in Metrics(tmp_path / chosen / "metrics.jsonl").read() if "loss" in line])
    assert "12 of 21 linear layers in blocks multiply float8" in capsys.readouterr().out
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.02)


def test_no_layer_that_fits_is_one_sentence() -> None:
    model = build_model(from_tree(DecoderConfig, WIDE | {"d_model": 24, "attention": {"kind": "gqa", "n_heads": 2}}))
    with pytest.raises(ConfigError, match="multiples of 16"):
        multiply_in_float8(model)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "trainer.precision=bf16-mixed"),
        (["trainer.precision=bf16-mixed", "objective=dpo", "data=stdlib_preferences"], "objective=dpo"),
        (["trainer.precision=bf16-mixed", "strategy=fsdp", "launch.devices=2", "launch.tensor=2"], "launch.tensor=1"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(["trainer.float8=true", *overrides]).config()
    assert "trainer.float8=true: " in str(refused.value) and said in str(refused.value)


def test_an_adapter_beside_it_is_refused() -> None:
    config = compose(["trainer.float8=true", "trainer.precision=bf16-mixed"]).config()
    with pytest.raises(ConfigError, match=r"trainer\.float8=true: an adapter's parent"):
        config.replace(adapter=LoRAConfig(), init_from="runs/a")


def test_under_autocast_the_output_has_its_dtype() -> None:
    x, weight = torch.randn(2, 16, 32), torch.randn(48, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert by_float8(x, weight, torch.zeros(48)).dtype == torch.bfloat16
