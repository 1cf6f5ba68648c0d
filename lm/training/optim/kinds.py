"""The optimizers that there are: importing a module registers its kinds."""

from lm.training.optim import adafactor as adafactor
from lm.training.optim import adamw as adamw
from lm.training.optim import lion as lion
from lm.training.optim import muon as muon
from lm.training.optim import sgd as sgd
from lm.training.optim import soap as soap
from lm.training.optim.base import OptimConfig as OptimConfig
