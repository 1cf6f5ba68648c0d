"""The kinds of `data`, `tokenizer` and `objective`, imported so that each is registered. A new kind is one line here."""

from lm.data.config import DataConfig, SourceConfig
from lm.data.environments.base import EnvironmentConfig
from lm.data.environments.retry import RetryConfig
from lm.data.layout.mixed import MixConfig
from lm.data.records.alike import AlikeRecord
from lm.data.records.base import RecordConfig
from lm.data.records.chat import ChatRecord
from lm.data.records.label import LabelRecord
from lm.data.records.pair import PairRecord
from lm.data.records.preference import PreferenceRecord
from lm.data.records.prompt import PromptRecord
from lm.data.records.rated import RatedRecord
from lm.data.rewards.base import Answer, RewardConfig
from lm.data.rewards.compiles import CompilesReward
from lm.data.rewards.model import LearnedReward
from lm.data.rows.base import ObjectiveConfig
from lm.data.rows.causal import CausalConfig
from lm.data.rows.classify import ClassifyConfig
from lm.data.rows.contrastive import ContrastiveConfig
from lm.data.rows.denoising import SpansConfig, UL2Config
from lm.data.rows.diffusion import DiffusionConfig
from lm.data.rows.fim import FIMConfig
from lm.data.rows.mlm import MLMConfig
from lm.data.rows.policy import GKDConfig, GRPOConfig, RLOOConfig
from lm.data.rows.preference import APOConfig, DPOConfig, IPOConfig, ORPOConfig, SimPOConfig
from lm.data.rows.prefix import PrefixConfig
from lm.data.rows.rated import KTOConfig
from lm.data.rows.reward import RewardModelConfig
from lm.data.rows.seq2seq import Seq2SeqConfig
from lm.data.rows.sft import SFTConfig
from lm.data.rows.targets import MultiLabelConfig, RegressionConfig
from lm.data.sources.arithmetic import ArithmeticConfig
from lm.data.sources.docstrings import StdlibDocstringsConfig
from lm.data.sources.files import TextConfig
from lm.data.sources.hub import HubConfig
from lm.data.sources.mqar import MQARConfig
from lm.data.sources.stdlib import StdlibConfig
from lm.data.tokenizer.config import BPEConfig, BytesConfig, TokenizerConfig, TokenizerFileConfig, UnigramConfig, WordPieceConfig
from lm.nn.model_config import ModelConfig
from lm.schema import Config


class Corpus(Config):
    """What decides the rows of a training run."""

    data: DataConfig
    tokenizer: TokenizerConfig
    objective: ObjectiveConfig


class RowsOf(Corpus):
    """What decides the rows as a model gets them."""

    model: ModelConfig
    init_from: str | None = None
    seed: int | dict[str, int] = 0
    """Of what an objective draws of its rows; of several seeds, that of the data."""

    @property
    def drawn_by(self) -> int:
        """Returns that seed."""
        return self.seed if isinstance(self.seed, int) else self.seed.get("data", 0)

    def reader(self) -> ModelConfig | None:
        """Returns the model where the rows are told for it: the one that training starts from, an encoder-decoder, or a classifier. None
        where any model that the objective trains will do."""
        told = self.init_from is not None or self.model.kind == "encoder_decoder" or self.objective.reads_model
        return self.model if told else None


__all__ = [
    "APOConfig", "AlikeRecord", "Answer", "ArithmeticConfig", "BPEConfig", "BytesConfig", "CausalConfig", "ChatRecord", "ClassifyConfig",
    "CompilesReward", "ContrastiveConfig", "Corpus", "DPOConfig", "DataConfig", "DiffusionConfig", "EnvironmentConfig", "FIMConfig",
    "GKDConfig", "GRPOConfig", "HubConfig", "IPOConfig", "KTOConfig", "LabelRecord", "LearnedReward", "MLMConfig", "MQARConfig",
    "MixConfig", "MultiLabelConfig", "ORPOConfig", "ObjectiveConfig", "PairRecord", "PreferenceRecord", "PrefixConfig", "PromptRecord",
    "RLOOConfig", "RatedRecord", "RecordConfig", "RegressionConfig", "RetryConfig", "RewardConfig", "RewardModelConfig", "RowsOf",
    "SFTConfig", "Seq2SeqConfig", "SimPOConfig", "SourceConfig", "SpansConfig", "StdlibConfig", "StdlibDocstringsConfig", "TextConfig",
    "TokenizerConfig", "TokenizerFileConfig", "UL2Config", "UnigramConfig", "WordPieceConfig",
]  # fmt: skip
