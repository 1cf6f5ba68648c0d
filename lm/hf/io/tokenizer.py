"""A tokenizer's files for other programs, which put special tokens around each text by themselves."""

import json
from pathlib import Path

from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.transformer import ModelConfig
from lm.schema import Tree


def save_tokenizer(folder: Path, tokenizer: Tokenizer, cfg: ModelConfig) -> None:
    """tokenizer.json that gives what `lm` gives this model: a prompt starts with bos, and what is read as a whole ends with eos too."""
    tokenizer.save(folder)
    before, after = tokenizer.prefix, tokenizer.suffix if cfg.kind != "decoder" else []
    if tokenizer.encode_as_saved("a") != [*before, *tokenizer.encode("a"), *after]:
        _change(folder / "tokenizer.json", post_processor=_around(tokenizer, before, after))
    adds = {"add_bos_token": bool(before), "add_eos_token": bool(after)} if cfg.kind != "encoder" else {}
    _change(folder / "tokenizer_config.json", model_max_length=cfg.max_seq_len, **adds)


def ends(tokenizer: Tokenizer) -> int | list[int] | None:
    """What ends a text: eos, and with a chat template what it ends an answer with, where that is another token. Raises ConfigError."""
    if tokenizer.chat_template is None:
        return tokenizer.eos
    last = ChatTemplate(tokenizer.chat_template, "the tokenizer", tokenizer).end()
    found = [token for token in dict.fromkeys((tokenizer.eos, last)) if token is not None]
    return found if len(found) > 1 else next(iter(found), None)


def _around(tokenizer: Tokenizer, before: list[int], after: list[int]) -> Tree:
    """A post-processor; of two texts each ends as one does."""

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
