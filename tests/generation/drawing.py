"""The new tokens of prompts that are token ids, as most tests compare them."""

from collections.abc import Collection, Sequence

from lm.generation.config import SamplingConfig
from lm.generation.decode import decode
from lm.generation.loop import OnToken, Vocabulary
from lm.nn.transformer import LM


def generate(
    model: LM,
    prompts: Sequence[Sequence[int]],
    cfg: SamplingConfig,
    *,
    ends: Collection[int] = (),
    n_tokens: int | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Those of the rows that `decode` returns.  n_tokens: of the vocabulary; None: the model's."""
    vocabulary = Vocabulary(n_tokens or model.vocab_size, ends)
    return [row.new for row in decode(model, prompts, cfg, vocabulary, on_token=on_token)]
