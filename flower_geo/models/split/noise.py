"""Gaussian noise on activations before they leave a site.

The noise is relative to each token's own size, so that one sigma means the
same at every cut and in every model.  It makes reading the text back harder
(``flower_geo.models.leak`` says by how much); it is no differential privacy:
nothing bounds what one token's activation tells.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from flower_geo.errors import ConfigError

__all__ = ["check_sigma", "noise_generator", "noised"]


def noise_generator(seed: int, *stream: str | int) -> torch.Generator:
    """A CPU generator of its own for one stream of noise.

    Args:
        seed: of the run.
        *stream: what tells this stream from others, such as the site's name.
            Equal words give equal draws, in every process.

    Returns:
        The generator.  ``get_state`` and ``set_state`` save and restore it; no
        other random state of the process moves it.
    """
    words = "\0".join(["activation-noise", str(seed), *map(str, stream)])
    digest = hashlib.sha256(words.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def check_sigma(sigma: float) -> float:
    """Return ``sigma`` if it is a number from 0, else raise ``ConfigError``."""
    if isinstance(sigma, bool) or not math.isfinite(sigma) or sigma < 0:
        raise ConfigError(
            f"activation noise {sigma!r} is no number from 0; use 0 for none, or 0.1 for a tenth "
            "of an activation's own size"
        )
    return sigma


def noised(x: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise of standard deviation ``sigma`` times the RMS of each row.

    A row is the last dimension: one token's hidden state.  The draws are fp32, on
    the generator's device, in the order of the values, whatever the dtype and the
    device of ``x``.  The gradient passes as if nothing had been added.

    Args:
        x: activations [..., d] of floating point; left as they are.
        sigma: from 0.  0 adds nothing and draws nothing.
        generator: its state moves by as many draws as ``x`` has values.

    Returns:
        A tensor of ``x``'s shape, dtype and device; ``x`` itself where sigma is 0.

    Raises:
        ConfigError: sigma is negative or no number.
    """
    if not check_sigma(sigma):
        return x
    with torch.no_grad():
        drawn = torch.randn(
            x.shape, generator=generator, device=generator.device, dtype=torch.float32
        )
        size = x.float().square().mean(dim=-1, keepdim=True).sqrt()
        extra = drawn.to(x.device) * (sigma * size)
    # Added before it is rounded to a short format, so that little noise is not lost.
    return (x.to(torch.promote_types(x.dtype, torch.float32)) + extra).to(x.dtype)
