"""Serve a deployed model over HTTP: requests are batched, latencies counted.

    python examples/serve/server.py served --port 8000        # the folder of make.py
    python examples/serve/server.py served --dense            # the same weights in plain torch, to compare

POST /classify takes the bytes of one image, float32, 3 x 32 x 32, and answers {"class": 3, "scores": [...]};
GET /stats has the percentiles. A body that is too long, comes too slowly or holds NaN is refused.
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
from starlette.requests import ClientDisconnect

import growprune as gp

NUM_BYTES = 4 * torch.Size(SHAPE).numel()


async def read_image(request: Request, patience: float) -> torch.Tensor:
    """Read the image of a request: hold no more than its bytes, and wait no longer than `patience` seconds for them."""
    body = bytearray()
    try:
        async with asyncio.timeout(patience):
            async for chunk in request.stream():
                body += chunk
                if len(body) > NUM_BYTES:
                    raise HTTPException(413, f"more than {NUM_BYTES} bytes came, but an image is float32, {SHAPE}")
    except TimeoutError:
        raise HTTPException(408, f"{len(body)} of {NUM_BYTES} bytes came in {patience:g} seconds") from None
    except ClientDisconnect:
        raise HTTPException(400, "the client closed the connection") from None
    if len(body) != NUM_BYTES:
        raise HTTPException(422, f"{len(body)} bytes came, but an image is {NUM_BYTES}: float32, {SHAPE}")
    image = torch.frombuffer(body, dtype=torch.float32).view(SHAPE)
    if not torch.isfinite(image).all():
        raise HTTPException(422, "the image has values that are NaN or infinite")
    return image


def make_app(model: torch.nn.Module, patience: float = 10.0) -> FastAPI:
    batcher = Batcher(model, SHAPE)

    @contextlib.asynccontextmanager
    async def living(app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(batcher.run())
        yield
        running.cancel()

    app = FastAPI(lifespan=living)

    @app.post("/classify")
    async def classify(request: Request) -> dict[str, object]:
        scores = await batcher(await read_image(request, patience))
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
    parser.add_argument("--patience", type=float, default=10.0, help="seconds to wait for the bytes of an image")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    model = build(options.width)
    if options.dense:
        gp.load(f"{options.folder}/model.safetensors", model)
    else:
        model = gp.load_deployed(options.folder, model)
    uvicorn.run(make_app(model, options.patience), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
