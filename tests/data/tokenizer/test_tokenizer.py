import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from lm.data.kinds import BPEConfig, BytesConfig, TokenizerFileConfig, UnigramConfig, WordPieceConfig
from lm.data.tokenizer import tokenizer as module
from lm.data.tokenizer.fitting import grown, unlike
from lm.data.tokenizer.stream import Stream
from lm.data.tokenizer.tokenizer import Specials, Tokenizer, load_tokenizer, split_text
from lm.data.tokenizer.train import _LONGEST as LONGEST
from lm.data.tokenizer.train import _shortened
from lm.errors import ConfigError
from lm.schema import from_tree

CODE = "class Tree:\n    def __init__(self, leaf=None):\n        self.leaf = leaf  # don't\n\n\nif x:\n\treturn 'it''s', 12345, \"\\n\"\r\n"
SCRIPTS = "Ünïcode, 日本語、한국어 и русский, עברית, हिन्दी, 👩‍👩‍👧, \u0301combined, \x00\x1f\u2028 end"
LITERAL = "a <|eos|> b<|bos|><|pad|> </s> [PAD]"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return BPEConfig(vocab_size=400).build([Path(module.__file__).read_text(encoding="utf-8"), CODE * 20])


@pytest.fixture(scope="module")
def unigram() -> Tokenizer:
    """SentencePiece style: specials are ordinary pieces of the model, tokens are not bytes, a space is put before each text."""
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁a", -3.0), ("ab", -3.5)]
    raw = RawTokenizer(models.Unigram([*vocab, *((chr(c), -8.0) for c in range(33, 127))], 0, False))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    return Tokenizer(raw, module.Specials("<s>", "</s>", None))


@pytest.fixture(params=["bytes", "bpe"])
def byte_level(request: pytest.FixtureRequest, bpe: Tokenizer, byte_tokenizer: Tokenizer) -> Tokenizer:
    return bpe if request.param == "bpe" else byte_tokenizer


@pytest.fixture(params=["bytes", "bpe", "unigram"])
def any_kind(request: pytest.FixtureRequest, bpe: Tokenizer, byte_tokenizer: Tokenizer, unigram: Tokenizer) -> Tokenizer:
    return {"bytes": byte_tokenizer, "bpe": bpe, "unigram": unigram}[request.param]


@pytest.mark.parametrize("text", [CODE, SCRIPTS, LITERAL, "", " ", "\n\n   \n", "\ufffd"])
def test_text_in_any_script_round_trips(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text
    assert byte_level.decode(byte_level.document(text)) == text


def test_byte_tokens_are_the_bytes(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.encode(SCRIPTS) == list(SCRIPTS.encode())
    assert (byte_tokenizer.bos, byte_tokenizer.eos, byte_tokenizer.pad, byte_tokenizer.vocab_size) == (256, 257, 258, 259)
    assert byte_tokenizer.document("hi") == [256, 104, 105, 257]


def test_byte_tokens_equal_what_the_library_makes_of_the_saved_file(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    byte_tokenizer.save(tmp_path)
    raw = RawTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert raw.encode(CODE + SCRIPTS).ids == byte_tokenizer.encode(CODE + SCRIPTS)


def test_text_that_spells_a_special_token_is_text(any_kind: Tokenizer) -> None:
    """Seen to fail with the cut of specials that are ordinary pieces removed."""
    ids = set(any_kind.encode(LITERAL + " <s>"))
    assert not ids & {any_kind.bos, any_kind.eos, any_kind.pad}


def test_a_special_token_in_text_is_split_as_other_text_is() -> None:
    """Not cut somewhere to hide it."""
    found = BPEConfig(vocab_size=265).build(["<|x|> " * 100])
    assert found.decode(found.encode("<|eos|>")[:1]) == "<|"


def test_encoding_a_batch_equals_one_by_one(any_kind: Tokenizer) -> None:
    texts = ["", "ab", "aab </s> b", CODE]
    assert [ids.tolist() for ids in any_kind.encode_arrays(texts)] == [any_kind.encode(text) for text in texts]


def test_half_a_surrogate_pair_is_told_alike_by_all(any_kind: Tokenizer) -> None:
    """Seen to fail: the library's TypeError, which ended `lm embed` and `lm classify` as a bug, but for plain bytes."""
    for read in (lambda: any_kind.encode_arrays(["a", "a\ud800"]), lambda: any_kind.document("a\ud800")):
        with pytest.raises(UnicodeEncodeError) as found:
            read()
        assert found.value.start == 1


def test_token_bytes_add_up_to_the_text(byte_level: Tokenizer) -> None:
    counts = byte_level.token_bytes()
    assert counts is not None and counts.shape == (byte_level.vocab_size,)
    for text in (CODE, SCRIPTS, LITERAL):
        assert counts[byte_level.document(text)].sum() == len(text.encode())


def test_tokens_that_are_not_bytes_have_no_byte_count(unigram: Tokenizer) -> None:
    assert unigram.token_bytes() is None


@pytest.mark.parametrize("seed", range(20))
def test_streamed_text_equals_decoded_text(any_kind: Tokenizer, seed: int) -> None:
    """Random ids: broken and split characters, specials, and ids that do not exist."""
    ids = np.random.default_rng(seed).integers(0, any_kind.vocab_size + 5, 40).tolist()
    stream = Stream(any_kind)
    parts = [stream.push(i) for i in ids]
    assert "".join(parts) + stream.flush() == any_kind.decode(ids)


def test_a_long_text_is_not_decoded_anew_with_each_token(unigram: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tokens are not bytes all before the new one were: 8,000 tokens of a prompt took nine seconds."""
    ids = [*unigram.encode("ab a  ab!a" * 40), *[1] * 80, *unigram.encode(" ab a " * 40), *[unigram.encode("a")[0]] * 40]
    stream, whole, most, decode = Stream(unigram), unigram.decode(ids), [0], unigram.decode
    monkeypatch.setattr(unigram, "decode", lambda some: most.append(len(some)) or decode(some))
    assert "".join(map(stream.push, ids)) + stream.flush() == whole
    assert max(most) < 200 < len(ids)


def test_ids_of_a_tensor_or_an_array_are_decoded_as_those_of_a_list(any_kind: Tokenizer) -> None:
    ids = any_kind.encode("abba")
    assert any_kind.decode(torch.tensor([-1, *ids])) == any_kind.decode(np.array(ids)) == any_kind.decode(ids) != ""


def test_streaming_holds_back_half_a_character(byte_tokenizer: Tokenizer) -> None:
    stream = Stream(byte_tokenizer)
    assert [stream.push(byte) for byte in "é👧".encode()] == ["", "é", "", "", "", "👧"]
    assert stream.push(0xC3) == "" and stream.flush() == "\ufffd"


def test_ids_of_a_tensor_or_an_array_are_decoded_too(any_kind: Tokenizer) -> None:
    """Of a tensor the text was empty, as of ids that no vocabulary has."""
    ids = any_kind.encode("ab")
    for given in (torch.tensor(ids), np.array(ids), np.array(ids, np.uint32), [*ids, -1, any_kind.vocab_size]):
        assert any_kind.decode(given) == any_kind.decode(ids) == "ab"


def test_decoding_equals_the_library(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    raw = RawTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for seed in range(20):
        ids = np.random.default_rng(seed).integers(0, bpe.vocab_size, 40).tolist()
        assert bpe.decode(ids) == raw.decode(ids, skip_special_tokens=True)


def test_saved_and_loaded_is_the_same_tokenizer(any_kind: Tokenizer, tmp_path: Path) -> None:
    any_kind.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = load_tokenizer(path)
        assert again.hash == any_kind.hash and again.specials == any_kind.specials
        assert again.document(CODE) == any_kind.document(CODE)


def test_training_twice_gives_the_same_tokenizer() -> None:
    first, second = (BPEConfig(vocab_size=600).build([CODE, SCRIPTS] * 30) for _ in range(2))
    assert first.hash == second.hash


def test_other_merges_or_other_specials_change_the_hash(bpe: Tokenizer, tmp_path: Path) -> None:
    other = BPEConfig(vocab_size=400).build([SCRIPTS * 50])
    bpe.save(tmp_path)
    renamed = TokenizerFileConfig(path=str(tmp_path / "tokenizer.json"), eos="<|pad|>").build()
    assert len({bpe.hash, other.hash, renamed.hash}) == 3


def test_a_line_break_keeps_its_indentation_by_the_own_split() -> None:
    own = BPEConfig(vocab_size=400, pattern="own").build([Path(module.__file__).read_text(encoding="utf-8"), CODE * 20])
    assert "):\n       " in [own.decode([i]) for i in own.encode("    def f(self):\n        self")]


def test_the_vocabulary_has_the_size_asked_for(bpe: Tokenizer) -> None:
    assert bpe.vocab_size == 400


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_a_long_document_encode_as_the_whole(any_kind: Tokenizer, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tokenizer that puts a space before each text it does not hold, and the docstring says so."""
    draw = np.random.default_rng(seed)
    text = "".join(draw.choice([CODE, SCRIPTS, LITERAL, "word", " ", "\n", "\n    ", "1234", "!?"], 200).tolist())
    monkeypatch.setattr(module, "MOST_CHARS", 100)
    cuts = np.sort(draw.integers(0, len(text), 3)).tolist()
    parts = list(split_text(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)))
    assert "".join(parts) == text and len(parts) > 10 and max(map(len, parts)) <= 100
    if any_kind.token_bytes() is not None:
        assert [i for ids in any_kind.encode_arrays(parts) for i in ids.tolist()] == any_kind.encode(text)


def test_a_document_without_a_blank_is_still_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CHARS", 100)
    assert list(map(len, split_text(["x" * 250]))) == [100, 100, 50]
    assert list(split_text(["", ""])) == []


def renamed_file(folder: Path, tokenizer: Tokenizer, names: dict[str, str]) -> Path:
    """The tokenizer's json with its specials under other names, and nothing beside it."""
    tokenizer.save(folder)
    text = (folder / "tokenizer.json").read_text()
    for old, new in names.items():
        text = text.replace(old, new)
    (folder / "given.json").write_text(text)
    (folder / "tokenizer_config.json").unlink()
    return folder / "given.json"


def test_a_given_file_has_its_specials_found_by_the_usual_names(bpe: Tokenizer, tmp_path: Path) -> None:
    path = renamed_file(tmp_path, bpe, {"<|bos|>": "<s>", "<|eos|>": "</s>", "<|pad|>": "[PAD]"})
    found = TokenizerFileConfig(path=str(path)).build()
    assert (found.bos, found.eos, found.pad) == (bpe.bos, bpe.eos, bpe.pad)


def test_one_end_of_text_token_is_eos_and_padding_and_separates_documents_once(bpe: Tokenizer, tmp_path: Path) -> None:
    path = renamed_file(tmp_path, bpe, {"<|bos|>": "<unused1>", "<|eos|>": "<|endoftext|>", "<|pad|>": "<unused2>"})
    found = TokenizerFileConfig(path=str(path)).build()
    assert (found.bos, found.eos, found.pad) == (None, bpe.eos, bpe.eos)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|endoftext|>"}))
    both = load_tokenizer(path)
    assert both.bos == both.eos == bpe.eos
    assert both.document("x") == found.document("x") == [*found.encode("x"), found.eos]


def test_an_unknown_special_is_refused_with_the_nearest(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer.eos: '<\|eoz\|>' is not in the vocabulary.*Did you mean '<\|eos\|>'"):
        TokenizerFileConfig(path=str(tmp_path / "tokenizer.json"), eos="<|eoz|>").build()


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/tokenizer.json does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match=f"{tmp_path}/tokenizer.json is not a tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=f"{tmp_path}/tokenizer_config.json: the file is damaged: it is not JSON"):
        load_tokenizer(tmp_path)


def test_transformers_reads_the_saved_folder(bpe: Tokenizer, byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, ours in (("bpe", bpe), ("bytes", byte_tokenizer)):
        ours.save(tmp_path / name)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (ours.bos, ours.eos, ours.pad)
        ids = theirs.encode(CODE + SCRIPTS, add_special_tokens=False)
        assert ids == ours.encode(CODE + SCRIPTS) and theirs.decode(ids) == CODE + SCRIPTS


WORLD = [
    "中文维基百科，自由的百科全书。", "مرحبا بالعالم، كيف حالك؟", "हिन्दी और தமிழ்", "👩‍👩‍👧‍👦🇩🇪🏳️‍🌈 ok",
    "Mixed: naïve Ünïcode 日本語 العربية 🎉\n\tкод",
    "\u200d\ufeff\u2028 odd", "x" * 5_000, "漢" * 400, "<|eos|> is <|bos|> text",
]  # fmt: skip


TRAINED = [BPEConfig(vocab_size=420), UnigramConfig(vocab_size=420), WordPieceConfig(vocab_size=420)]
ASCII = "The quick brown fox.\n    def f(x):\n" * 40
EVERY_KIND = [BytesConfig(), *TRAINED, *(cfg.replace(pattern=pattern) for cfg in TRAINED for pattern in ("gpt2", "gpt4", "llama3"))]


@pytest.mark.parametrize("cfg", EVERY_KIND, ids=lambda cfg: f"{cfg.kind}-{cfg.tree().get('pattern')}")
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_kind_gives_text_of_any_script_back_and_streams_it_whole(cfg: Any, ascii_only: bool, tmp_path: Path) -> None:
    """Whether or not it has seen such a script, for each byte is in the vocabulary."""
    built = cfg.build([ASCII] if ascii_only else [ASCII, *WORLD[:3]])
    built.save(tmp_path)
    for tokenizer in (built, load_tokenizer(tmp_path)):
        for text in WORLD:
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text and not set(ids) & set(tokenizer.special_ids().tolist())
            stream = Stream(tokenizer)
            chunks = [stream.push(token) for token in ids]
            assert "".join(chunks) + stream.flush() == text and "\ufffd" not in "".join(chunks)


def test_long_words_are_cut_in_training_alone() -> None:
    """Seen to fail: training took time quadratic in a word's length, and a line of 3 MB had no end in six minutes."""
    found = BPEConfig(vocab_size=280).build(["b" * (3 * LONGEST)])
    assert [found.token_text(i) for i in found.encode("b" * (2 * LONGEST))] == [b"b" * LONGEST] * 2
    assert str(LONGEST) not in json.dumps(found.content()["pre_tokenizer"])


def test_a_run_that_was_begun_with_the_file_of_a_model_alone_goes_on(tmp_path: Path) -> None:
    """Seen to fail: the folder's add_bos_token, which older versions did not read, made it another tokenizer."""
    made = BytesConfig().build()
    made.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"add_bos_token": False}))
    given = TokenizerFileConfig(path=str(tmp_path / "tokenizer.json"))
    alone = given.build().hash
    (tmp_path / "manifest.json").write_text("{}")
    assert given.build().hash != alone and given.gave(alone) and given.gave(given.build().hash) and not given.gave("another")


def test_the_folder_of_a_tokenizer_stands_for_its_file(tmp_path: Path) -> None:
    """As `lm tokenizer out=FOLDER` names it. Seen to fail: a folder 'cannot be read (Is a directory)'."""
    made = BytesConfig().build()
    made.save(tmp_path)
    assert TokenizerFileConfig(path=str(tmp_path)).build().hash == made.hash
    shutil.copytree(tmp_path, tmp_path / "run" / "model")
    assert TokenizerFileConfig(path=str(tmp_path / "run")).build().hash == made.hash
    with pytest.raises(ConfigError, match=f"{tmp_path.parent}/tokenizer.json does not exist"):
        TokenizerFileConfig(path=str(tmp_path.parent)).build()


@pytest.mark.parametrize("blanks", ["\r\n", " \n", "\u00a0"])
def test_long_runs_of_any_blanks_are_cut_in_training(blanks: str) -> None:
    """Seen to fail: only runs of one kind of blank, tab or line feed were."""
    assert max(map(len, _shortened(f"a{blanks * LONGEST * 2}b"))) == LONGEST
    assert len(list(_shortened(f"a{blanks * 9}b"))) == 1


def test_patterns_cut_as_their_models_do() -> None:
    """Numbers whole in GPT-2's, in threes in the others; a line's end joined to the punctuation before it only in GPT-4's."""
    texts = ["1234567 1234567;\n1234567;\n"] * 50
    cuts = {}
    for pattern in ("gpt2", "gpt4", "llama3"):
        tokenizer = BPEConfig(vocab_size=300, pattern=pattern).build(texts)
        cuts[pattern] = [tokenizer.token_text(i) for i in tokenizer.encode("1234567;\n")]
    assert cuts["gpt2"] == [b"1234567", b";", b"\n"]
    assert cuts["gpt4"] == cuts["llama3"] == [b"123", b"456", b"7", b";\n"]


@pytest.mark.parametrize(
    ("specials", "fault"),
    [
        (["<|a|>", ""], "'' is empty"),
        (["<|a|>", "<|b|>", "<|a|>"], "'<|a|>' is named twice"),
        (["<|a|>", "é"], "'é' is how the vocabulary"),
    ],
)
def test_specials_that_no_tokenizer_could_have_are_refused(specials: list[str], fault: str) -> None:
    """Seen to fail: texts lost every letter of which a special token was named."""
    with pytest.raises(ConfigError, match=rf"specials(\.1)?: {re.escape(fault)}"):
        from_tree(BPEConfig, {"kind": "bpe", "specials": specials})


@pytest.mark.parametrize("where", ["vocabulary", "added token", "no added tokens", "beside a number of 31 digits"])
def test_an_id_of_billions_is_refused_before_the_library_asks_for_their_memory(where: str, tmp_path: Path) -> None:
    """Seen to fail in the last two, which the library reads: the process filled the memory, and was aborted."""
    BytesConfig().build().save(tmp_path)
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text())
    place, key = (tree["added_tokens"][0], "id") if where == "added token" else (tree["model"]["vocab"], next(iter(tree["model"]["vocab"])))
    place[key] = 1 << 31
    if where == "no added tokens":
        del tree["added_tokens"]
    if where == "beside a number of 31 digits":
        tree["model"]["unread"] = 10**30
    file.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="has the id 2,147,483,648, and ids are below 16,777,216"):
        load_tokenizer(tmp_path)


def test_a_regex_that_goes_back_without_end_is_told_in_one_sentence() -> None:
    """Seen to fail: the library panics, and what it raises then was caught nowhere."""
    raw = RawTokenizer(models.BPE(vocab={"x": 0, "</s>": 1}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    raw.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex(r"(\w+\w+)+\b\B"), "")])
    tokenizer = Tokenizer(raw, Specials(None, "</s>", None))
    for breaks in (lambda: tokenizer.encode("x" * 60 + "y" + "x" * 60), lambda: tokenizer.decode([0] * 60)):
        with pytest.raises(ConfigError, match=r"^tokenizer: the tokenizers library breaks on this text \(Onig: .*retry-limit.*\)\. Use"):
            breaks()


def test_a_special_token_whose_id_another_token_has_is_refused() -> None:
    """The library counts tokens to choose an id. Seen to fail: the new one took the place of c."""
    holes = Tokenizer(RawTokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 3}, merges=[])), Specials(None, None, None))
    assert grown(holes, []) is holes
    with pytest.raises(ConfigError, match=r"tokenizer\.specials: <\|x\|> would get the id 3, which another token has"):
        grown(holes, ["<|x|>"])


def test_tokenizers_that_differ_only_in_where_a_token_is_said_to_be_cut_alike(bpe: Tokenizer) -> None:
    """As of Qwen's models, published, and as transformers 5 saves them: one could not teach the other."""

    def changed(key: str) -> Tokenizer:
        content = bpe.content()
        by_bytes = content["pre_tokenizer"]["pretokenizers"][-1]
        by_bytes[key] = not by_bytes[key]
        return Tokenizer(RawTokenizer.from_str(json.dumps(content)), bpe.specials)

    saved = changed("trim_offsets")
    assert saved.hash != bpe.hash and unlike(saved, bpe) is None
    assert unlike(changed("use_regex"), bpe) == "which has all tokens of this one and cuts texts otherwise"


def test_a_folder_of_transformers_names_special_tokens_that_are_not_usual(tmp_path: Path) -> None:
    """Seen to fail: no document began or ended with any token, and nothing said so."""
    raw = RawTokenizer(models.WordLevel({"a": 0, "[GO]": 1, "[STOP]": 2, "?": 3}, unk_token="?"))
    raw.add_special_tokens(["[GO]", "[STOP]"])
    raw.save(str(tmp_path / "tokenizer.json"))
    given = TokenizerFileConfig(path=str(tmp_path))
    assert given.build().specials == (None, None, None)
    named = {"bos_token": "[GO]", "eos_token": {"content": "[STOP]"}, "pad_token": "[PAD]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert given.build().specials == ("[GO]", "[STOP]", None) and given.build().document("a") == [1, 0, 2]
    assert TokenizerFileConfig(path=str(tmp_path), eos="[GO]").build().specials == (None, "[GO]", None)
    (tmp_path / "tokenizer_config.json").write_text("{torn")
    assert given.build().specials == (None, None, None)
