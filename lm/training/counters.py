"""What a checkpoint carries beside weights and optimizer."""

from dataclasses import dataclass, field


@dataclass
class Counters:
    """The counters that a checkpoint carries beside weights and optimizer."""

    best_val_loss: float | None = None
    worse_validations: int = 0
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    save_s: float | None = None  # how long a save has held up the loop, the last one left out
    train_s: float = 0.0  # seconds spent stepping, over all resumes
    samples_bytes: int = 0  # length of samples.md
    recent_losses: list[float] = field(default_factory=list)  # what the next logged loss is compared with
    skipped: int = 0  # steps left out because they were not finite
    rolled_back: int = 0  # times
    rows_from: int = 0  # step n reads the rows of step n + this, since those before were left out
    device: str = ""  # what the steps run on
