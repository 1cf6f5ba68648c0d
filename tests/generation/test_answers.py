"""Encoder-decoders: the prompt is the source. Cached decoding = full forwards; the source is read once; where an answer ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lm as library
from lm.data.kinds import PairRecord, Seq2SeqConfig, TextConfig
from lm.data.rows.build import build_rows
from lm.data.store.prepare import Prepared
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.decode import begin
from lm.generation.writer import Writer
from lm.nn.batch import Batch
from lm.nn.model_config import model_config
from lm.nn.transformer import LM, build_model
from lm.schema import from_tree
from lm.storage.model_folder import save_model
from lm.testing.models import BASE, redraw
from tests.conftest import Lm
from tests.generation.drawing import generate
from tests.nn.models import near, with_kinds

SOURCES = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [40, 41], [60, 2, 5, 5, 1]]
START = 7
MOE = {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"kind": "mlp", "hidden": 24}, "router": {"kind": "sigmoid"}}
MODELS: list[dict[str, Any]] = [
    {"position": {"kind": "t5_relative"}, "attention": {"n_heads": 4, "scale": 1.0}},
    {"position": {"kind": "rope"}, "attention": {"n_heads": 4, "n_kv_heads": 2, "qk_norm": "head"}, "n_encoder_layers": 1},
    {"position": {"kind": "learned"}, "norm": {"kind": "layer", "place": "post"}, "embed": {"norm": True}, "dropout": 0.5},
    {"position": {"kind": "alibi"}, "attention": {"n_heads": 4, "window": 5, "qkv_bias": True, "out_bias": True}},
    {"position": {"kind": "sinusoidal"}, "norm": {"kind": "rms", "place": "sandwich"}, "head": {"tied": False, "bias": True}},
    {"ffn": MOE},
]


def encoder_decoder(**changes: Any) -> LM:
    tree = {**BASE, "kind": "encoder_decoder", "start_token": START, **changes}
    model = build_model(model_config(with_kinds(tree)), seed=0).eval()
    redraw(model)
    return model


def cfg(**options: Any) -> SamplingConfig:
    return from_tree(SamplingConfig, {"max_tokens": 20, **options})


def by_full_forwards(model: LM, source: list[int], n: int) -> list[int]:
    tokens = [START]
    for _ in range(n):
        logits = model(Batch(torch.tensor([tokens]), source_tokens=torch.tensor([source])))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[1:]


@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_greedy_answers_to_a_batch_of_sources_equal_full_forwards_of_each(changes: dict[str, Any]) -> None:
    model = encoder_decoder(**changes)
    alone = [by_full_forwards(model, source, 20) for source in SOURCES]
    assert generate(model, SOURCES, cfg(temperature=0)) == alone
    assert len(set(map(tuple, alone))) > 1, "the source makes no difference"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_a_source_changes_nothing(side: str) -> None:
    model, source, n = encoder_decoder(), torch.tensor([SOURCES[0]]), len(SOURCES[0])
    tokens, filler = torch.tensor([[START, 4, 5]]), torch.full((1, 6), 50)
    places, hidden = torch.arange(n)[None], torch.full((1, 6), -1)
    parts = ((filler, source), (hidden, places)) if side == "left" else ((source, filler), (places, hidden))
    padded, positions = (torch.cat(pair, dim=1) for pair in parts)
    found = model(Batch(tokens, source_tokens=padded, source_positions=positions))
    near(found, model(Batch(tokens, source_tokens=source)))


@pytest.mark.parametrize("options", [{"temperature": 1.0, "top_p": 0.95}, {"temperature": 0.9, "repetition_penalty": 1.4}], ids=str)
def test_sources_together_give_what_each_gives_alone_and_eos_ends_a_row(options: dict[str, Any]) -> None:
    model = encoder_decoder(**MODELS[0])
    free = generate(model, SOURCES, cfg(**options))
    eos = free[1][5]
    alone = [generate(model, [source], cfg(**options), ends={eos})[0] for source in SOURCES]
    assert generate(model, SOURCES, cfg(**options), ends={eos}) == alone
    assert alone == [new[: new.index(eos)] if eos in new else new for new in free]
    assert len(set(map(len, alone))) > 1


def test_the_source_is_encoded_and_projected_once() -> None:
    model, encoded, projected = encoder_decoder(), [], []
    model.encoder.blocks[0].register_forward_hook(lambda *_: encoded.append(1))
    for block in model.blocks:
        block.cross.k.register_forward_hook(lambda *_: projected.append(1))
    generate(model, SOURCES, cfg())
    assert (len(encoded), len(projected)) == (1, len(model.blocks))


def test_an_answer_may_fill_the_context_whatever_the_length_of_its_source() -> None:
    model = encoder_decoder(position={"kind": "learned"})
    found = generate(model, [[1] * 48, [1]], cfg(max_tokens=100))
    assert [len(new) for new in found] == [48, 48]


def test_a_source_longer_than_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"49 tokens .* model\.max_seq_len=48"):
        generate(encoder_decoder(position={"kind": "learned"}), [[1] * 49], cfg())


def test_encoders_and_decoders_without_a_start_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the model is an encoder.*Use lm fill, or a model of kind decoder or encoder_decoder"):
        generate(build_model(model_config(with_kinds({**BASE, "kind": "encoder"})), seed=0), [[1]], cfg())
    with pytest.raises(ConfigError, match=r"model\.start_token is null.*Set it to"):
        generate(encoder_decoder(start_token=None), [[1]], cfg())


def test_pieces_of_an_answer_joined_are_the_answer_and_stop_texts_end_it(tokenizer: Tokenizer) -> None:
    model, heard = encoder_decoder(vocab_size=320), {0: "", 1: ""}

    def listen(row: int, piece: str) -> None:
        heard[row] += piece

    found = Writer(model, tokenizer, cfg()).complete(["abc", ""], listen)
    assert [completion.text for completion in found] == list(heard.values())
    assert library.generate(model, tokenizer, ["abc", ""], max_tokens=20) == list(heard.values())
    stop = heard[0][4:6]
    assert library.generate(model, tokenizer, "abc", max_tokens=20, stop=[stop]) == heard[0][: heard[0].index(stop)]


def test_a_prompt_is_read_as_the_sources_of_training_were(prepare_pairs: Callable[[], Prepared]) -> None:
    found = prepare_pairs()
    rows = build_rows(Seq2SeqConfig(), TextConfig(files="x", seq_len=64), found.train, found.tokenizer, encoder_decoder().cfg)
    batch = rows.batch(np.array([0]))
    assert batch.source_tokens is not None and batch.source_positions is not None
    read = batch.source_tokens[0][batch.source_positions[0] >= 0].tolist()
    text = found.tokenizer.decode(read)
    assert Writer(encoder_decoder(vocab_size=320), found.tokenizer).ids(text) == read
    assert batch.tokens[0, :1].tolist() == begin(encoder_decoder(), read)


@pytest.fixture
def prepare_pairs(tmp_path: Path) -> Callable[[], Prepared]:
    from lm.data.kinds import BytesConfig
    from lm.data.store.prepare import prepare

    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f'{{"source": "question {n}", "target": "answer {n}"}}\n' for n in range(60)))
    data = TextConfig(files=str(path), record=PairRecord(), cache_dir=str(tmp_path / "cache"))
    return lambda: prepare(data, BytesConfig(), log=lambda line: None)


def test_the_command_prints_answers_alone(lm: Lm, tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = encoder_decoder(vocab_size=320, start_token=None, position={"kind": "learned"})
    save_model(tmp_path / "m", model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {})
    loaded, _ = library.load(tmp_path / "m", device="cpu")
    assert begin(loaded, [1]) == [tokenizer.bos]
    texts = [library.generate(loaded, tokenizer, prompt, max_tokens=9, temperature=0) for prompt in ("abc", "d")]
    options = (f"from={tmp_path / 'm'}", "max_tokens=9", "temperature=0")
    assert lm("generate", *options, "prompt=abc") == (0, texts[0] + "\n", "")
    assert lm("generate", *options, "prompt=abc", "prompt=d") == (0, f"--- 1 of 2 ---\n{texts[0]}\n--- 2 of 2 ---\n{texts[1]}\n", "")
    code, out, err = lm("generate", *options, f"prompt={'a' * 47}")
    assert (code, out) == (2, "") and "49 tokens are more than model.max_seq_len=48" in err


def test_the_command_refuses_an_encoder(lm: Lm, tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = build_model(model_config(with_kinds({**BASE, "kind": "encoder", "vocab_size": 320})), seed=0)
    save_model(tmp_path / "m", model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {})
    code, out, err = lm("generate", f"from={tmp_path / 'm'}", "prompt=a")
    assert (code, out) == (2, "") and "the model is an encoder" in err
