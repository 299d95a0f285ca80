"""Pending tokens are taken from the row that drew them."""

from __future__ import annotations

import pytest
import torch

from engine.backends.gpu.kernels.sampling.take_tokens import reference, take_tokens


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 256, 300])
def test_only_pending_tokens_change(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    drawn = torch.randint(0, 1 << 20, (9,), generator=generator, dtype=torch.int32)
    sources = torch.randint(-1, 9, (num_tokens,), generator=generator, dtype=torch.int32)
    token_ids = torch.randint(0, 1 << 20, (num_tokens,), generator=generator)
    expected = reference(token_ids, sources, drawn)
    take_tokens(token_ids, sources, drawn)
    assert token_ids.equal(expected)
