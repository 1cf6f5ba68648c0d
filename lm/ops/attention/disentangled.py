"""Scores of contents and distances.  He et al. 2020, arXiv:2006.03654, section 3.1."""

from torch import Tensor


def of_distances(q: Tensor, k: Tensor, keys: Tensor | None, queries: Tensor | None, rows: Tensor) -> Tensor:
    """Returns q_i . keys[rows_ij] + k_j . queries[rows_ij], a bias on scores of (b, h, q, k); None: without that term.

    q: (b, h, q, c); k: (b, g, k, c) with g dividing h; keys: (g, n, c) and queries: (h, n, c) of the distances; rows: (b or 1, q, k).
    """
    groups, at = k.shape[1], rows.unsqueeze(1)  # (b, q, k) -> (b, 1, q, k)
    found = []
    if keys is not None:
        scores = (q.unflatten(1, (groups, -1)) @ keys.unsqueeze(1).mT).flatten(1, 2)  # (b, g, r, q, c) (g, 1, c, n) -> (b, h, q, n)
        found.append(scores.gather(-1, at.expand(*scores.shape[:2], -1, -1)))
    if queries is not None:
        scores = (k.unsqueeze(2) @ queries.unflatten(0, (groups, -1)).mT).flatten(1, 2)  # (b, g, 1, k, c) (g, r, c, n) -> (b, h, k, n)
        found.append(scores.gather(-1, at.transpose(-1, -2).expand(*scores.shape[:2], -1, -1)).transpose(-1, -2))
    return found[0] if len(found) == 1 else found[0] + found[1]
