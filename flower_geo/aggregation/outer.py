"""The outer optimiser of DiLoCo: SGD with (Nesterov) momentum on the pseudo-gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["OuterSGD"]


@dataclass(frozen=True)
class OuterSGD:
    """SGD on the outer pseudo-gradient ``g = base - mean`` (arXiv:2311.08105, Alg. 1).

    In the usual form ``buf = mu * buf + g``, then ``theta -= lr * (g + mu * buf)``
    with Nesterov momentum and ``theta -= lr * buf`` without; the first round has
    ``buf = g``.  That form is computed here as ``mean + (1 - lr) * g - lr *
    extra``, which is the same number, and exact where it must be: with ``lr = 1``
    and no momentum the next model is the mean to the bit, while ``theta - (theta
    - mean)`` is not when the two differ much in size.

    Attributes:
        lr: outer learning rate, > 0.
        momentum: mu in [0, 1).
        nesterov: look ahead.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def step(
        self, master: Tensor, base: Tensor, mean: Tensor, buffer: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the next master weights and momentum buffer of one tensor.

        Args:
            master: fp32 weights held by the server.
            base: fp32 weights the sites trained from; equals ``master`` where
                broadcasts are lossless, else differs by what coding lost.
            mean: fp64 weighted mean of the sites' weights.
            buffer: fp32 momentum, None before the first round or without
                momentum.

        Returns:
            New fp32 tensors; the inputs are not changed.
        """
        base64 = base.double()
        gradient = base64 - mean
        if self.momentum:
            carried = self.momentum * buffer.double() if buffer is not None else 0.0 * gradient
            velocity = carried + gradient
            extra = self.momentum * velocity if self.nesterov else carried
        else:
            velocity, extra = None, None
        following = mean + (1.0 - self.lr) * gradient
        if extra is not None:
            following = following - self.lr * extra
        following = following + (master.double() - base64)
        return following.float(), None if velocity is None else velocity.float()
