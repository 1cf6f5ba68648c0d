"""The kinds of the slots of a block, imported so that each is registered. A new kind is one line here."""

from lm.nn.block import BlockConfig, ParallelConfig, SequentialConfig
from lm.nn.ffn.base import FFNConfig
from lm.nn.ffn.mlp import MLPConfig
from lm.nn.ffn.moe import MoEConfig
from lm.nn.mixers.base import AttentionConfig
from lm.nn.mixers.gqa import GQAConfig
from lm.nn.mixers.mla import MLAConfig
from lm.nn.norm import LayerNormConfig, NormConfig, RMSNormConfig
from lm.nn.position.base import LearnedConfig, NoPositionConfig, SinusoidalConfig
from lm.nn.position.bias import AlibiConfig, T5RelativeConfig
from lm.nn.position.config import PositionConfig
from lm.nn.position.rope import RopeConfig

__all__ = [
    "AlibiConfig", "AttentionConfig", "BlockConfig", "FFNConfig", "GQAConfig", "LayerNormConfig", "LearnedConfig", "MLAConfig", "MLPConfig",
    "MoEConfig", "NoPositionConfig", "NormConfig", "ParallelConfig", "PositionConfig", "RMSNormConfig", "RopeConfig", "SequentialConfig",
    "SinusoidalConfig", "T5RelativeConfig",
]  # fmt: skip
