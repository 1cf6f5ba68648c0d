"""What the options of DeepSpeed's kinds become, as DeepSpeed's own classes read it; and what is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.errors import ConfigError, LmError
from lm.training.run import train_rank
from lm.training.strategies import zero_config
from lm.training.strategies.zero_config import OLDEST, ZeroConfig
from tests.training.conftest import Configure, Launch, needs_deepspeed, ranks

ONE = ["optim=adamw", "data.global_batch=8"]


def understood(configure: Configure, *overrides: str) -> Any:
    """DeepSpeed's own reading. It refuses keys that it does not know."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    cfg = configure(*ONE, *overrides)
    assert isinstance(cfg.strategy, ZeroConfig)
    return DeepSpeedZeroConfig(**cfg.strategy.zero(cfg))


@needs_deepspeed
@pytest.mark.slow  # imports DeepSpeed
def test_the_defaults_are_those_of_deepspeed(configure: Configure) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for kind in ("zero1", "zero2", "zero3"):
        assert understood(configure, *ranks(kind)) == DeepSpeedZeroConfig(stage=int(kind[-1])), kind


@needs_deepspeed
@pytest.mark.slow  # imports DeepSpeed
def test_each_option_is_what_deepspeed_understands(configure: Configure, tmp_path: Path) -> None:
    sizes = ["strategy.reduce_bucket_size=11"]
    for kind in ("zero1", "zero2", "zero2_offload"):
        found = understood(configure, *ranks(kind), *sizes, "strategy.allgather_bucket_size=12")
        assert (found.reduce_bucket_size, found.allgather_bucket_size) == (11, 12)
    groups = ["strategy.prefetch_bucket_size=13", "strategy.sub_group_size=14", "strategy.persistence_threshold=15"]
    for kind in ("zero3", "zero3_offload"):
        found = understood(configure, *ranks(kind, 4), *sizes, *groups, "strategy.hpz_partition_size=2")
        assert (found.reduce_bucket_size, found.prefetch_bucket_size, found.sub_group_size) == (11, 13, 14)
        assert (found.param_persistence_threshold, found.zero_hpz_partition_size) == (15, 2)
        assert not found.zero_quantized_weights and not found.zero_quantized_gradients
    machines = ["launch.nodes=2", "launch.rendezvous=a:1", "trainer.device=auto"]
    found = understood(configure, *ranks("zero3"), *machines, "strategy.quantized=[weights,gradients]")
    assert found.zero_quantized_weights and found.zero_quantized_gradients
    assert understood(configure, *ranks("zero3_offload")).offload_optimizer.device == "cpu"
    filed = understood(configure, *ranks("zero3_offload"), f"strategy.nvme={tmp_path}").offload_optimizer
    other = understood(configure, *ranks("zero3_offload"), f"strategy.nvme={tmp_path}", "run.name=other").offload_optimizer
    assert filed.device == "nvme" and filed.nvme_path.parent == tmp_path and filed.nvme_path != other.nvme_path


@needs_deepspeed
@pytest.mark.slow  # imports DeepSpeed
def test_gradients_are_sent_in_the_dtype_that_the_kernels_of_quantized_ones_read(configure: Configure) -> None:
    from lm.training.strategies.zero3 import Zero3

    cfg = configure(*ONE, *ranks("zero3"), "launch.nodes=2", "launch.rendezvous=a:1", "trainer.device=auto")
    assert isinstance(cfg.strategy, ZeroConfig)
    for what, dtype in ((["weights"], None), (["gradients"], "fp16")):
        made = Zero3(cfg.strategy.replace(quantized=what).zero(cfg), None, True, 60).plugin.config
        assert made is not None and made.get("communication_data_type") == dtype


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [*ranks("zero3", 4), "strategy.hpz_partition_size=3"],
            "strategy=zero3: hpz_partition_size=3 does not divide the 4 ranks of launch. Choose a divisor.",
        ),
        (
            [*ranks("zero3"), "strategy.quantized=[weights]"],
            r"strategy=zero3: quantized=\[weights\] is rounded by CUDA kernels, and trainer.device=cpu. Leave it out.",
        ),
        (
            [*ranks("zero3"), "trainer.device=auto", "strategy.quantized=[gradients]"],
            r"quantized=\[gradients\] rounds what machines send each other, and launch.nodes=1. Leave it out.",
        ),
        ([*ranks("zero3"), "strategy.quantized=[biases]"], "strategy.quantized"),
        ([*ranks("zero3"), "strategy.nvme=/x"], "strategy.nvme"),
        ([*ranks("zero2"), "strategy.hpz_partition_size=2"], "strategy.hpz_partition_size"),
        ([*ranks("zero2"), "strategy.reduce_bucket_size=0"], "strategy.reduce_bucket_size"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused_by_the_config(configure: Configure, overrides: list[str], said: str) -> None:
    with pytest.raises(LmError, match=said):
        configure(*ONE, *overrides)


def test_a_missing_deepspeed_is_told_before_data_are_read(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to be told once every token was prepared."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # what Python itself sees of a package that is not installed
    with pytest.raises(ConfigError, match=r"strategy: kind=zero2 needs the package deepspeed. Run: pip install 'slotlm\[deepspeed\]'"):
        train_rank(configure(*ONE, *ranks("zero2")))
    assert not list(tmp_path.rglob("tokens"))


@needs_deepspeed
def test_a_deepspeed_that_overlooks_steps_that_are_not_finite_is_refused(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with 0.19.7: one rank's gradient was not finite, and no rank had a bad step to tell."""
    strategy = configure(*ONE, *ranks("zero1")).strategy
    strategy.require()
    monkeypatch.setattr(zero_config, "version", lambda name: "0.19.7")
    with pytest.raises(ConfigError, match=rf"kind=zero1 needs deepspeed {OLDEST} or newer, and 0.19.7 is installed. Run: pip install"):
        strategy.require()
    assert f'"deepspeed>={OLDEST}"' in (Path(__file__).parents[3] / "pyproject.toml").read_text()


@needs_deepspeed
@pytest.mark.slow  # imports DeepSpeed
def test_what_this_machine_lacks_is_told_before_the_engine_stands(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = configure(*ONE, *ranks("zero3_offload"), f"strategy.nvme={tmp_path / 'absent'}")
    with pytest.raises(ConfigError, match=r"strategy.nvme=\S+/absent is not a directory here, .* Make it."):
        absent.strategy.build(absent)
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self: False)  # as where there is no libaio
    here = configure(*ONE, *ranks("zero3_offload"), f"strategy.nvme={tmp_path}")
    with pytest.raises(ConfigError, match=r"strategy.nvme=\S+ is read by DeepSpeed's async_io, .* Install libaio-dev"):
        here.strategy.build(here)
    if not torch.cuda.is_available():
        rounded = configure(*ONE, *ranks("zero3"), "trainer.device=auto", "strategy.quantized=[weights]")
        with pytest.raises(ConfigError, match=r"strategy.quantized=\[weights\] is rounded by CUDA kernels, and there is no GPU"):
            rounded.strategy.build(rounded)


@needs_deepspeed
@pytest.mark.slow  # compiles what DeepSpeed has in C++
def test_no_start_waits_for_a_lock_that_a_killed_one_left(
    configure: Configure, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to hang: torch waits until a file is gone whose maker is."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    left = tmp_path / "built" / "deepspeed_shm_comm" / "lock"
    left.parent.mkdir(parents=True)
    left.touch()
    launch(configure(*ONE, *ranks("zero1"), "trainer.max_steps=3"))
    assert (left.parent / "deepspeed_shm_comm.so").exists() and not left.exists()
