"""The config of what becomes of tokens before the first block."""

from pydantic import Field

from lm.nn.activation_memory import Activations, sum_activations
from lm.nn.factorized import FactorizedConfig
from lm.nn.mixers.token_values import TABLE
from lm.nn.ngrams import NGramsConfig
from lm.nn.per_layer import LAYERS_TABLE, PerLayerConfig
from lm.nn.smear import SmearConfig
from lm.schema import MOST, Config

OF_TOKENS = ("embed.weight", TABLE, LAYERS_TABLE)
"""How the names of the weights end of which each token of the vocabulary has a row."""
TABLES = (*OF_TOKENS, "ngrams.table.weight")
"""How the names of the weights end whose rows are looked up by tokens."""


class EmbedConfig(Config):
    """From token ids to the residual stream."""

    scale: float = Field(1.0, gt=0)
    """Factor on token embeddings (sqrt(d_model) in Vaswani et al. and Gemma)."""
    factorized: FactorizedConfig | None = None
    """They are narrower than the model. null: of d_model numbers."""
    norm: bool = False
    """A norm follows (BERT, BART, BLOOM)."""
    segments: int | None = Field(None, gt=0, le=MOST)
    """Learned vectors for this many segments are added (BERT). null: none."""
    smear: SmearConfig | None = None
    """What becomes of it is mixed with the token before. null: it is not."""
    ngrams: NGramsConfig | None = None
    """Vectors for tokens together with those before are added. null: none."""
    per_layer: PerLayerConfig | None = None
    """Each layer reads a vector of its own of each token. null: none does."""
    noise: float = Field(0.0, ge=0)
    """In training each number of a token's embedding has noise added, of at most this over the root of how many numbers its row has: 5 to
    15 in NEFTune (Jain et al. 2023, arXiv:2310.05914). 0: none."""

    def token_width(self, d_model: int) -> int:
        """Returns how many numbers a token's embedding has."""
        return d_model if self.factorized is None else self.factorized.width

    def sum_width(self, d_model: int) -> int:
        """Returns how many numbers the sum with positions and segments has."""
        return d_model if self.factorized is None or self.factorized.widened == "tokens" else self.factorized.width

    def require(self, kind: str, block: str, residual: str, drafts: bool, d_model: int, parametrization: str) -> None:
        """Raises ValueError where parts do not fit the model.  kind, block, residual, parametrization: their kinds; drafts: mtp has
        blocks."""
        if self.smear is not None and self.smear.channels > d_model:
            raise ValueError(f"embed.smear.channels={self.smear.channels} is above d_model={d_model}. Lower it.")
        if self.per_layer is not None:
            self.per_layer.require(kind, block, residual, drafts)
        if self.factorized is None:
            return
        if drafts:
            raise ValueError("embed.factorized narrows what blocks of mtp read at d_model numbers. Set mtp=null, or factorized=null.")
        if self.ngrams is not None and self.factorized.widened == "sum":
            raise ValueError("embed.ngrams adds d_model numbers to a token's, which widened=sum leaves narrow. Use widened=tokens.")
        if parametrization != "standard":
            raise ValueError(f"embed.factorized has no rates and initial weights of parametrization={parametrization}. Leave one out.")

    def why_not_context_parallel(self) -> str | None:
        """Returns why ranks cannot hold a row in slices, with the remedy; None where they can."""
        for name in ("smear", "ngrams"):
            if getattr(self, name) is not None:
                return f"model.embed.{name} reads the token before, maybe another rank's. Set model.embed.{name}=null"
        if self.noise:
            return "model.embed.noise depends on the length of a row, of which a rank has a slice. Set model.embed.noise=0"
        return None

    def flops(self, d_model: int) -> int:
        """Returns the FLOPs of one token behind the lookup."""
        return sum(part.flops(d_model) for part in (self.smear, self.ngrams) if part is not None)

    def saved_activations(self, d_model: int) -> Activations:
        """Returns what autograd saves of one token behind the embedding."""
        found = [Activations(self.sum_width(d_model) if self.norm else 0, 0)]
        if self.factorized is not None:
            found.append(Activations(0, self.factorized.width))
        if self.smear is not None:
            found.append(self.smear.saved_activations(d_model))
        return sum_activations(found)
