"""The one linear layer with a meaning of its own."""

from torch import nn


class Out(nn.Linear):
    """A projection that writes to the residual stream; initialisation scales it by depth (lm/nn/init.py)."""
