"""Everything that a kind of one's own is written with; what stands here is documented, and nothing else of lm need be imported.

    from lm.kinds import NormConfig

docs/plugins.md says for each slot what to answer, and `python -m lm.testing` whether the answers hold.
"""

from typing import TYPE_CHECKING, Any

from lm.data.kinds import (
    Answer,
    CausalConfig,
    DataConfig,
    DPOConfig,
    EnvironmentConfig,
    MLMConfig,
    ObjectiveConfig,
    RecordConfig,
    RewardConfig,
    SourceConfig,
    TokenizerConfig,
)
from lm.data.layout.windows import PADDING
from lm.data.order import Ids, uniforms
from lm.data.records.chat import ChatRecord
from lm.data.records.pair import PairRecord
from lm.data.records.preference import PreferenceRecord
from lm.data.rows.base import LikelihoodConfig, Material, Rows
from lm.data.rows.causal import CausalRows
from lm.data.rows.packed import PackedRows
from lm.data.sources.base import Document, Source, Turn, document, turns_document
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.losses.cross_entropy import LossSums
from lm.losses.measure import Measure
from lm.losses.tokens import causal_reader
from lm.nn.activation_memory import Activations
from lm.nn.batch import IGNORED, Batch
from lm.nn.block_base import BlockConfig
from lm.nn.context import Context
from lm.nn.ffn.base import FFNConfig
from lm.nn.ffn.mlp import MLPConfig
from lm.nn.head import Head
from lm.nn.init import Declares, InitContext
from lm.nn.linear import Linear, Out
from lm.nn.mixers.base import AttentionConfig, Mixer, RecurrentConfig
from lm.nn.mixers.gqa import GQAConfig
from lm.nn.mixers.grouped import GQA
from lm.nn.norm import NormConfig, RMSNormConfig
from lm.nn.parametrization import Growth, ParametrizationConfig
from lm.nn.parts import BlockParts
from lm.nn.position.base import Angles, Dims, Position, PositionConfig
from lm.nn.position.rope import Rope, RopeConfig
from lm.nn.transformer import LM
from lm.ops.attention.mask import Mask
from lm.ops.cache.cache import Cache, Fixed, PerToken
from lm.schema import Config, Slot
from lm.training.callbacks.kinds import CallbackConfig, MetricConfig
from lm.training.callbacks.loggers import Logger, LoggerConfig
from lm.training.config import TrainConfig
from lm.training.objectives.base import Objective, loss_of
from lm.training.optim.base import Group, NamedWeights, OptimConfig, Skippable, decaying, grouped, momentum_state
from lm.training.optim.schedule import ScheduleConfig
from lm.training.optim.traits import Traits

if TYPE_CHECKING:
    from lm.training.callbacks.base import RunCallback
    from lm.training.module import TrainModule

__all__ = [
    "GQA", "IGNORED", "LM", "PADDING", "Activations", "Angles", "Answer", "AttentionConfig", "Batch", "BlockConfig", "BlockParts", "Cache",
    "CallbackConfig", "CausalConfig", "CausalRows", "ChatRecord", "Config", "ConfigError", "Context", "DPOConfig", "DataConfig", "Declares",
    "Dims", "Document", "EnvironmentConfig", "FFNConfig", "Fixed", "GQAConfig", "Group", "Growth", "Head", "Ids", "InitContext",
    "LikelihoodConfig", "Linear", "Logger", "LoggerConfig", "LossSums", "MLMConfig", "MLPConfig", "Mask", "Material", "Measure",
    "MetricConfig", "Mixer", "NamedWeights", "NormConfig", "Objective", "ObjectiveConfig", "OptimConfig", "Out", "PackedRows", "PairRecord",
    "ParametrizationConfig", "PerToken", "Position", "PositionConfig", "PreferenceRecord", "RMSNormConfig", "RecordConfig",
    "RecurrentConfig", "RewardConfig", "Rope", "RopeConfig", "Rows", "RunCallback", "ScheduleConfig", "Skippable", "Slot", "Source",
    "SourceConfig", "Tokenizer", "TokenizerConfig", "TrainConfig", "TrainModule", "Traits", "Turn", "causal_reader", "decaying", "document",
    "grouped", "loss_of", "momentum_state", "turns_document", "uniforms",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What brings Lightning along is imported when it is asked for."""
    if name == "RunCallback":
        from lm.training.callbacks.base import RunCallback

        return RunCallback
    if name == "TrainModule":
        from lm.training.module import TrainModule

        return TrainModule
    raise AttributeError(f"module 'lm.kinds' has no attribute '{name}'")
