"""Load a server with requests, some at a time, and say how it did.

python examples/serve/load.py --port 8000 --requests 400 --at-once 8
"""

import argparse
import asyncio
import time

import httpx
import torch
from make import SHAPE


async def ask(client: httpx.AsyncClient, image: bytes, seconds: list[float]) -> None:
    begun = time.perf_counter()
    answer = await client.post("/classify", content=image)
    answer.raise_for_status()
    seconds.append(time.perf_counter() - begun)


async def wait_for(client: httpx.AsyncClient) -> None:
    for _ in range(600):
        try:
            await client.get("/stats")
            return
        except httpx.TransportError:
            await asyncio.sleep(0.1)
    raise SystemExit(f"no server answers at {client.base_url}")


async def load(port: int, requests: int, at_once: int) -> None:
    image, seconds = torch.randn(SHAPE).numpy().tobytes(), list[float]()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        await wait_for(client)
        left = iter(range(requests))

        async def worker() -> None:
            for _ in left:
                await ask(client, image, seconds)

        begun = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(at_once)))
        rate = requests / (time.perf_counter() - begun)
        server = (await client.get("/stats")).json()
    ms = 1000 * torch.tensor(seconds)
    shown = ", ".join(f"p{100 * share:.0f} {torch.quantile(ms, share):.1f} ms" for share in (0.5, 0.9, 0.99))
    print(f"{requests} requests, {at_once} at once: {rate:.0f} a second, {shown}; in the server {server}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--at-once", type=int, default=8)
    options = parser.parse_args()
    asyncio.run(load(options.port, options.requests, options.at_once))


if __name__ == "__main__":
    main()
