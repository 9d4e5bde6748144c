"""The mean of a vector over all ranks, while training continues.

    begin   every rank sends each other rank one part of its vector
    turn    a rank averages the parts that it has received, and sends the mean to all
    finish  the means are the mean vector, bit by bit the same on all ranks

Each rank sends 2 (n - 1) / n of the bytes of a vector, as in a ring. But nothing is added up on the way, so a message
can be in fewer bits than a sum would need. Whatever that rounds off is returned, to be added to the next vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from packtrain.train.local_steps import INT8_BLOCK
from packtrain.train.world import World

_LARGEST = 127  # of a signed byte


@dataclass(frozen=True)
class Encoding:
    """How rows of 32-bit numbers become rows of bytes, and back; the length of a row is a multiple of `block`."""

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    block: int
    exact: bool


def _to_int8(rows: Tensor) -> Tensor:
    """Round to 127 levels in both directions; the largest number of each block is the last of them."""
    blocks = rows.view(len(rows), -1, INT8_BLOCK)
    scales = blocks.abs().amax(2, keepdim=True) / _LARGEST
    levels = (blocks / scales.clamp_min(torch.finfo(scales.dtype).tiny)).round_().to(torch.int8)
    # A number that is not finite makes its scale so, and with it whatever is decoded: it does not get lost.
    return torch.cat([levels.flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8)], dim=1)


def _from_int8(rows: Tensor) -> Tensor:
    width = rows.shape[1] // (INT8_BLOCK + 4) * INT8_BLOCK
    levels = rows[:, :width].view(torch.int8).reshape(len(rows), -1, INT8_BLOCK)
    scales = rows[:, width:].contiguous().view(torch.float32)
    return torch.mul(levels, scales.unsqueeze(2)).flatten(1)


ENCODINGS = {
    "no": Encoding(lambda rows: rows.view(torch.uint8), lambda rows: rows.view(torch.float32), 1, exact=True),
    "bf16": Encoding(
        lambda rows: rows.bfloat16().view(torch.uint8), lambda rows: rows.view(torch.bfloat16).float(), 1, exact=False
    ),
    "int8": Encoding(_to_int8, _from_int8, INT8_BLOCK, exact=False),
}


class Averaging:
    """A mean that is being computed. All ranks begin, turn and finish in the same order, one after the other.

    `channel` is a process group of its own: what the training loop sends meanwhile does not queue behind this.
    """

    def __init__(self, values: Tensor, encoding: Encoding, world: World, channel: dist.ProcessGroup | None) -> None:
        self._values, self._encoding, self._world, self._channel = values, encoding, world, channel
        self._error: Tensor | None = None
        self._turned = False
        if channel is None:
            return
        ranks = world.num_ranks
        padded = pad(values, (0, -len(values) % (ranks * encoding.block))).view(ranks, -1)
        self._message = encoding.encode(padded)
        if not encoding.exact:
            self._error = padded - encoding.decode(self._message)
        self._received = torch.empty_like(self._message)
        self._work: dist.Work = dist.all_to_all_single(self._received, self._message, group=channel, async_op=True)

    def turn(self) -> None:
        """Average this rank's part when it is complete, and start to send the mean. Does nothing the second time."""
        if self._channel is None or self._turned:
            return
        self._turned = True
        self._work.wait()
        mean = self._encoding.decode(self._received).mean(0, keepdim=True)
        self._message = self._encoding.encode(mean)
        if self._error is not None:
            # The mean is rounded, too: to make up for that, this rank's next numbers must be off by n times as much.
            error = mean - self._encoding.decode(self._message)
            self._error[self._world.rank] += self._world.num_ranks * error[0]
        self._work = dist.all_gather(
            list(self._received.unbind()), self._message[0], group=self._channel, async_op=True
        )

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Return the mean, and what rounding took from this rank's vector; None if nothing is rounded."""
        if self._channel is None:
            return self._values, None
        self.turn()
        self._work.wait()
        size = len(self._values)
        mean = self._encoding.decode(self._received).flatten()[:size]
        return mean, None if self._error is None else self._error.flatten()[:size]
