"""`lm export from=FOLDER format=hf out=FOLDER`: a model becomes what transformers, vLLM, MLX, llama.cpp and lm-eval load."""

from typing import Literal

from lm.cli.verb import Writing
from lm.errors import ConfigError
from lm.printing import note, say
from lm.storage.model_folder import resolve_model
from lm.units import si


class Export(Writing):
    """usage: lm export from=FOLDER out=FOLDER [format=hf|gguf|peft] [key=value ...]

    hf: config.json, generation_config.json, safetensors, tokenizer files and a model card; the logits are compared with those of
    transformers, where that is installed. gguf: model.gguf, with the vocabulary in it. A model with an option that no family of
    transformers, or no architecture of llama.cpp, has is refused by naming the option.

    Of a run with an adapter, hf and gguf are the merged model, and format=peft writes the adapter alone, as peft loads it on the exported
    parent; its logits are compared with peft's, where that is installed.
    """

    other_names = {
        "dtype": "outtype precision quant quantization quantize torch_dtype",
        "format": "type",
        "out": "dir folder out_dir output output_dir outfile",
    }

    from_: str
    """Run, model or checkpoint folder."""
    format: Literal["hf", "gguf", "peft"] = "hf"
    """hf: the format of Hugging Face transformers; gguf: that of llama.cpp; peft: an adapter in the format of Hugging Face peft."""
    merge: bool | None = None
    """An adapter becomes part of the weights. null: where the format has none."""
    base: str | None = None
    """What an adapter names as its model: a folder, or owner/name. null: where the parent was imported from, or itself. Of format=hf, the
    model of the hub that the model card names. null: the one that this was imported from, if any."""
    license: str | None = None
    """Of format=hf, what the model card says: apache-2.0, say. null: as the model of the hub that this was imported from, if any."""
    family: str | None = None
    """Model type to write (llama, gpt2, t5, ...). null: that which it was imported from, or the most general."""
    dtype: Literal["keep", "fp32", "bf16", "fp16", "f32", "f16", "q8_0"] = "keep"
    """Type of the weights: of hf fp32, bf16 or fp16; of gguf f32, f16, bf16 or q8_0. keep: as they are."""
    mtp: Literal["drop", "keep"] = "drop"
    """Blocks that predict further tokens: leave them out, or write them where the family has a place for them (DeepSeek-V3)."""
    embeds: bool | None = None
    """Of format=hf, write how the vector of a text is read, for sentence-transformers. null: where objective=contrastive has trained it."""
    check: bool = True
    """Load the result with transformers and compare logits."""

    def run(self, rest: list[str]) -> None:
        """Prints on stdout what was written, how it compares, and what each program does with it."""
        self.refuse(rest)
        resolve_model(self.from_)  # a mistyped path is told before anything heavy is imported
        from lm.hf.io.export import export
        from lm.hf.io.export_adapter import export_adapter

        if self.merge is not None and self.merge != (self.format != "peft"):
            other = "hf" if self.format == "peft" else "peft"
            raise ConfigError(f"merge={str(self.merge).lower()}: format={self.format} is never so. Leave it out, or use format={other}.")
        if self.format == "peft":
            if (self.dtype, self.mtp, self.license, self.embeds) != ("keep", "drop", None, None):
                raise ConfigError("format=peft: dtype, mtp, license and embeds are of whole models. Leave them out, or use format=hf.")
            found = export_adapter(
                self.from_, self.out, family=self.family, base=self.base, check=self.check, overwrite=self.overwrite, say=note
            )
        else:
            found = export(
                self.from_, self.out, format=self.format, family=self.family, dtype=self.dtype, mtp=self.mtp, license=self.license,
                base=self.base, embeds=self.embeds, check=self.check, overwrite=self.overwrite, say=note,
            )  # fmt: skip
        say(f"{found.folder}: {found.kind}, {si(found.n_parameters)} parameters")
        if found.check is not None:
            what = found.check.what
            how = f"float32, {found.check.rows} x {found.check.tokens} tokens, {what}s of std {found.check.spread:.2g}"
            say(f"largest {what} difference to transformers: {found.check.difference:.1e} ({how})")
        for use in found.uses:
            say(f"{use.program}: {use.command}" if use.command is not None else f"no command for {use.program}: {use.why}")
