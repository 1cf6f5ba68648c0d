"""Embeddings that are narrower than the model."""

from typing import Literal

from pydantic import Field

from lm.schema import MOST, Config


class FactorizedConfig(Config):
    """Embeddings of tokens are narrower than the model, and a matrix widens them (ALBERT, Lan et al. 2020, arXiv:1909.11942, section 3.1).
    A tied head narrows hidden states again, by the dense layer of its transform, or else by a matrix of its own without a bias."""

    width: int = Field(gt=0, le=MOST)
    """Numbers of a token's embedding (ALBERT: 128), of which the matrix makes d_model."""
    bias: bool = False
    """The matrix that widens has a bias (ALBERT, ELECTRA)."""
    widened: Literal["tokens", "sum"] = "tokens"
    """What it widens: embeddings of tokens (OPT 350M), or their sum with positions and segments, behind its norm, all of them as narrow
    (ALBERT, ELECTRA, x-transformers' emb_dim)."""
