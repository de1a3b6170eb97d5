"""Serve a deployed model over HTTP: requests are batched, latencies counted.

    python examples/serve/server.py served --port 8000        # the folder of make.py
    python examples/serve/server.py served --dense            # the same weights in plain torch, to compare

POST /classify takes the bytes of one image, float32, 3 x 32 x 32, and answers {"class": 3, "scores": [...]};
GET /stats has the percentiles.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator

import torch
import uvicorn
from batching import Batcher
from fastapi import FastAPI, HTTPException, Request
from make import SHAPE, build

import growprune as gp

NUM_BYTES = 4 * torch.Size(SHAPE).numel()


def make_app(model: torch.nn.Module) -> FastAPI:
    batcher = Batcher(model, SHAPE)

    @contextlib.asynccontextmanager
    async def living(app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(batcher.run())
        yield
        running.cancel()

    app = FastAPI(lifespan=living)

    @app.post("/classify")
    async def classify(request: Request) -> dict[str, object]:
        body = await request.body()
        if len(body) != NUM_BYTES:
            raise HTTPException(422, f"{len(body)} bytes came, but an image is {NUM_BYTES}: float32, {SHAPE}")
        scores = await batcher(torch.frombuffer(bytearray(body), dtype=torch.float32).view(SHAPE))
        return {"class": int(scores.argmax()), "scores": scores.tolist()}

    @app.get("/stats")
    def stats() -> dict[str, float]:
        return batcher.stats()

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dense", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    model = build(options.width)
    if options.dense:
        gp.load(f"{options.folder}/model.safetensors", model)
    else:
        model = gp.load_deployed(options.folder, model)
    uvicorn.run(make_app(model), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
