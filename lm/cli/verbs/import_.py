"""`lm import from=FOLDER out=FOLDER`: a Hugging Face model becomes a model folder."""

from pydantic import Field

from lm.cli.verb import Writing
from lm.errors import ConfigError
from lm.printing import note, say
from lm.storage.model_folder import read_config
from lm.units import si


class Import(Writing):
    """usage: lm import from=FOLDER_OR_HUB_NAME out=FOLDER [key=value ...]

    Reads config.json, safetensors and tokenizer.json, or with transformers an older vocab.json, vocab.txt or tokenizer.model; runs no
    code. The result is what init_from=, lm generate, lm eval and lm export take. With base=FOLDER, a model folder of ours, a LoRA or DoRA
    adapter of peft is read: its config and its safetensors.
    """

    from_: str
    """Folder with config.json, or owner/name on the hub."""
    tokenizer: str | None = None
    """tokenizer.json, or a folder with one. null: the model's own."""
    max_seq_len: int | None = Field(None, ge=1)
    """A shorter context than the model's own. null: its own."""
    base: str | None = None
    """Of a peft adapter, the run, model or checkpoint folder that it belongs to. null: it is a whole model."""
    revision: str | None = None
    """Commit or tag of a hub model. null: the newest."""

    def run(self, rest: list[str]) -> None:
        """Prints one line on stdout, notes on stderr."""
        self.refuse(rest)
        from lm.hf.io.generation import options_of
        from lm.hf.io.import_ import import_adapter, import_model

        if self.base is not None:
            if self.tokenizer is not None or self.max_seq_len is not None:
                raise ConfigError("base: tokenizer and max_seq_len of an adapter are those of its base. Leave them out.")
            found = import_adapter(
                self.from_, self.out, base=self.base, revision=self.revision, overwrite=self.overwrite, say=note
            )  # fmt: skip
        else:
            found = import_model(
                self.from_, self.out, tokenizer=self.tokenizer, max_seq_len=self.max_seq_len, revision=self.revision,
                overwrite=self.overwrite, say=note,
            )  # fmt: skip
        options = options_of(read_config(found.folder).get("sampling") or {})
        say(f"{found.folder}: {found.kind}, {si(found.n_parameters)} parameters. {self.tried(options, found.embeds)}")
