"""Requests of a moment as one batch, and how long each took."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

SIZES = (1, 2, 4, 8)
"""Batches are filled up to one of these: a deployed model makes itself ready for each size once."""


class Batcher:
    """Runs a model on what has come in, up to the largest size, while the next requests gather.

    There is no time to wait for: the first request of a quiet moment runs at once, and under load batches fill by
    themselves while the one before runs.
    """

    def __init__(self, model: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
        self._model = model
        self._waiting: deque[tuple[Tensor, asyncio.Future[Tensor], float]] = deque()
        self._has_come = asyncio.Event()
        self.seconds: deque[float] = deque(maxlen=10_000)
        self.sizes: deque[int] = deque(maxlen=10_000)
        for size in SIZES:
            model(torch.zeros(size, *shape))  # so that no request pays for it

    async def __call__(self, x: Tensor) -> Tensor:
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((x, answer, time.perf_counter()))
        self._has_come.set()
        return await answer

    async def run(self) -> None:
        """For as long as the server lives."""
        while True:
            await self._has_come.wait()
            some = [self._waiting.popleft() for _ in range(min(len(self._waiting), SIZES[-1]))]
            if not self._waiting:
                self._has_come.clear()
            try:
                outputs = await asyncio.to_thread(self._forward, [x for x, _, _ in some])
            except RuntimeError as error:  # what torch raises; these requests fail, and the server goes on
                outputs = [error] * len(some)
            for (_, answer, begun), output in zip(some, outputs, strict=True):
                self._answer(answer, output, time.perf_counter() - begun)
            self.sizes.append(len(some))

    def _forward(self, inputs: list[Tensor]) -> list[Tensor]:
        size = next(size for size in SIZES if size >= len(inputs))
        filled = inputs + [torch.zeros_like(inputs[0])] * (size - len(inputs))
        with torch.no_grad():
            return list(self._model(torch.stack(filled))[: len(inputs)].clone())

    def _answer(self, answer: "asyncio.Future[Tensor]", output: Tensor | RuntimeError, seconds: float) -> None:
        if answer.cancelled():  # who asked has gone
            return
        if isinstance(output, RuntimeError):
            answer.set_exception(output)
        else:
            answer.set_result(output)
            self.seconds.append(seconds)

    def stats(self) -> dict[str, float]:
        """Milliseconds from a request's arrival to its answer, over the last ten thousand."""
        if not self.seconds:
            return {"requests": 0}
        ms = 1000 * torch.tensor(self.seconds)
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        percentiles = {name: round(float(torch.quantile(ms, share)), 3) for name, share in shares.items()}
        return {"requests": len(ms), **percentiles, "mean_batch": round(sum(self.sizes) / len(self.sizes), 2)}
