"""A metric: how large the weights are, by which one sees decay and growth balance.  Kosson et al. 2023, arXiv:2305.17212.

lm train plugins=examples/plugins/weight_rms.py +metrics.rms.kind=weight_rms 'metrics.rms.names=*.ffn.*'
"""

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from lm.kinds import ConfigError, MetricConfig

if TYPE_CHECKING:
    from lm.kinds import TrainModule


class WeightRMSConfig(MetricConfig):
    """The root of the mean square of all weights whose names fit a pattern."""

    kind: Literal["weight_rms"] = "weight_rms"
    names: str = "*"
    """Pattern over the names of weights, as in `lm show`."""

    def build(self) -> "WeightRMS":
        return WeightRMS(self.names)


class WeightRMS:
    """Each rank has all weights with strategy=single and ddp; with others it tells of its own part."""

    def __init__(self, names: str) -> None:
        self.names = names

    def __call__(self, trainer: Any, module: "TrainModule") -> dict[str, float]:
        chosen: list[Tensor] = [p for name, p in module.model.named_parameters() if fnmatchcase(name, self.names)]
        if not chosen:
            raise ConfigError(f"metrics: weight_rms finds no weight with a name like '{self.names}'. `lm show` lists them.")
        squares = sum(float(p.detach().float().square().sum()) for p in chosen)
        return {f"weight_rms/{self.names}": (squares / sum(p.numel() for p in chosen)) ** 0.5}
