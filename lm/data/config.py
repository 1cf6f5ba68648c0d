"""Every option of `data` and `tokenizer`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lm.config import Config, Slot


class TokenizerConfig(Slot, group="tokenizer"):
    """How text becomes tokens."""


class TrainedConfig(TokenizerConfig):
    """Tokenizers trained on the training split, over bytes, so that every text comes back; specials <|bos|>, <|eos|>, <|pad|>."""

    vocab_size: int = Field(4096, ge=260)
    """Size of the vocabulary, with the 256 bytes and the special tokens."""
    pattern: Literal["own", "gpt2", "gpt4", "llama3"] = "own"
    """How text is cut into words before: GPT-4's way with whole indentations, or that of one of these."""
    specials: list[str] = []
    """Further special tokens."""
    max_chars: int = Field(1 << 28, gt=0)
    """Characters to train on; of a larger corpus an even sample of its documents."""


class BPEConfig(TrainedConfig):
    """Byte-pair encoding: Sennrich et al. 2015, arXiv:1508.07909; over bytes: Radford et al. 2019."""

    kind: Literal["bpe"] = "bpe"


class UnigramConfig(TrainedConfig):
    """The likeliest cut under a unigram model: Kudo 2018, arXiv:1804.10959; here over bytes."""

    kind: Literal["unigram"] = "unigram"


class WordPieceConfig(TrainedConfig):
    """The longest piece first: Wu et al. 2016, arXiv:1609.08144; here over bytes and without a continuation mark."""

    kind: Literal["wordpiece"] = "wordpiece"


class BytesConfig(TokenizerConfig):
    """One token per UTF-8 byte (0-255), then bos 256, eos 257, pad 258."""

    kind: Literal["bytes"] = "bytes"


class TokenizerFileConfig(TokenizerConfig):
    """A given tokenizer.json of the `tokenizers` library."""

    kind: Literal["file"] = "file"
    path: str
    """Path of the tokenizer.json."""
    bos: str | None = None
    """Text of the begin-of-document token. null: found among the usual names."""
    eos: str | None = None
    """Text of the end-of-document token. null: found among the usual names."""
    pad: str | None = None
    """Text of the padding token. null: found among the usual names, else eos."""


AnyTrained = BPEConfig | UnigramConfig | WordPieceConfig


class RecordConfig(Slot):
    """What a record is, where it is no plain text."""


class PairRecord(RecordConfig):
    """A text and what follows from it: a translation, a summary. In the name of a field a dot leads into an object: translation.de."""

    kind: Literal["pair"] = "pair"
    source: str = "source"
    """Field of the given text."""
    target: str = "target"
    """Field of the text to be learned."""


class Chatted(RecordConfig):
    """How messages are read and written."""

    role_field: str = "role"
    """Field of a message that says who speaks; human and gpt are read as user and assistant."""
    content_field: str = "content"
    """Field of a message that holds its text."""
    template: str | None = None
    """plain, chatml, or the path of a jinja template. null: the tokenizer's own, else plain."""

    def specials(self) -> tuple[str, ...]:
        """Special tokens that the template writes, for a tokenizer made here."""
        return ("<|im_start|>", "<|im_end|>") if self.template == "chatml" else ()


class ChatRecord(Chatted):
    """Messages of several speakers, of which the assistant's are learned."""

    kind: Literal["chat"] = "chat"
    messages: str | None = "messages"
    """Field of the list of messages. null: one turn out of the fields `user` and `assistant`."""
    user: list[str] = []
    """Fields of what the user says, one below the other; empty ones are passed over."""
    assistant: str | None = None
    """Field of the answer."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.messages is None) != bool(self.user and self.assistant):
            raise ValueError("either messages, or both user and assistant name the fields of a chat. Set messages=null to use the latter.")
        return self


class PreferenceRecord(Chatted):
    """Two answers to one prompt: a text each, or messages that end with the answer."""

    kind: Literal["preference"] = "preference"
    prompt: str | None = "prompt"
    """Field of the prompt. null: chosen and rejected are messages that hold it."""
    chosen: str = "chosen"
    """Field of the better answer."""
    rejected: str = "rejected"
    """Field of the worse answer."""


Shape = Literal["text", "pair", "chat", "preference"]


class DataConfig(Slot, group="data"):
    """What every source shares."""

    seq_len: int = Field(256, gt=1)
    """Tokens in a row."""
    global_batch: int = Field(8, gt=0)
    """Rows per optimizer step over all ranks; does not depend on the machine."""
    val_rows: int | None = Field(None, gt=0)
    """Rows in a validation; always the same ones, spread evenly. null: all."""
    packing: Literal["split", "fit", "none"] | None = None
    """split: one stream of documents, cut every seq_len tokens; fit: whole documents side by side, none cut that fits a row; none: one
    a row, padded. null: split for texts, fit for chats, none for pairs and preferences."""
    max_overlap: float = Field(0.5, ge=0, le=1)
    """Part of the validation documents that may be in training too, token for token; more is an error."""
    mask_documents: bool = True
    """Tokens of one packed document do not see another."""
    cache_dir: str = "~/.cache/lm"
    """Where token shards and trained tokenizers are kept."""
    workers: int = Field(0, ge=0)
    """Loader processes. 0: in the training process."""

    @property
    def records(self) -> RecordConfig | None:
        """What a record is, which decides the objectives that it can serve; None: a text."""
        return None

    @property
    def shape(self) -> Shape:
        """The kind of its records."""
        return "text" if self.records is None else self.records.kind


class SourceConfig(DataConfig):
    """One source of documents."""


class StdlibConfig(SourceConfig):
    """The source files of the running Python's own standard library, split by a hash of the path."""

    kind: Literal["stdlib"] = "stdlib"
    val_frac: float = Field(0.05, gt=0, lt=1)
    """Part of the files held out for validation."""


class StdlibDocstringsConfig(SourceConfig):
    """Functions of the standard library without their docstrings, each with its docstring: an embedded corpus of pairs."""

    kind: Literal["stdlib_docstrings"] = "stdlib_docstrings"
    val_frac: float = Field(0.05, gt=0, lt=1)
    """Part of the files whose functions are held out for validation."""

    record: RecordConfig = PairRecord()
    """Of the fields source, target and brief, which is the first paragraph of the target: a pair, a chat or a preference."""

    @property
    def records(self) -> RecordConfig | None:
        return self.record


class Recorded(SourceConfig):
    """Sources whose records are what the config says."""

    field: str = "text"
    """The field or column that holds the text, where `record` is null."""
    record: RecordConfig | None = None
    """What a record is. null: a text."""
    on_bad_record: Literal["error", "skip"] = "error"
    """What a broken record does; skipped ones are counted."""

    @property
    def records(self) -> RecordConfig | None:
        return self.record


class TextConfig(Recorded):
    """Local files: .txt, .md, .rst, .py, .jsonl, .csv, .parquet, plain or .gz or .zst; a folder means every such file below it."""

    kind: Literal["text"] = "text"
    files: str | list[str]
    """Files, folders or globs."""
    val_files: str | list[str] | None = None
    """Held-out files. null: the last val_frac of a single text file, or a hash split of the documents."""
    val_frac: float = Field(0.1, gt=0, lt=1)
    """Part held out where val_files is null."""


class HubConfig(Recorded):
    """A dataset of the Hugging Face hub, read through `datasets`."""

    kind: Literal["hub"] = "hub"
    name: str
    """Dataset name, e.g. HuggingFaceFW/fineweb-edu."""
    config: str | None = None
    """Configuration name. null: the only one."""
    revision: str | None = None
    """Commit or tag. null: the newest."""
    split: str = "train"
    """Split to train on."""
    val_split: str | None = None
    """Split to validate on. null: a hash split of the documents by val_frac."""
    val_frac: float = Field(0.001, gt=0, lt=1)
    """Part of the documents held out where val_split is null."""
    max_documents: int | None = Field(None, gt=0)
    """Stop after this many documents. null: all."""


class MixSource(Config):
    """One source of a mixture."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """What it is called in phases, reports and metrics."""
    data: SourceConfig
    """Where its documents come from. Rows are the mixture's: seq_len and the like are set there."""
    weight: float | None = Field(None, ge=0)
    """Its share of the tokens, against the other weights; 0: only validated. null: its size ** (1 / temperature), if that is so for all."""
    max_epochs: float | None = Field(None, gt=0)
    """How often its rows may be read; after that the others share its part. null: without end."""


class Phase(Config):
    """Other weights for the first steps."""

    until_step: int = Field(gt=0)
    """The step up to which they hold, after the phase before; behind the last phase the sources' own weights hold."""
    weights: dict[str, Annotated[float, Field(ge=0)]]
    """Weight by name; a source that is not named has none."""


class MixConfig(DataConfig):
    """Several sources by weight. Each is validated on its own too, under its name."""

    kind: Literal["mix"] = "mix"
    sources: list[MixSource] = Field(min_length=1)
    """What is mixed; all of one kind of record."""
    phases: list[Phase] = []
    """Weights that change with the steps."""
    temperature: float = Field(1.0, gt=0)
    """Above 1, small sources without weights get more than their size (Conneau et al. 2019, arXiv:1911.02116)."""

    @property
    def records(self) -> RecordConfig | None:
        return self.sources[0].data.records

    @model_validator(mode="after")
    def _sources_agree(self) -> Self:
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"sources: the names {', '.join(names)} are not all different. Rename one.")
        if len(shapes := {source.data.shape for source in self.sources}) > 1:
            raise ValueError(f"sources: their records are of the kinds {', '.join(sorted(shapes))}. Mix sources of one kind.")
        if len({source.weight is None for source in self.sources}) > 1:
            raise ValueError("sources: some have a weight and some have none. Give all or none of them one.")
        if not any(source.weight is None or source.weight > 0 for source in self.sources):
            raise ValueError("sources: no weight is above 0, so there is nothing to train on. Raise one.")
        return self

    @model_validator(mode="after")
    def _shared_keys_are_the_mixtures(self) -> Self:
        for source in self.sources:
            for key, field in DataConfig.model_fields.items():
                if getattr(source.data, key) != field.default:
                    raise ValueError(f"sources: {source.name} sets {key}, which is one for all. Set data.{key} instead.")
        return self

    @model_validator(mode="after")
    def _phases_are_in_order(self) -> Self:
        steps, names = [phase.until_step for phase in self.phases], {source.name for source in self.sources}
        if steps != sorted(set(steps)):
            raise ValueError(f"phases: until_step is {', '.join(map(str, steps))}, and must rise from phase to phase. Sort them.")
        for phase in self.phases:
            if unknown := phase.weights.keys() - names:
                raise ValueError(f"phases: {min(unknown)} is no source. Options: {', '.join(sorted(names))}.")
            if not sum(phase.weights.values()):
                raise ValueError(f"phases: no weight until step {phase.until_step} is above 0. Raise one.")
        return self
