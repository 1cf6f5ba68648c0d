"""generation_config.json, both ways: where a text ends, and how the next token is drawn."""

import json
from math import isfinite
from pathlib import Path
from typing import Any

from lm.data.tokenizer.tokenizer import Tokenizer
from lm.generation.text import ends_of
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import EncoderDecoderConfig
from lm.schema import Tree
from lm.storage.reading import read_json

GENERATION = "generation_config.json"
SAMPLING = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size", "num_beams", "length_penalty",
    "early_stopping", "encoder_no_repeat_ngram_size", "forced_eos_token_id", "max_length", "min_length", "max_new_tokens", "min_new_tokens",
    *(_LISTS := ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")),
)  # fmt: skip
_FIRST = "forced_bos_token_id"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", _FIRST)
_ELSEWHERE = (*_TOKENS, "transformers_version", "use_cache")


def generation_config(config: Tree, cfg: ModelConfig, tokenizer: Tokenizer | None, drawn: Tree | None) -> Tree:
    """Returns generation_config.json of a model with this config.json.  drawn: from `sampling`."""
    first = cfg.first_token if isinstance(cfg, EncoderDecoderConfig) else None
    said = {**config, "eos_token_id": ends(tokenizer) if tokenizer is not None else None, _FIRST: first}
    return {key: said[key] for key in _TOKENS if said.get(key) is not None} | (drawn or {})


def ends(tokenizer: Tokenizer) -> int | list[int] | None:
    """Returns the end token or tokens of a text, eos first."""
    found = ends_of(tokenizer)
    return found if len(found) > 1 else next(iter(found), None)


def further_ends(folder: Path, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the tokens that end a text besides eos, by a folder's generation_config.json or else its config.json: those that are added
    ones, special or not; and others of a list, which end none here: a text may hold them, and one alone is often a class's default."""
    said = _said(folder, "eos_token_id")
    given = [i for i in (said if isinstance(said, list) else [said]) if isinstance(i, int) and i != tokenizer.eos]
    others = [i for i in given if i not in tokenizer.added_names]
    return [i for i in given if i not in others], others if isinstance(said, list) else []


def with_first(cfg: ModelConfig, folder: Path) -> ModelConfig:
    """Returns the config, of an encoder-decoder with the first token of each answer that a folder's generation_config.json or else its
    config.json names."""
    found = _said(folder, _FIRST)
    return cfg.replace(first_token=found) if isinstance(cfg, EncoderDecoderConfig) and isinstance(found, int) else cfg


def _said(folder: Path, key: str) -> Any:
    """Returns what generation_config.json says under this key, or else config.json; None where neither says anything."""
    files = [file for name in (GENERATION, "config.json") if (file := folder / name).exists()]
    return next((found for file in files if (found := read_json(file, foreign=True).get(key)) is not None), None)


def sampling(folder: Path) -> tuple[Tree | None, list[str]]:
    """Returns the values of a folder's generation_config.json, or else of its config.json, by which `generate` goes on where nothing else
    is asked for, None where it has none; and what else the former says, as `key=value`, which no export will have."""
    own = (folder / GENERATION).exists()
    said = read_json(folder / (GENERATION if own else "config.json"), foreign=True)
    found = {key: value for key in SAMPLING if _is_setting(key, value := said.get(key))}
    rest = [f"{key}={value!r}" for key, value in said.items() if value and key not in (*found, *_ELSEWHERE) and not key.startswith("_")]
    return found or None, rest if own else []


def options_of(drawn: Tree) -> list[str]:
    """Returns the options of `lm generate` that come to these values, from `sampling`, as far as there are any."""
    if not drawn:
        return []
    texts = [each if isinstance(each, list) else [each] for key in ("bad_words_ids", "suppress_tokens") for each in drawn.get(key, ())]
    found: Tree = {"logit_bias": json.dumps({str(*text): -100 for text in texts if len(text) == 1})}
    found |= {"repetition_penalty": drawn.get("repetition_penalty", 1.0), "no_repeat_ngram": drawn.get("no_repeat_ngram_size", 0)}
    if drawn.get("do_sample"):
        found |= {key: {"temperature": 1.0, "top_k": 50, **drawn}.get(key) for key in ("temperature", "top_k", "top_p", "min_p")}
    elif drawn.get("num_beams", 1) > 1:
        found |= {"beams": drawn["num_beams"], "length_penalty": drawn.get("length_penalty", 1.0)}
        found |= {"early_stopping": json.dumps(drawn.get("early_stopping", False)).strip('"')}
    else:
        found["temperature"] = 0
    found["max_tokens"] = drawn.get("max_new_tokens")
    off: Tree = {"logit_bias": "{}", "repetition_penalty": 1, "no_repeat_ngram": 0, "top_k": 0, "top_p": 1, "length_penalty": 1}
    return [f"{key}={value}" for key, value in found.items() if value not in (None, off.get(key), "false")]


def _is_setting(key: str, value: Any) -> bool:
    if key in _LISTS:  # of tokens, or of texts of tokens
        return isinstance(value, list) and all(isinstance(i, int) for each in value for i in (each if isinstance(each, list) else [each]))
    if key.startswith("max_") and (not isinstance(value, int) or value < 1):  # which transformers refuses
        return False
    return (key == "early_stopping" and value == "never") or (isinstance(value, bool | int | float) and isfinite(value))
