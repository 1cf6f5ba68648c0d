"""The one linear layer with a meaning of its own."""

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from lm.nn.init import Declares, Draw, into_residual


class Out(Declares, nn.Linear):
    """A projection that writes to the residual stream; it starts scaled by depth."""

    drawn: ClassVar[Mapping[str, Draw]] = {"weight": into_residual}
