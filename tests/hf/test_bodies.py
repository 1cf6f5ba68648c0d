"""Encoders without a head: read from `...Model` of transformers, trained to make vectors, and written back."""

import json
import random
from contextlib import suppress
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402

import lm  # noqa: E402
from lm.cli.compose.compose import compose_config  # noqa: E402
from lm.cli.main import main  # noqa: E402
from lm.data.rows.labelled import with_labels  # noqa: E402
from lm.data.tokenizer.config import BytesConfig  # noqa: E402
from lm.errors import ConfigError  # noqa: E402
from lm.hf.io.bodies import BODIES, bodies, headless  # noqa: E402
from lm.hf.io.check import compare  # noqa: E402
from lm.hf.io.classifier import TASK  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.io.writing import family_for, write_hf  # noqa: E402
from lm.nn.batch import Batch  # noqa: E402
from lm.nn.head import HeadConfig  # noqa: E402
from lm.nn.model_config import ModelConfig  # noqa: E402
from lm.nn.transformer import build_model  # noqa: E402
from lm.testing.models import random_model  # noqa: E402
from lm.training.run import train_rank  # noqa: E402
from tests.hf.draws import held  # noqa: E402
from tests.hf.harness import change, ours_of  # noqa: E402
from tests.training.conftest import TINY  # noqa: E402


def drawn(name: str) -> ModelConfig:
    """A random model that this family holds, without its head; of embeddings of one number a norm would leave nothing."""
    source = random.Random(name)
    while True:
        with suppress(ConfigError):
            found = held(source, name).replace(head=HeadConfig())
            if found.embed.factorized is None or found.embed.factorized.width > 1:
                return found


@pytest.mark.parametrize("name", BODIES)
def test_transformers_computes_the_same_states_both_ways(name: str, tmp_path: Path) -> None:
    cfg = drawn(name)
    family = family_for(cfg, name)
    assert headless(cfg) and family.homeless(cfg) == [] and family.architecture == bodies()[name].architecture
    model = build_model(cfg, seed=1)
    if model.head.narrow is not None:
        model.head.narrow.weight.data.zero_()
    weights = {key: p.detach() for key, p in model.named_parameters()}
    write_hf(tmp_path, family, cfg, weights, None)
    found = compare(tmp_path, family, model)
    assert found.what == "state" and found.spread > 1e-3 and found.difference < 1e-4 * max(1.0, found.spread)
    back = read_hf(tmp_path)
    assert headless(back.config) and back.family.name == name and back.weights.keys() == weights.keys()
    assert all(torch.equal(back.weights[key], weight) for key, weight in weights.items())
    theirs = transformers.AutoModel.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "saved")  # with a pooler, as published ones have it
    again = read_hf(tmp_path / "saved")
    assert all(torch.equal(again.weights[key], weight) for key, weight in weights.items())


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_learns_labels_has_what_stands_before_them_in_a_class_of_transformers(name: str, tmp_path: Path) -> None:
    """Seen to fail: their labels were read off bare states, and every export was refused."""
    cfg = with_labels(drawn(name), ["no", "yes"])
    family, model = family_for(cfg, imported=name), random_model(cfg, seed=1)
    assert family.architecture.endswith(TASK)
    write_hf(tmp_path, family, cfg, {key: p.detach() for key, p in model.named_parameters()}, None)
    if family.pad is None:
        change(tmp_path, pad_token_id=0)
    found = compare(tmp_path, family, model)
    assert found.spread > 1e-3 and found.difference < 1e-4 * max(1.0, found.spread)


def test_a_body_under_another_head_is_read(tmp_path: Path) -> None:
    """As ELECTRA's discriminators are published, and as narrow. What has been trained behind its narrow embedding comes back."""
    sizes = {"hidden_size": 32, "embedding_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    theirs = transformers.ElectraForPreTraining(transformers.ElectraConfig(vocab_size=260, max_position_embeddings=64, **sizes)).eval()
    theirs.save_pretrained(tmp_path / "there")
    found, ids = read_hf(tmp_path / "there"), torch.tensor([[5, 9, 200, 7]])
    model = ours_of(found).float()
    with torch.no_grad():
        states = model(Batch(ids), read=lambda hidden, head, ctx: hidden)
        torch.testing.assert_close(states, theirs.electra(ids).last_hidden_state, atol=1e-5, rtol=1e-4)
        assert not model(ids).any()
    family = family_for(found.config, "electra")
    for trained in (torch.zeros(16, 32), torch.ones(16, 32)):
        write_hf(tmp_path / "back", family, found.config, found.weights | {"head.narrow.weight": trained}, None)
        assert torch.equal(read_hf(tmp_path / "back").weights["head.narrow.weight"], trained)
        assert isinstance(transformers.AutoModel.from_pretrained(tmp_path / "back"), transformers.ElectraModel)


@pytest.mark.slow
def test_a_published_model_of_vectors_is_trained_on_and_written_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As BGE and MiniLM are published: BertModel with the files of sentence-transformers."""
    config = transformers.BertConfig(
        vocab_size=260, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=64
    )
    torch.manual_seed(0)
    theirs = transformers.BertModel(config).eval()
    theirs.save_pretrained(tmp_path / "there")
    BytesConfig().build().save(tmp_path / "there")
    (tmp_path / "there/modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]))
    (tmp_path / "there/1_Pooling").mkdir()
    (tmp_path / "there/1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    assert main(["import", f"from={tmp_path / 'there'}", f"out={tmp_path / 'here'}"]) == 0
    said = capsys.readouterr()
    assert "the model has no head: lm embed makes vectors by it" in said.err and "Try it: lm embed from=" in said.out
    net, tokenizer = lm.load(tmp_path / "here")
    ids = torch.tensor([[*tokenizer.prefix, *tokenizer.encode("the sea"), *tokenizer.suffix]])
    with torch.no_grad():
        expected = theirs(ids).last_hidden_state.mean(1)
        torch.testing.assert_close(net(Batch(ids), read=lambda hidden, head, ctx: hidden[:, 0]), expected, atol=1e-5, rtol=1e-4)
    pairs = [json.dumps({"query": f"what is {n}", "answer": f"{n} is it"}) + "\n" for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(pairs))
    kept = [each for each in TINY if not each.startswith(("model", "tokenizer", "data=", "data.files=", "data.val"))]
    given = ["data=alike", f"data.files={tmp_path / 'pairs.jsonl'}", "data.val_frac=0.3", "objective=contrastive", "objective.among=4"]
    train_rank(compose_config([*kept, *given, f"init_from={tmp_path / 'here'}", f"run.dir={tmp_path}", "run.name=run"]))
    assert main(["export", f"from={tmp_path / 'run'}", f"out={tmp_path / 'back'}"]) == 0
    out = capsys.readouterr().out
    assert "BertModel" in out and "largest state difference to transformers" in out and "sentence-transformers" in out
    trained = transformers.AutoModel.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        vector = torch.nn.functional.normalize(trained(ids).last_hidden_state.mean(1), dim=-1)
    torch.testing.assert_close(lm.embed(*lm.load(tmp_path / "run"), ["the sea"]), vector, atol=1e-5, rtol=1e-4)
    assert (tmp_path / "back/1_Pooling/config.json").exists()


def test_a_decoder_without_a_head_takes_the_embedding_for_it(tmp_path: Path) -> None:
    """As E5-Mistral is published. Seen to fail: lm_head.weight was missing."""
    for kind in ("Mistral", "Qwen2"):
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=260, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64,
            max_position_embeddings=64, tie_word_embeddings=False,
        )  # fmt: skip
        theirs = getattr(transformers, f"{kind}Model")(config).eval()
        theirs.save_pretrained(tmp_path / kind)
        BytesConfig().build().save(tmp_path / kind)
        said: list[str] = []
        lm.import_model(tmp_path / kind, tmp_path / f"{kind}_here", say=said.append)
        assert any(f"{kind}Model has no head, and the embedding takes its place" in line for line in said)
        net, tokenizer = lm.load(tmp_path / f"{kind}_here")
        assert net.cfg.head.tied
        ids = torch.tensor([[*tokenizer.prefix, *tokenizer.encode("the sea")]])
        with torch.no_grad():
            vector = torch.nn.functional.normalize(theirs(ids).last_hidden_state[:, -1], dim=-1)
        torch.testing.assert_close(lm.embed(net, tokenizer, ["the sea"]), vector, atol=1e-5, rtol=1e-4)


def test_a_head_whose_only_matrix_is_the_embedding_comes_back_as_it_was_read(tmp_path: Path) -> None:
    """Seen to fail: EuroBERT's, tied, was taken for none, and no body is an EuroBERT."""
    config = transformers.EuroBertConfig(
        vocab_size=260, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64,
        max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3,
    )  # fmt: skip
    transformers.EuroBertForMaskedLM(config).save_pretrained(tmp_path / "theirs")
    found = read_hf(tmp_path / "theirs")
    model = build_model(found.config, seed=1)
    family = family_for(found.config, imported="eurobert")
    write_hf(tmp_path / "back", family, found.config, {key: p.detach() for key, p in model.named_parameters()}, None)
    compared = compare(tmp_path / "back", family, model)
    assert family.architecture == "EuroBertForMaskedLM" and compared.what == "logit" and compared.difference < 1e-4
