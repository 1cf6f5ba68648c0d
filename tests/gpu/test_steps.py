"""Training on a GPU: as on the CPU, compiled as eager, in bf16 nearly as in fp32, and without waiting for the device in a step."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.cli.compose.compose import compose_config
from lm.data.loader import TrainLoader
from lm.data.rows.causal import CausalConfig
from lm.data.rows.preference import DPOConfig
from lm.losses.measure import Reference, Start
from lm.nn.batch import Batch
from lm.nn.transformer import LM, build_model
from lm.training.config import TrainConfig
from lm.training.module import TrainModule
from lm.training.objectives.base import Objective
from lm.training.objectives.likelihood import Likelihood
from lm.training.objectives.preferences import Preferences
from lm.training.run import train_rank
from tests.training.conftest import TINY, read, write_text
from tests.training.steps import ADAMW, SGD, STEPS, batches, config, held_and_read_again, train_steps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MUON: dict[str, Any] = {"kind": "muon", "lr": 0.02, "clip": 1.0}
SOAP: dict[str, Any] = {"kind": "soap", "lr": 0.003, "clip": 1.0}
LION: dict[str, Any] = {"kind": "lion", "lr": 3e-4, "clip": 1.0}
ADAFACTOR: dict[str, Any] = {"kind": "adafactor", "lr": 0.01, "clip": 1.0}
LENGTH = 160  # more than one block of FlexAttention


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("attention", [{}, {"window": 9, "global_every": 2, "softcap": 20.0}], ids=["full", "windows and soft-cap"])
def test_steps_on_the_gpu_equal_those_on_the_cpu(documents: bool, attention: dict[str, Any]) -> None:
    cfg, rows = config(SGD, LENGTH, **attention), batches(LENGTH, documents=documents)
    expected, weights = train_steps(cfg, rows)
    found, moved = train_steps(cfg, rows, accelerator="cuda")
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    torch.testing.assert_close(moved, weights, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("documents", [False, True])
def test_compiled_steps_equal_eager_ones(documents: bool) -> None:
    cfg, rows = config(SGD, LENGTH, window=9, global_every=2), batches(LENGTH, documents=documents)
    expected, weights = train_steps(cfg, rows, accelerator="cuda")
    found, compiled = train_steps(cfg, rows, accelerator="cuda", compile=True)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    torch.testing.assert_close(compiled, weights, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_losses_are_close_to_fp32(precision: str, compiled: bool) -> None:
    cfg, rows = config(ADAMW, LENGTH, window=9, global_every=2), batches(LENGTH, documents=True)
    expected, _ = train_steps(cfg, rows, accelerator="cuda")
    found, _ = train_steps(cfg, rows, accelerator="cuda", precision=precision, compile=compiled)
    assert found["loss"] == pytest.approx(expected["loss"], rel=2e-2)
    assert found["bad_step"] == [-1.0] * STEPS


class Watched(TrainModule):
    """From the second step on, whatever waits for the device between a batch's arrival and the end of its step raises."""

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        torch.cuda.set_sync_debug_mode("error" if self.step > 0 else "default")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optim", [ADAMW, SGD, MUON, ADAFACTOR, LION], ids=["adamw", "sgd", "muon", "adafactor", "lion"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_never_waits_for_the_device(optim: dict[str, Any], compiled: bool) -> None:
    cfg, rows = config(optim, LENGTH, window=9, global_every=2), batches(LENGTH, documents=True)
    record, _ = train_steps(cfg, rows, kind=Watched, accelerator="cuda", compile=compiled)
    assert len(record["loss"]) == STEPS


def other(cfg: TrainConfig) -> Callable[[], LM]:
    return lambda: build_model(cfg.model, seed=2).requires_grad_(False)


COMPARED: dict[str, Callable[[TrainConfig], Objective]] = {
    "preferences": lambda cfg: Preferences(DPOConfig(), Start(other(cfg))),
    "teacher": lambda cfg: Likelihood(CausalConfig(chunk=100, teacher="there", teacher_temperature=2.0), Reference(other(cfg))),
    "z-loss and smoothing": lambda cfg: Likelihood(CausalConfig(chunk=100, z_loss=1e-3, label_smoothing=0.1)),
}


@pytest.mark.parametrize("name", COMPARED)
def test_what_a_step_compares_with_is_that_of_the_cpu_and_never_waited_for(name: str) -> None:
    class Own(Watched):
        def __init__(self, cfg: TrainConfig, *given: Any) -> None:
            super().__init__(cfg, *given)
            self.objective = COMPARED[name](cfg)

    class OnCPU(Own):
        transfer_batch_to_device = TrainModule.transfer_batch_to_device

    cfg, rows = config(SGD, LENGTH), batches(LENGTH, documents=True)
    expected, weights = train_steps(cfg, rows, kind=OnCPU)
    found, moved = train_steps(cfg, rows, kind=Own, accelerator="cuda")
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    torch.testing.assert_close(moved, weights, atol=1e-4, rtol=1e-3)
    compiled, _ = train_steps(cfg, rows, kind=Own, accelerator="cuda", compile=True, precision="bf16-mixed")
    assert compiled["loss"] == pytest.approx(expected["loss"], rel=3e-2)


def test_texts_are_read_again_with_the_dropout_that_they_had() -> None:
    """torch sets the generator of a GPU back that it finds among a block's inputs."""
    torch.testing.assert_close(*held_and_read_again("cuda"))


def test_a_loader_gives_the_same_batches_in_pinned_memory() -> None:
    rows = batches(LENGTH, documents=True)
    for plain, pinned in zip(rows, TrainLoader([rows], range(1), len(rows), workers=0, pinned=True), strict=True):  # type: ignore[arg-type]
        moved = pinned.to(torch.device("cuda"))
        for name in ("tokens", "labels", "positions", "documents"):
            assert getattr(pinned, name).is_pinned() and torch.equal(getattr(moved, name).cpu(), getattr(plain, name))


def waited_s() -> float:
    steps: Any = [batches(LENGTH)]
    loader = TrainLoader(steps, range(1), 8, workers=0, pinned=True)
    assert next(iter(loader)).tokens.is_pinned()
    return loader.waited_s


def test_a_gpu_that_still_computes_does_not_wait_for_batches() -> None:
    torch.cuda.synchronize()
    assert waited_s() > 0  # pinned memory is made, for which a GPU may have to stop; from now on it is there
    torch.cuda._sleep(1 << 32)  # cycles: seconds
    assert waited_s() == 0
    torch.cuda.synchronize()


class Poisoned(TrainModule):
    """The loss is not a number in step 2."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.step == 2 else loss


@pytest.mark.parametrize("optim", [ADAMW, SGD, MUON, SOAP, ADAFACTOR, LION], ids=["adamw", "sgd", "muon", "soap", "adafactor", "lion"])
def test_no_step_is_taken_from_the_first_that_is_not_finite_on(optim: dict[str, Any]) -> None:
    cfg, rows = config(optim), batches()
    record, weights = train_steps(cfg, rows, kind=Poisoned, accelerator="cuda")
    assert record["bad_step"] == [-1.0, -1.0, 2.0, 2.0]
    _, expected = train_steps(cfg, rows, accelerator="cuda", steps=2)
    torch.testing.assert_close(weights, expected, atol=5e-4, rtol=1e-3)  # a step moves weights by ten times as much


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_a_run_on_the_gpu_trains_validates_and_saves(tmp_path: Path, precision: str) -> None:
    text = write_text(tmp_path / "text.txt")
    where = [f"run.dir={tmp_path}", f"data.files={text}", f"data.cache_dir={tmp_path / 'cache'}"]
    on_gpu = ["trainer.device=cuda", f"trainer.precision={precision}", "trainer.compile=true", "model.attention.window=8"]
    summary = train_rank(compose_config([*TINY, *where, *on_gpu, "trainer.max_steps=12", "trainer.sample_prompts=[def]"]))
    lines = read(tmp_path / "run" / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 12 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    assert all(line["memory_gib"] > 0 for line in lines if "loss" in line)
    assert summary["device"] == torch.cuda.get_device_name() and math.isfinite(summary["val_loss"])
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
