"""Start embeddings from the tokens that stand beside each token in the text."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penjing.model.init import EMBEDDING_STD

WINDOW = 2  # tokens to either side; those at distance d count 1/sqrt(d)
CONTEXT_POWER = 0.75  # p(context) ~ count^0.75
PRIOR = 2.0  # contexts drawn from p(context) that each token is given besides its own: rare tokens say less
SPECTRUM_POWER = 0.25  # of the singular values
STD = 0.15  # 0.2 and 1.1 % fewer bits per byte than 0.06 in one pass of 1.3M parameters (docs/log.md)
NOISE_STD = EMBEDDING_STD  # all that ids without a neighbour have
OVERSAMPLING, ITERATIONS = 16, 5  # of the randomized SVD


def cooccurrence_embedding(ids_N: npt.NDArray[np.int64], vocab_size: int, width: int, seed: int) -> Tensor:
    """embedding_VD whose rows are near each other for tokens with the same neighbours, of standard deviation STD.

    A truncated singular value decomposition (arXiv:0909.4061, algorithm 4.4) of positive pointwise mutual information
    (Levy and Goldberg, NIPS 2014, with the smoothing and the power of the singular values of Levy et al., TACL 2015)
    of each token with those before and after it. Its axes are turned at random. The global random state is neither read
    nor changed.

    ids_N: a text's token ids, each below vocab_size. width: D.
    """
    generator = torch.Generator().manual_seed(seed)
    pmi_VC = torch.cat([_positive_pmi(ids_N, vocab_size, distance) for distance in range(1, WINDOW + 1)], 1).coalesce()
    rank = min(width, vocab_size)
    basis_CR = torch.randn(pmi_VC.shape[1], min(vocab_size, rank + OVERSAMPLING), generator=generator)
    for _ in range(ITERATIONS):
        basis_VR = torch.linalg.qr(pmi_VC @ basis_CR)[0].contiguous()  # a sparse matmul by columns takes 5 to 10 x
        basis_CR = torch.linalg.qr(pmi_VC.t() @ basis_VR)[0].contiguous()
    vectors_VR, values_R, _ = torch.linalg.svd(pmi_VC @ basis_CR, full_matrices=False)
    turned_RD = torch.linalg.qr(torch.randn(width, width, generator=generator))[0][:rank]
    embedding_VD: Tensor = vectors_VR[:, :rank] * values_R[:rank] ** SPECTRUM_POWER @ turned_RD
    noise_VD = torch.randn(embedding_VD.shape, generator=generator)
    size = embedding_VD.square().mean().sqrt().clamp(min=1e-6)  # 0 where no token says anything about another
    return embedding_VD * (STD / size) + NOISE_STD * noise_VD


def _positive_pmi(ids_N: npt.NDArray[np.int64], vocab_size: int, distance: int) -> Tensor:
    """Sparse pmi_VC of each token with the tokens at this distance after it, then before it."""
    pair_M, count_M = np.unique(ids_N[:-distance] * vocab_size + ids_N[distance:], return_counts=True)
    both = np.divmod(pair_M, vocab_size)
    parts = []
    for token_M, context_M in (both, both[::-1]):
        token_V, context_V = (np.bincount(one, count_M, vocab_size) for one in (token_M, context_M))
        chance_V = context_V**CONTEXT_POWER / (context_V**CONTEXT_POWER).sum()
        expected_M = (token_V[token_M] + PRIOR) * chance_V[context_M]
        pmi_M = np.log((count_M + PRIOR * chance_V[context_M]) / expected_M).clip(0) / distance**0.5
        places, size = torch.from_numpy(np.stack([token_M, context_M])), (vocab_size, vocab_size)
        values = torch.from_numpy(pmi_M.astype(np.float32))
        parts.append(torch.sparse_coo_tensor(places, values, size, check_invariants=False))
    return torch.cat(parts, 1)
