"""Every option of `objective`: what is predicted, and which records, models and special tokens that takes."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lm.config import Config
from lm.data.config import Shape

ModelKind = Literal["decoder", "encoder", "encoder_decoder"]


class ObjectiveBase(Config):
    """What every objective shares."""

    models: ClassVar[tuple[ModelKind, ...]]
    shapes: ClassVar[tuple[Shape, ...]] = ("text",)

    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Part of the target mass spread evenly over the vocabulary (Szegedy et al. 2015, arXiv:1512.00567)."""
    z_loss: float = Field(0.0, ge=0)
    """Factor on the mean of log(Z)^2, which keeps logits small (Chowdhery et al. 2022, arXiv:2204.02311, section 5)."""
    chunk: int = Field(1024, gt=0)
    """Tokens whose logits exist at once."""

    def specials(self) -> tuple[str, ...]:
        """Special tokens that a tokenizer made for this objective needs beside bos, eos and pad."""
        return ()

    def require_fit(self, name: str, model: str, shape: Shape) -> None:
        """ValueError where this objective cannot train such a model, or not on such records."""
        if model not in self.models:
            raise ValueError(
                f"objective={name} trains model.kind={' or '.join(self.models)}, and model.kind={model}. Choose another model or objective."
            )
        if shape not in self.shapes:
            raise ValueError(
                f"objective={name} needs records of the kind {' or '.join(self.shapes)}, and those of data are of the kind {shape}."
                " Choose other data or another objective, or set data.record."
            )


class CausalConfig(ObjectiveBase):
    """Predict the next token."""

    models: ClassVar[tuple[ModelKind, ...]] = ("decoder",)

    kind: Literal["causal"] = "causal"


class MLMConfig(ObjectiveBase):
    """Predict masked tokens from both sides. Devlin et al. 2018, arXiv:1810.04805, section 3.1."""

    models: ClassVar[tuple[ModelKind, ...]] = ("encoder",)

    kind: Literal["mlm"] = "mlm"
    mask_frac: float = Field(0.15, gt=0, lt=1)
    """Part of the tokens that are predicted."""
    hidden_frac: float = Field(0.8, ge=0, le=1)
    """Part of those that are shown as the mask token."""
    random_frac: float = Field(0.1, ge=0, le=1)
    """Part of those that are shown as another token; the rest is shown as it is."""
    whole_words: bool = False
    """All tokens of a word are predicted, or none; needs a byte-level tokenizer."""

    def specials(self) -> tuple[str, ...]:
        return ("<|mask|>",)


class Seq2SeqConfig(ObjectiveBase):
    """Predict a target from its source. Sutskever et al. 2014, arXiv:1409.3215; Vaswani et al. 2017, arXiv:1706.03762."""

    models: ClassVar[tuple[ModelKind, ...]] = ("encoder_decoder",)
    shapes: ClassVar[tuple[Shape, ...]] = ("pair",)

    kind: Literal["seq2seq"] = "seq2seq"
    target_len: int | None = Field(None, gt=1)
    """Longest target in tokens, at most data.seq_len, which bounds the source; longer ones are cut and counted. null: data.seq_len."""


ObjectiveConfig = Annotated[CausalConfig | MLMConfig | Seq2SeqConfig, Field(discriminator="kind")]


def usual(model: ModelKind) -> ObjectiveConfig:
    """What models of this kind are mostly trained for."""
    found: dict[ModelKind, ObjectiveConfig] = {"decoder": CausalConfig(), "encoder": MLMConfig(), "encoder_decoder": Seq2SeqConfig()}
    return found[model]
