"""Writes a tokenizer's files for other programs, which put special tokens around each text by themselves."""

import json
from pathlib import Path

from lm.data.tokenizer.source import around, behind, between
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.model_config import ModelConfig
from lm.schema import Tree


def save_tokenizer(folder: Path, tokenizer: Tokenizer, cfg: ModelConfig, embeds: bool = False) -> None:
    """Writes the files so that other programs read the ids that `lm` gives this model: a decoder's prompt starts with the tokenizer's
    prefix (bos), a text that an encoder reads whole also ends with eos, and the source of an encoder-decoder has its language beside it.
    A classifier's rows of a batch begin together, since transformers counts learned positions from the first column.

    embeds: texts become vectors, and are read as a classifier reads them.
    """
    continues = cfg.continues() and not embeds
    tokenizer.save(folder)
    before, after = around(tokenizer) if cfg.kind == "encoder_decoder" else (tokenizer.prefix, tokenizer.suffix)
    after = after if cfg.kind != "decoder" else [] if continues else behind(tokenizer, both_ways=False)
    if tokenizer.as_saved("a")[0] != [*before, *tokenizer.encode("a"), *after]:
        middle, _ = between(tokenizer, cfg.kind == "encoder")
        _change(folder / "tokenizer.json", post_processor=_around(tokenizer, before, middle, after))
    adds = {"add_bos_token": bool(before), "add_eos_token": bool(after)} if cfg.kind != "encoder" else {}
    side = {"padding_side": "left" if continues else "right"} if cfg.kind == "decoder" else {}  # where the next token comes
    asked = ["input_ids", *(["token_type_ids"] if (cfg.embed.segments or 1) > 1 else []), "attention_mask"]
    read = {"model_input_names": asked} if cfg.kind == "encoder" else {}  # else the segments of two texts are all 0
    _change(folder / "tokenizer_config.json", model_max_length=cfg.max_seq_len, **adds, **side, **read, **_further_names(tokenizer, cfg))


def _further_names(tokenizer: Tokenizer, cfg: ModelConfig) -> Tree:
    """Returns the special tokens under the further names by which other programs look for them: without pad_token no rows of several
    lengths are one batch, and what is written for encoders asks for cls_token and sep_token."""
    said = {"unk_token": tokenizer.unknown, "pad_token": tokenizer.pad}
    said |= {"cls_token": tokenizer.bos, "sep_token": tokenizer.eos} if cfg.kind == "encoder" else {}
    found = {key: tokenizer.special_names[i] for key, i in said.items() if i in tokenizer.special_names}
    return found if tokenizer.specials.pad else {**found, "own_pad": None}  # so that an import finds the tokenizer as it was


def _around(tokenizer: Tokenizer, before: list[int], middle: list[int], after: list[int]) -> Tree:
    """Returns the post_processor of tokenizer.json that puts these tokens around a text.  middle: those between two."""

    def special(token: int, text: int) -> Tree:
        return {"SpecialToken": {"id": tokenizer.special_names[token], "type_id": text}}

    first = [*(special(i, 0) for i in before), {"Sequence": {"id": "A", "type_id": 0}}]
    single = [*first, *(special(i, 0) for i in after)]
    pair = [*first, *(special(i, 0) for i in middle), {"Sequence": {"id": "B", "type_id": 1}}, *(special(i, 1) for i in after)]
    names = {i: tokenizer.special_names[i] for i in (*before, *middle, *after)}
    tokens = {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in names.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def _change(file: Path, **keys: object) -> None:
    tree = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**tree, **keys}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
