"""Every option of `objective`: what is predicted, and which records, models and special tokens that takes."""

from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from lm.config import Slot
from lm.data.config import DataConfig, Shape

ModelKind = Literal["decoder", "encoder", "encoder_decoder"]


class ObjectiveConfig(Slot, group="objective"):
    """What every objective shares."""

    models: ClassVar[tuple[ModelKind, ...]]
    shapes: ClassVar[tuple[Shape, ...]] = ("text",)
    packings: ClassVar[tuple[str, ...]] = ("split",)
    """Those that it can be given, the usual one first."""
    needs_masked_documents: ClassVar[bool] = False
    needs_parent: ClassVar[bool] = False
    """Whether the loss compares with the model that training starts from."""

    def specials(self) -> tuple[str, ...]:
        """Special tokens that a tokenizer made for this objective needs beside bos, eos and pad."""
        return ()

    def require_fit(self, name: str, model: ModelKind, data: DataConfig) -> None:
        """ValueError where this objective cannot train such a model, or not on such data."""
        shape = data.shape
        if model not in self.models:
            raise ValueError(
                f"objective={name} trains model.kind={' or '.join(self.models)}, and model.kind={model}."
                f" Choose another model, or objective={usual(model).kind}."
            )
        if shape not in self.shapes:
            raise ValueError(
                f"objective={name} needs records of the kind {' or '.join(self.shapes)}, and those of data are of the kind {shape}."
                f" Choose other data, objective={' or '.join(trains(shape))}, or set data.record."
            )
        if data.packing not in (None, *self.packings):
            raise ValueError(
                f"objective={name} packs by {' or '.join(self.packings)}, and data.packing={data.packing}. Choose one of them."
            )
        if (self.needs_masked_documents or data.packing == "fit") and not data.mask_documents:
            name += "" if self.needs_masked_documents else " with data.packing=fit"
            raise ValueError(f"objective={name} takes each document on its own, and data.mask_documents=false. Set it to true.")


class LikelihoodConfig(ObjectiveConfig):
    """Objectives whose loss is the cross-entropy of labels."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Part of the target mass spread evenly over the vocabulary (Szegedy et al. 2015, arXiv:1512.00567)."""
    z_loss: float = Field(0.0, ge=0)
    """Factor on the mean of log(Z)^2, which keeps logits small (Chowdhery et al. 2022, arXiv:2204.02311, section 5)."""
    chunk: int = Field(1024, gt=0)
    """Tokens whose logits exist at once."""


class ScheduledSamplingConfig(LikelihoodConfig):
    """Objectives whose inputs may be the model's own."""

    scheduled_sampling: float = Field(0.0, ge=0, le=1)
    """Part of the decoder's inputs that the model itself draws at the last step, growing evenly from none at the first: scheduled
    sampling (Bengio et al. 2015, arXiv:1506.03099). It costs another forward."""


class CausalConfig(ScheduledSamplingConfig):
    """Predict the next token."""

    models: ClassVar[tuple[ModelKind, ...]] = ("decoder",)

    packings: ClassVar[tuple[str, ...]] = ("split", "fit")

    kind: Literal["causal"] = "causal"


class MLMConfig(LikelihoodConfig):
    """Predict masked tokens from both sides. Devlin et al. 2018, arXiv:1810.04805, section 3.1."""

    models: ClassVar[tuple[ModelKind, ...]] = ("encoder",)

    packings: ClassVar[tuple[str, ...]] = ("split", "fit")

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


class PrefixConfig(LikelihoodConfig):
    """Predict the rest of each document from a beginning of random length that is seen from all sides. Raffel et al. 2019, section 3.2."""

    models: ClassVar[tuple[ModelKind, ...]] = ("decoder",)

    packings: ClassVar[tuple[str, ...]] = ("split", "fit")

    kind: Literal["prefix"] = "prefix"


class FIMConfig(LikelihoodConfig):
    """Predict the next token of documents whose middle was moved to the end. Bavarian et al. 2022, arXiv:2207.14255."""

    models: ClassVar[tuple[ModelKind, ...]] = ("decoder",)
    packings: ClassVar[tuple[str, ...]] = ("split", "fit")
    needs_masked_documents: ClassVar[bool] = True

    kind: Literal["fim"] = "fim"
    rate: float = Field(0.5, ge=0, le=1)
    """Part of the documents that are rearranged."""
    suffix_first: float = Field(0.5, ge=0, le=1)
    """Part of those in which the suffix comes before the prefix (SPM)."""

    def specials(self) -> tuple[str, ...]:
        return ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


class Denoiser(NamedTuple):
    """mean_span None: the end of the text is taken out, noise_frac of it on average."""

    mode: str
    noise_frac: float
    mean_span: float | None


class SpansConfig(LikelihoodConfig):
    """Predict spans that were taken out of a text. Raffel et al. 2019, arXiv:1910.10683, section 3.1.4."""

    models: ClassVar[tuple[ModelKind, ...]] = ("encoder_decoder", "decoder")
    needs_masked_documents: ClassVar[bool] = True

    kind: Literal["spans"] = "spans"
    noise_frac: float = Field(0.15, gt=0, lt=1)
    """Part of the tokens that are taken out."""
    mean_span: float = Field(3.0, ge=1)
    """Their mean number in a span."""
    sentinels: int = Field(100, gt=0)
    """How many tokens <extra_id_0> ... there are to stand for spans."""

    def specials(self) -> tuple[str, ...]:
        return tuple(f"<extra_id_{n}>" for n in range(self.sentinels))

    def denoisers(self) -> list[Denoiser]:
        """The one of T5."""
        return [Denoiser("", self.noise_frac, self.mean_span)]


class UL2Config(LikelihoodConfig):
    """Span corruption of seven kinds, each announced by a mode token. Tay et al. 2022, arXiv:2205.05131, table 1."""

    models: ClassVar[tuple[ModelKind, ...]] = ("encoder_decoder", "decoder")
    needs_masked_documents: ClassVar[bool] = True

    kind: Literal["ul2"] = "ul2"
    sentinels: int = Field(256, gt=0)
    """How many tokens <extra_id_0> ... there are to stand for spans."""

    def specials(self) -> tuple[str, ...]:
        return (*(f"<extra_id_{n}>" for n in range(self.sentinels)), "<|R|>", "<|S|>", "<|X|>")

    def denoisers(self) -> list[Denoiser]:
        """Regular, sequential (a quarter on average) and extreme ones, equally often."""
        regular = [Denoiser("<|R|>", 0.15, 3.0), Denoiser("<|R|>", 0.15, 8.0)]
        extreme = [Denoiser("<|X|>", 0.5, 3.0), Denoiser("<|X|>", 0.5, 8.0), Denoiser("<|X|>", 0.15, 64.0), Denoiser("<|X|>", 0.5, 64.0)]
        return [*regular, Denoiser("<|S|>", 0.25, None), *extreme]


class Seq2SeqConfig(ScheduledSamplingConfig):
    """Predict a target from its source. Sutskever et al. 2014, arXiv:1409.3215; Vaswani et al. 2017, arXiv:1706.03762."""

    models: ClassVar[tuple[ModelKind, ...]] = ("encoder_decoder", "decoder")
    shapes: ClassVar[tuple[Shape, ...]] = ("pair",)
    packings: ClassVar[tuple[str, ...]] = ("none",)

    kind: Literal["seq2seq"] = "seq2seq"
    target_len: int | None = Field(None, gt=1)
    """Longest target in tokens; longer ones are cut and counted. null: data.seq_len, which bounds the source too; of a decoder-only
    model, in whose rows the two stand one behind the other, half of it."""


class SFTConfig(LikelihoodConfig):
    """Predict what the assistant says in a chat."""

    models: ClassVar[tuple[ModelKind, ...]] = ("decoder",)
    shapes: ClassVar[tuple[Shape, ...]] = ("chat",)
    packings: ClassVar[tuple[str, ...]] = ("fit", "none")
    needs_masked_documents: ClassVar[bool] = True

    kind: Literal["sft"] = "sft"
    prompt_loss: bool = False
    """Predict what the others say too."""


class DPOConfig(ObjectiveConfig):
    """Raise the better of two answers above the worse one, compared with the model at the start (DPO). It needs init_from."""

    models: ClassVar[tuple[ModelKind, ...]] = ("decoder",)
    shapes: ClassVar[tuple[Shape, ...]] = ("preference",)
    packings: ClassVar[tuple[str, ...]] = ("none",)
    needs_masked_documents: ClassVar[bool] = True
    needs_parent: ClassVar[bool] = True

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0)
    """How much a departure from the model at the start costs (Rafailov et al. 2023, arXiv:2305.18290, equation 7)."""


def trains(shape: Shape) -> list[str]:
    """The objectives that learn from records of this kind."""
    return [name for name, kind in ObjectiveConfig.kinds().items() if shape in kind.shapes]


def usual(model: ModelKind) -> ObjectiveConfig:
    """What models of this kind are mostly trained for."""
    found: dict[ModelKind, ObjectiveConfig] = {"decoder": CausalConfig(), "encoder": MLMConfig(), "encoder_decoder": Seq2SeqConfig()}
    return found[model]
