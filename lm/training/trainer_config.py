"""The training loop: its length, its cadence, precision and device."""

from typing import Literal, Self

from pydantic import Field, model_validator

from lm.nn.activation_memory import Precision
from lm.ops.recompute import Recompute, Recomputed
from lm.schema import MOST, Config, MaybeEmpty


class TrainerConfig(Config):
    """The loop: length, cadence, precision, device."""

    recompute: Recomputed = "none"
    """What blocks compute again for the backward instead of keeping it (activation checkpointing). block: all but their input; selective:
    all but their input, matrix products and fused attention."""
    recompute_every: int = Field(1, gt=0)
    """Every n-th block does so."""
    max_steps: int = Field(gt=0)
    """Optimizer steps in all. A text such as 3epochs or 10Mtokens is counted in steps before the run starts."""
    max_minutes: float | None = Field(None, gt=0)
    """Minutes of stepping, validations and saves left out, that end a run before max_steps do; the rate decays in time. null: no limit."""
    micro_batch: int = Field(8, gt=0, le=MOST)
    """Most rows per forward and rank; accumulation is derived."""
    val_every: int = Field(100, gt=0)
    """Steps between validations, or a text such as 10%; the last step always validates."""
    log_every: int = Field(10, gt=0)
    """Steps between lines of metrics."""
    precision: Precision = "fp32"
    """fp32; bf16 compute on fp32 weights; bf16 weights too; fp16 compute, with a loss scale, for GPUs before Ampere, such as a T4."""
    float8: bool = False
    """Linear layers of blocks multiply float8 numbers, a scale for each tensor (in bf16; GPUs from H100 on, and slowly a CPU)."""
    compile: bool = False
    """torch.compile the blocks; those that are alike are compiled once."""
    deterministic: bool = True
    """On CUDA, sums are taken in a fixed order, so that a run repeats bit for bit. A CPU always does so, a Mac's GPU never. false: a little
    faster."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: CUDA where there is a GPU, else the CPU. mps: the GPU of a Mac, from torch 2.14 on; no test has run on one."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keep an exponential moving average of the weights; it is validated and exported. null: off."""
    early_stop: int | None = Field(None, gt=0)
    """Stop after this many validations without a better one, whose model checkpoint.best hands on. null: never."""
    freeze: list[str] = []
    """Weights that no step moves: patterns over their names, as in `lm show`, or parts of these: [embed, blocks.0, ffn, '*.bias']."""
    sample_prompts: list[MaybeEmpty] | Literal["held_out"] = []
    """Prompts continued at each validation into samples.md, or sources; in a run on chats, a user's messages, which are answered.
    held_out: how the first held-out documents begin, or, of chats, their questions; with the rewards, where the model learns from its own
    answers (grpo, rloo, gkd)."""
    sample_tokens: int = Field(64, gt=0, le=MOST)
    """Tokens per sample."""
    profile: int | None = Field(None, gt=0, le=100)
    """Steps that torch's profiler records, from the fourth of a process on: what takes their time, and a trace, in profile/. null: none."""

    @model_validator(mode="after")
    def _every_has_effect(self) -> Self:
        if self.recompute == "none" and self.recompute_every > 1:
            raise ValueError(f"recompute_every={self.recompute_every} has no effect with recompute=none. Set recompute=block or selective.")
        return self

    def recomputes(self) -> Recompute:
        """Returns what the model's blocks recompute."""
        return Recompute(self.recompute, self.recompute_every)
