"""Writes a tokenizer's files for other programs, which put special tokens around each text by themselves."""

import json
from math import isfinite
from pathlib import Path

from lm.data.tokenizer.tokenizer import Tokenizer
from lm.generation.text import ends_of
from lm.nn.transformer import ModelConfig
from lm.schema import Tree
from lm.storage.reading import read_json

GENERATION = "generation_config.json"
SAMPLING = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size", "num_beams", "length_penalty",
    "early_stopping",
)  # fmt: skip
_ELSEWHERE = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "use_cache")


def save_tokenizer(folder: Path, tokenizer: Tokenizer, cfg: ModelConfig) -> None:
    """Writes the files so that other programs read the ids that `lm` gives this model: a decoder's prompt starts with the tokenizer's
    prefix (bos), and a text that an encoder reads whole also ends with eos."""
    tokenizer.save(folder)
    before, after = tokenizer.prefix, tokenizer.suffix if cfg.kind != "decoder" else []
    if tokenizer.encode_as_saved("a") != [*before, *tokenizer.encode("a"), *after]:
        _change(folder / "tokenizer.json", post_processor=_around(tokenizer, before, after))
    adds = {"add_bos_token": bool(before), "add_eos_token": bool(after)} if cfg.kind != "encoder" else {}
    side = {"padding_side": "left"} if cfg.kind == "decoder" else {}  # rows of a batch then end where the next token comes
    _change(folder / "tokenizer_config.json", model_max_length=cfg.max_seq_len, **adds, **side, **_further_names(tokenizer, cfg))


def _further_names(tokenizer: Tokenizer, cfg: ModelConfig) -> Tree:
    """Returns the special tokens under the further names by which other programs look for them: without pad_token no rows of several
    lengths are one batch, and what is written for encoders asks for cls_token and sep_token."""
    said = {"unk_token": tokenizer.unknown, "pad_token": tokenizer.pad}
    said |= {"cls_token": tokenizer.bos, "sep_token": tokenizer.eos} if cfg.kind == "encoder" else {}
    found = {key: tokenizer.special_names[i] for key, i in said.items() if i in tokenizer.special_names}
    return found if tokenizer.specials.pad else {**found, "own_pad": None}  # so that an import finds the tokenizer as it was


def ends(tokenizer: Tokenizer) -> int | list[int] | None:
    """Returns the end token or tokens of a text, eos first."""
    found = ends_of(tokenizer)
    return found if len(found) > 1 else next(iter(found), None)


def further_ends(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """Returns the added tokens, special or not, that end a text besides eos, by a folder's generation_config.json or else its
    config.json."""
    files = [file for name in (GENERATION, "config.json") if (file := folder / name).exists()]
    said: int | list[int] = next((found for file in files if (found := read_json(file, foreign=True).get("eos_token_id")) is not None), [])
    given = said if isinstance(said, list) else [said]
    return [i for i in given if isinstance(i, int) and i != tokenizer.eos and i in tokenizer.added_names]


def sampling(folder: Path) -> tuple[Tree | None, list[str]]:
    """Returns the values of a folder's generation_config.json by which `generate` goes on where nothing else is asked for, None where it
    has none; and what else it says, as `key=value`, which no export will have."""
    said = read_json(file, foreign=True) if (file := folder / GENERATION).exists() else {}
    found = {key: value for key in SAMPLING if _is_setting(value := said.get(key))}
    rest = [f"{key}={value!r}" for key, value in said.items() if value and key not in (*found, *_ELSEWHERE) and not key.startswith("_")]
    return found or None, rest


def _is_setting(value: object) -> bool:
    return value == "never" or (isinstance(value, bool | int | float) and isfinite(value))


def _around(tokenizer: Tokenizer, before: list[int], after: list[int]) -> Tree:
    """Returns the post_processor of tokenizer.json that puts these tokens around a text; of a pair of texts, each ends as a single one."""

    def special(token: int, text: int) -> Tree:
        return {"SpecialToken": {"id": tokenizer.special_names[token], "type_id": text}}

    single = [*(special(i, 0) for i in before), {"Sequence": {"id": "A", "type_id": 0}}, *(special(i, 0) for i in after)]
    second = [{"Sequence": {"id": "B", "type_id": 1}}, *(special(i, 1) for i in after)]
    names = {i: tokenizer.special_names[i] for i in (*before, *after)}
    tokens = {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in names.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *second], "special_tokens": tokens}


def _change(file: Path, **keys: object) -> None:
    tree = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**tree, **keys}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
