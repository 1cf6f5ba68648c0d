"""Models that are means of others."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lm.data.kinds import BPEConfig
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.merging import linear, merge, slerp, ties
from lm.storage.checkpoint import Piece
from lm.storage.model_folder import save_model
from tests.conftest import Lm
from tests.generation.conftest import Save
from tests.nn.models import config, redrawn
from tests.runs import save_checkpoint


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_slerp_keeps_to_the_arc() -> None:
    """At every place of it the angle to the first one is the share of the whole angle, and of two of one length, so is the length."""
    a, b = drawn(40), drawn(40, seed=1)
    b *= a.norm() / b.norm()
    angle = torch.arccos(a @ b / a.norm() ** 2).item()
    for t in (0.0, 0.25, 0.6, 1.0):
        found = slerp([a.view(5, 8), b.view(5, 8)], [1 - t, t]).flatten()
        assert found.norm().item() == pytest.approx(a.norm().item(), rel=1e-9)
        cosine = found @ a / a.norm() ** 2
        assert torch.arccos(cosine.clip(-1, 1)).item() == pytest.approx(t * angle, abs=1e-6)
    torch.testing.assert_close(slerp([a, 3 * a], [0.5, 0.5]), 2 * a)
    torch.testing.assert_close(slerp([a, 0 * a], [0.5, 0.5]), 0.5 * a)


def ties_of_the_paper(changes: list[list[float]], density: float) -> list[float]:
    """Algorithm 1 of Yadav et al. 2023, number by number."""
    kept = []
    for change in changes:
        n = round(density * len(change))
        large = set(sorted(range(len(change)), key=lambda i: -abs(change[i]))[:n])
        kept.append([value if i in large else 0.0 for i, value in enumerate(change)])
    merged = []
    for values in zip(*kept, strict=True):
        sign = np.sign(sum(values))
        agreeing = [value for value in values if value and np.sign(value) == sign]
        merged.append(float(np.mean(agreeing)) if agreeing else 0.0)
    return merged


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_ties_is_that_of_the_paper(density: float) -> None:
    """Seen to fail where what was trimmed counts in the mean."""
    changes = [drawn(50, seed=seed) for seed in range(3)]
    found = ties(changes, [1 / 3] * 3, density)
    assert found.tolist() == pytest.approx(ties_of_the_paper([change.tolist() for change in changes], density), abs=1e-12)


def test_a_share_of_all_is_that_model() -> None:
    a, b = drawn(3, 4), drawn(3, 4, seed=1)
    for found in (linear([a, b], [1.0, 0.0]), slerp([a, b], [1.0, 0.0]), ties([a, b], [1.0, 0.0], 1.0)):
        torch.testing.assert_close(found, a)


def test_merged_models_are_models(save: Save, tmp_path: Path, lm: Lm) -> None:
    a, b, base = save("a", 1), save("b", 2), save("base", 0)
    for given in (["weights=1,3"], ["method=slerp"], ["method=ties", f"base={base}", "density=0.5"]):
        code, out, err = lm("merge", str(a), str(b), f"out={tmp_path / 'c'}", "overwrite=true", *given)
        assert code == 0 and "of 2 models" in out, err
        assert lm("generate", f"from={tmp_path / 'c'}", "prompt=x", "max_tokens=3")[0] == 0
    merge([a, b], tmp_path / "d", weights=[1, 3])
    for name, found in weights(tmp_path / "d").items():
        torch.testing.assert_close(found, 0.25 * weights(a)[name] + 0.75 * weights(b)[name])
    told = json.loads((tmp_path / "d" / "config.json").read_text())["merged"]
    assert told == {"models": [str(a), str(b)], "weights": [0.25, 0.75], "method": "linear"}


def test_a_whole_of_one_model_comes_back_from_ties(save: Save, tmp_path: Path) -> None:
    a, base = save("a", 1), save("base", 0)
    merge([a, a], tmp_path / "c", method="ties", base=base, density=1.0)
    for name, found in weights(tmp_path / "c").items():
        torch.testing.assert_close(found, weights(a)[name], rtol=0.0, atol=1e-5)


def test_the_newest_checkpoints_of_a_run_are_averaged(save: Save, tmp_path: Path, tokenizer: Tokenizer, lm: Lm) -> None:
    model, run = redrawn(config(vocab_size=320), 0), tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: a}\n")
    for step, times in ((1, 100.0), (2, 1.0), (3, 3.0)):
        pieces = [Piece.whole(name, "weight", times * p.detach()) for name, p in model.named_parameters()]
        meta = {"step": step, "model": model.cfg.tree()}
        save_checkpoint(run / "checkpoints" / f"step-{step:08d}", pieces, meta, tokenizer.save)
    code, out, err = lm("average", str(run), "last=2", f"out={tmp_path / 'mean'}")
    assert code == 0 and "the mean of 2 checkpoints" in out, err
    for name, p in model.named_parameters():
        torch.testing.assert_close(weights(tmp_path / "mean")[name], 2 * p.detach())
    code, _, err = lm("average", str(run), "last=4", f"out={tmp_path / 'more'}")
    assert code == 2 and err.splitlines()[-1].startswith(f"{run}: it has 3 checkpoints, and last=4 are to be averaged. Write last=3, ")
    assert lm("average", str(run), f"out={tmp_path / 'all'}")[0] == 0
    name, p = next(model.named_parameters())
    torch.testing.assert_close(weights(tmp_path / "all")[name], 104 / 3 * p.detach())
    for step in (1, 2):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    code, _, err = lm("average", str(run), f"out={tmp_path / 'none'}")
    assert code == 2 and "it has 1 checkpoint, and a mean is of two at least. Train with" in err


def test_what_does_not_belong_together_is_refused(save: Save, tmp_path: Path) -> None:
    a, b = save("a", 1), save("b", 2)
    wide, deep = save("wide", 1, d_model=64), save("deep", 1, n_layers=2)
    streams = save("streams", 1, residual={"kind": "hyper"})  # whose options, such as eps, stand before their kind
    refused = [
        (([a, wide], {}), r"wide: model\.d_model is 64, and \d+ in .*/a; models of one architecture"),
        (([a, b, deep], {}), r"deep: model\.n_layers is 2"),
        (([a, streams], {}), r"streams: model\.residual\.kind is hyper, and plain in .*/a; models of one"),
        (([a], {}), "merge: 1 model was given"),
        (([a, b, b], {"method": "slerp"}), "method=slerp: .* 3 were given"),
        (([a, b], {"method": "ties"}), r"method=ties: base=None"),
        (([a, b], {"base": a}), "method=linear: base="),
        (([a, b], {"weights": [1.0]}), r"weights=\[1.0\]: one for each of 2 models"),
        (([a, b], {"weights": [1.0, -1.0]}), r"weights=\[1.0, -1.0\]"),
        (([a, b], {"method": "ties", "base": a, "density": 0.0}), "density=0.0"),
    ]
    for (models, options), said in refused:
        with pytest.raises(ConfigError, match=said):
            merge(models, tmp_path / "out", **options)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="it exists already"):
        merge([a, b], tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_models_of_two_tokenizers_are_refused(save: Save, tmp_path: Path) -> None:
    a, model = save("a", 1), redrawn(config(vocab_size=320), 2)
    other = BPEConfig(vocab_size=300).build(["one and two and three " * 20])
    save_model(tmp_path / "b", model.cfg.tree(), dict(model.named_parameters()), other.save, {})
    with pytest.raises(ConfigError, match=r"b: its tokenizer is not that of .*/a"):
        merge([a, tmp_path / "b"], tmp_path / "out")


def test_what_the_method_does_not_read_is_refused(save: Save, tmp_path: Path, lm: Lm) -> None:
    a, b = save("a", 1), save("b", 2)
    code, _, err = lm("merge", str(a), str(b), f"out={tmp_path / 'c'}", "density=0.5")
    assert code == 2 and "density=0.5: method=linear keeps all of each model" in err
