"""Chats as ids are those of transformers, whatever the tokenizer does about blanks, and what is learned begins where its answer does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lm.data.kinds import ChatRecord
from lm.data.sources.base import Document, Turn
from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.fitting import grown
from lm.data.tokenizer.together import together
from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lm.generation.text import ids_of

MARKS = ("<|user|>", "<|assistant|>", "<|end|>")
TEXT = ["It is two. Hi there, what is 2? [INST] and [/INST] ok sure, is it? User Assistant"] * 20
TURNS = [Turn("user", "Hi there, what is 2?"), Turn("assistant", "It is two."), Turn("user", " ok? "), Turn("assistant", "Sure, it is.")]
LEADING = "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}" \
    "{% else %}{% generation %}{{ ' ' + m['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"  # fmt: skip
LINES = "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}{% if m['role'] == 'user' %}{{ m['content'] + '<|end|>\n' }}" \
    "{% else %}{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}{{ '\n' }}{% endif %}{% endfor %}" \
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"  # fmt: skip


def sentencepiece(scheme: str, **flags: bool) -> tokenizers.Tokenizer:
    """As Llama 2's: with a normalizer that puts a blank before each text, or one that puts it before the first alone, or always."""
    trained = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=340, special_tokens=names, show_progress=False))
    state = json.loads(trained.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    raw = tokenizers.Tokenizer.from_str(json.dumps(state | {"pre_tokenizer": None if scheme == "normalizer" else metaspace}))
    if scheme == "normalizer":
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False, **flags) for name in MARKS])
    return raw


def byte_level(prefix: bool) -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel()
    names = ["<unk>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=320, special_tokens=names, initial_alphabet=alphabet, show_progress=False))
    raw.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in MARKS])
    return raw


def unigram() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.Unigram())
    raw.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    names = ["<pad>", "<unk>", "<s>", "</s>"]
    raw.train_from_iterator(TEXT, trainers.UnigramTrainer(vocab_size=60, special_tokens=names, unk_token="<unk>", show_progress=False))
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in MARKS])
    return raw


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "a blank before each text": lambda: sentencepiece("normalizer"),
    "a blank before the first": lambda: sentencepiece("first"),
    "a blank before all": lambda: sentencepiece("always"),
    "specials that take blanks": lambda: sentencepiece("normalizer", rstrip=True),
    "specials that take blanks on both sides": lambda: sentencepiece("first", rstrip=True, lstrip=True),
    "bytes": lambda: byte_level(False),
    "bytes with a blank first": lambda: byte_level(True),
    "unigram": unigram,
}


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    """Transformers' tokenizer, and ours of its folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=KINDS[request.param](), bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder), load_tokenizer(folder, foreign=True)


def rows_of(tokenizer: Tokenizer, turns: list[Turn], folder: Path, template: str) -> tuple[list[int], list[int]]:
    """The ids of a chat, and whether each is learned, as they are stored."""
    file = folder / "chat.jinja"
    file.write_text(template)
    document = Document("train", [], b"", tuple(turns))
    passages = list(ChatRecord(messages="messages", template=str(file)).passages([document], tokenizer))
    assert [(each.starts, each.ends) for each in passages] == [(n == 0, n == len(passages) - 1) for n in range(len(passages))]
    found = [(i, int(passage.counted)) for passage in passages for i in (passage.ids.tolist() if passage.ids is not None else [])]
    return [i for i, _ in found], [learned for _, learned in found]


@pytest.mark.parametrize("template", [LEADING, LINES])
def test_a_chat_has_the_ids_and_the_mask_of_transformers(both: tuple[Any, Tokenizer], template: str, tmp_path: Path) -> None:
    """Seen to fail where each run was encoded alone: 11 of the 16, and 5 of the next 16."""
    theirs, ours = both
    theirs.chat_template = template
    messages = [{"role": turn.role, "content": turn.text} for turn in TURNS]
    found = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, learned = rows_of(ours, TURNS, tmp_path, template)
    assert ids == found["input_ids"]
    text = theirs.decode([i for i, one in zip(ids, learned, strict=True) if one], skip_special_tokens=True)
    assert "".join(text.split()) == "Itistwo.Sure,itis."
    if theirs.backend_tokenizer.post_processor is None or template == LINES:  # else a blank is cut off its word, and theirs finds no mask
        assert learned == found["assistant_masks"]


@pytest.mark.parametrize("template", [LEADING, LINES])
def test_what_was_trained_begins_the_next_prompt(both: tuple[Any, Tokenizer], template: str, tmp_path: Path) -> None:
    theirs, ours = both
    theirs.chat_template = template
    ids, learned = rows_of(ours, TURNS[:2], tmp_path, template)
    asked = ChatTemplate(template, "here", ours)
    prompt = ids_of(ours, asked.question(TURNS[:1]))
    assert prompt == ids[: learned.index(1)] == [i for i, one in zip(ids, learned, strict=True) if not one][: len(prompt)]
    messages = [{"role": turn.role, "content": turn.text} for turn in TURNS[:3]]
    assert ids_of(ours, asked.question(TURNS[:3])) == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    begun = theirs.apply_chat_template(messages[:2], continue_final_message=True, return_dict=False)
    assert ids_of(ours, asked.question(TURNS[:2], goes_on=True)) == begun


def test_what_a_message_spells_stays_text(both: tuple[Any, Tokenizer], tmp_path: Path) -> None:
    _, ours = both
    marks = {ours.special([name]) for name in MARKS}
    plain, _ = rows_of(ours, [Turn("user", "Hi?"), TURNS[1]], tmp_path, LINES)
    ids, learned = rows_of(ours, [Turn("user", "Hi<|end|>?</s>"), TURNS[1]], tmp_path, LINES)
    assert [i for i in ids if i in marks] == [i for i in plain if i in marks] and ours.eos not in ids
    assert "two" in ours.decode([i for i, one in zip(ids, learned, strict=True) if one])


def test_every_id_knows_the_parts_that_it_is_of(both: tuple[Any, Tokenizer]) -> None:
    _, ours = both
    end = ours.special(["<|end|>"])
    assert end is not None
    parts: list[int | str] = ["It is", " two", "", end, ". Hi é", "✓"]
    found = together(ours, parts).T.tolist()
    assert all(first <= last for _, first, last in found)
    assert [first for _, first, _ in found] == sorted(first for _, first, _ in found)
    assert [i for i, first, last in found if first <= 3 <= last and i == end] == [end]
    covered = {part for _, first, last in found for part in range(first, last + 1)}
    assert covered == {0, 1, 3, 4, 5}


@pytest.mark.parametrize("flags", [{"normalized": True}, {"single_word": True, "normalized": False}], ids=str)
def test_specials_are_those_that_the_template_writes_and_no_others(flags: dict[str, bool], tmp_path: Path) -> None:
    """Seen to fail: what a normalizer makes of a message became a special token, and one beside a letter none."""
    raw = byte_level(False)
    raw.normalizer = normalizers.NFKC()
    raw.add_special_tokens([AddedToken("<|im_end|>", special=True, **flags)])
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>").save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path, foreign=True)
    end = ours.special(["<|im_end|>"])
    assert end is not None
    ids = ids_of(ours, [end, "user said ＜|im_end|＞ here", end])
    assert ids[0] == ids[-1] == end and ids.count(end) == 2


def test_special_tokens_that_are_there_keep_what_they_say_of_blanks(tmp_path: Path) -> None:
    """Seen to fail where bos, eos and pad were added again: eos took in no blanks, here and in transformers behind a save."""
    raw = byte_level(False)
    raw.add_special_tokens([AddedToken("</s>", special=True, normalized=False, rstrip=True)])
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>").save_pretrained(tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path, foreign=True)
    theirs.chat_template = template = LINES.replace("'<|end|>'", "eos_token")
    found = theirs.apply_chat_template([{"role": turn.role, "content": turn.text} for turn in TURNS], return_dict=True)
    assert rows_of(ours, TURNS, tmp_path, template)[0] == found["input_ids"]
    for again in (ours, grown(ours, ["</s>", "<|more|>"])):
        again.save(tmp_path / "again")
        assert AutoTokenizer.from_pretrained(tmp_path / "again")("a</s> b").input_ids == theirs("a</s> b").input_ids
