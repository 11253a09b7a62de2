"""The sampler of `meshllm.model.sampling` without what makes it fast: sorts and noise of all."""

import numpy as np
import torch
from numpy.typing import NDArray

from meshllm.model.sampling import noise_of
from meshllm.request import Sampling


def sample_plainly(scores: NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """Sample a token from logits [V], float32, without penalties."""
    scores = scores / np.float32(sampling.temperature)
    kept = np.arange(len(scores))
    if 0 < sampling.top_k < len(kept):
        kept = kept[scores >= np.partition(scores, -sampling.top_k)[-sampling.top_k]]
    if sampling.top_p < 1:
        order = kept[np.lexsort((-kept, scores[kept]))]  # of ties, the lowest ids are kept
        mass = torch.from_numpy(scores[order]).softmax(-1).cumsum(-1).numpy()
        kept = np.sort(order[min(int((mass <= 1 - sampling.top_p).sum()), len(order) - 1) :])
    if sampling.min_p > 0:
        probabilities = torch.from_numpy(scores[kept]).softmax(-1).numpy()
        kept = kept[probabilities >= sampling.min_p * probabilities.max()]
    race = noise_of(sampling.seed, position, np.arange(len(scores)))[kept] + scores[kept]
    return int(kept[race.argmax()])
