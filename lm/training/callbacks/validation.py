"""What a model is worth at a step: its losses on held-out rows, which the ranks share, and what it writes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from lm.config import Tree
from lm.data.order import spread
from lm.data.rows.base import Rows
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.generation.evaluate import Evaluation, evaluate
from lm.generation.load import generate
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.launch.ranks import Ranks


@dataclass(frozen=True)
class Validation:
    """All methods are called by every rank, and give every rank the same."""

    cfg: TrainConfig
    model: LM
    tokenizer: Tokenizer
    rows: Rows
    sets: dict[str, Rows]  # validated on their own too, by name
    ranks: Ranks

    def losses(self) -> Tree:
        """As metrics.jsonl has them."""
        found: Tree = {}
        for suffix, rows in [("", self.rows), *((f"/{name}", rows) for name, rows in self.sets.items())]:
            of = self._evaluate(rows)
            found |= {f"val_loss{suffix}": of["val_loss"], f"val_bits_per_byte{suffix}": of["val_bits_per_byte"]}
        return found

    def _evaluate(self, rows: Rows) -> Evaluation:
        ids = spread(len(rows), self.cfg.data.val_rows)
        return evaluate(self.model, rows, ids, self.tokenizer, self.cfg.trainer.micro_batch, self.ranks)

    def samples(self) -> list[Sequence[str]]:
        """For each prompt the text with its continuation; of an encoder-decoder, which answers, the two apart."""
        prompts = self.cfg.trainer.sample_prompts
        if not prompts or self.model.cfg.kind == "encoder":
            return []
        options: Tree = {"max_tokens": self.cfg.trainer.sample_tokens, "temperature": 0.8, "top_p": 0.95, "seed": self.cfg.seed}
        with self._eager():
            texts = [generate(self.model, self.tokenizer, prompt, **options) for prompt in prompts]
        apart = self.model.cfg.kind == "encoder_decoder"
        return [(prompt, text) if apart else (prompt + text,) for prompt, text in zip(prompts, texts, strict=True)]

    def _eager(self) -> AbstractContextManager[None]:
        """Sampling changes shapes at each token, which would compile anew each time."""
        return torch.compiler.set_stance("force_eager") if self.cfg.trainer.compile else nullcontext()
