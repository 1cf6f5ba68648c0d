"""The kinds of the slots of a block, imported so that each is registered. A new kind is one line here."""

from lm.nn.block import BlockConfig, ParallelConfig, SequentialConfig
from lm.nn.ffn.base import FFNConfig
from lm.nn.ffn.mlp import MLPConfig
from lm.nn.ffn.moe import MoEConfig
from lm.nn.mixers.base import AttentionConfig, RecurrentConfig
from lm.nn.mixers.gqa import GQAConfig
from lm.nn.mixers.mla import MLAConfig
from lm.nn.mixers.short_conv import ShortConvConfig
from lm.nn.norm import LayerNormConfig, NormConfig, RMSNormConfig
from lm.nn.position.absolute import LearnedConfig, NoPositionConfig, SinusoidalConfig
from lm.nn.position.base import PositionConfig
from lm.nn.position.bias import AlibiConfig, T5RelativeConfig
from lm.nn.position.rope import RopeConfig

__all__ = [
    "AlibiConfig", "AttentionConfig", "BlockConfig", "FFNConfig", "GQAConfig", "LayerNormConfig", "LearnedConfig", "MLAConfig", "MLPConfig",
    "MoEConfig", "NoPositionConfig", "NormConfig", "ParallelConfig", "PositionConfig", "RMSNormConfig", "RecurrentConfig", "RopeConfig",
    "SequentialConfig", "ShortConvConfig", "SinusoidalConfig", "T5RelativeConfig",
]  # fmt: skip
