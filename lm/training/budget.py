"""The assumptions behind a plan's time and cost: the GPU, the part of its peak that training reaches (MFU), and its price."""

from typing import Self

from pydantic import Field, model_validator

from lm.schema import Config

# Dense bf16 FLOP/s with fp32 accumulation, by words that the device name must contain; the first match counts. NVIDIA's data sheets
# (half of what they print "with sparsity"): A100, H100, H200, GH200, HGX B200, L4, L40, L40S, A10; for GeForce and RTX A cards
# the tables of the GA102, Ada and RTX Blackwell architecture white papers.
_PEAKS = (
    ("B200", 2250e12),
    ("GH200", 990e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A10", 125e12),
    ("A6000", 154.8e12),
    ("5090", 209.5e12),
    ("4090", 165.2e12),
    ("3090", 71e12),
)


def peak_flops(device_name: str) -> float | None:
    """Returns the dense bf16 FLOP/s of a GPU by its CUDA name; None where unknown, so that no wrong utilisation is shown."""
    words = set(device_name.replace("-", " ").split())
    if words & {"Laptop", "D", "MIG", "Ti"}:
        return None
    return next((peak for name, peak in _PEAKS if set(name.split()) <= words), None)


class BudgetConfig(Config):
    """What plan=true reckons time and cost by."""

    gpu: str | None = None
    """Name of the GPU, such as H100, whose peak is known. null: the one here."""
    mfu: float = Field(0.4, gt=0, le=1)
    """Part of its peak that the model's own arithmetic will take."""
    price: float | None = Field(None, gt=0)
    """What an hour of one GPU costs. null: hours alone are told."""

    @model_validator(mode="after")
    def _peak_is_known(self) -> Self:
        if self.gpu is not None and peak_flops(self.gpu) is None:
            raise ValueError(f"gpu={self.gpu} has no known peak. Choose one of {', '.join(name for name, _ in _PEAKS)}.")
        return self
