"""The slots of a block: one tagged union each. A new kind is one line here, one file's worth of mechanism, one yaml, one test."""

from typing import Annotated

from pydantic import Field

from lm.nn.block import ParallelConfig, SequentialConfig
from lm.nn.ffn.mlp import MLPConfig
from lm.nn.ffn.moe import MoEConfig
from lm.nn.mixers.gqa import GQAConfig
from lm.nn.mixers.mla import MLAConfig
from lm.nn.norm import LayerNormConfig, RMSNormConfig
from lm.nn.position.base import LearnedConfig, NoPositionConfig, SinusoidalConfig
from lm.nn.position.bias import AlibiConfig, T5RelativeConfig
from lm.nn.position.rope import RopeConfig

NormConfig = Annotated[RMSNormConfig | LayerNormConfig, Field(discriminator="kind")]
PositionConfig = Annotated[
    NoPositionConfig | LearnedConfig | SinusoidalConfig | RopeConfig | AlibiConfig | T5RelativeConfig, Field(discriminator="kind")
]
AttentionConfig = Annotated[GQAConfig | MLAConfig, Field(discriminator="kind")]
FFNConfig = Annotated[MLPConfig | MoEConfig, Field(discriminator="kind")]
BlockConfig = Annotated[SequentialConfig | ParallelConfig, Field(discriminator="kind")]
