"""A model of GPT-2's small size through the Trainer of transformers: dense, masked and compact, in one run.

    python benchmarks/transformers_trainer.py --text input.txt
    python benchmarks/transformers_trainer.py --text input.txt --small   # on a CPU in seconds, to see that it works
    torchrun --nproc-per-node 1 benchmarks/transformers_trainer.py --text input.txt --storage compact --fsdp   # on GPUs

The text is read as bytes, so that no tokenizer has to be fetched; the model keeps GPT-2's own vocabulary and so its
124 M weights, of which 85 M may become sparse. Each storage trains in a process of its own, for its own peak of memory.
`--json FILE` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from growprune.integrations.transformers import GrowPruneCallback

GIB = 2**30
WARM_UP = 20
"""Steps that are not timed."""


@dataclass(frozen=True)
class Size:
    length: int
    steps: int
    config: dict[str, int | None]


GPT2 = Size(1024, 300, {})
WORDS = {"vocab_size": 256, "n_positions": 32, "bos_token_id": None, "eos_token_id": None}
SMALL = Size(32, 30, {"n_embd": 32, "n_layer": 2, "n_head": 2, **WORDS})


class Clock(TrainerCallback):
    """The seconds of the steps after the warm-up."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (WARM_UP, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.begun, self.seconds = time.perf_counter(), time.perf_counter() - getattr(self, "begun", 0)


def pieces(text: Path, length: int) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """The bytes of a text in pieces: nine tenths to train on, and the rest."""
    letters = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    whole = [{"input_ids": piece, "labels": piece} for piece in letters.split(length) if len(piece) == length]
    return whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]


def arguments(size: Size, batch: int, folder: str, *, is_sharded: bool) -> TrainingArguments:
    is_gpu = torch.cuda.is_available()
    return TrainingArguments(
        folder,
        max_steps=size.steps,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=8,
        prediction_loss_only=True,
        learning_rate=6e-4,
        lr_scheduler_type="cosine",
        warmup_steps=WARM_UP,
        optim="adamw_torch_fused" if is_gpu else "adamw_torch",
        bf16=is_gpu,
        use_cpu=not is_gpu,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **({"fsdp": True} if is_sharded else {}),
    )


def train(storage: str, size: Size, batch: int, text: Path, *, is_sharded: bool = False) -> dict[str, Any]:
    """Train in this process, and say what it took."""
    torch.manual_seed(0)
    model, clock = GPT2LMHeadModel(GPT2Config(use_cache=False, **size.config)), Clock()
    sparse = None if storage == "dense" else GrowPruneCallback("gradual_gap", sparsity=0.9, storage=storage)
    data, held_out = pieces(text, size.length)
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [clock] if sparse is None else [sparse, clock]
        args = arguments(size, batch, folder, is_sharded=is_sharded)
        trainer = Trainer(model, args, train_dataset=data, eval_dataset=held_out, callbacks=callbacks)
        trainer.train()
        peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else math.nan
        loss = trainer.evaluate()["eval_loss"]
    return {
        "storage": storage,
        "batch": batch,
        "tokens_per_second": batch * size.length * (size.steps - WARM_UP) / clock.seconds,
        "peak_gib": peak,
        "loss": loss,
        "sparsity": 0.0 if sparse is None or sparse.sparse is None else sparse.sparse.sparsity,
    }


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'sequences':>10} {'storage':>8} {'tokens/s':>10} {'ratio':>6} {'peak GiB':>9} {'ratio':>6} {'loss':>6}")
    for row in rows:
        dense = next(other for other in rows if other["storage"] == "dense" and other["batch"] == row["batch"])
        speed, peak = (row[name] / dense[name] for name in ("tokens_per_second", "peak_gib"))
        figures = f"{row['tokens_per_second']:10.0f} {speed:6.3f} {row['peak_gib']:9.2f} {peak:6.3f} {row['loss']:6.3f}"
        print(f"{row['batch']:>10} {row['storage']:>8} {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 1], help="sequences a step")
    parser.add_argument("--storage", choices=["dense", "masked", "compact"], help="only this one, printed as JSON")
    parser.add_argument("--fsdp", action="store_true", help="with --storage: sharded by FSDP2")
    parser.add_argument("--steps", type=int, help="how many, those of the warm-up included")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    size = SMALL if args.small else GPT2
    size = replace(size, steps=args.steps or size.steps)
    if args.storage:
        print(json.dumps(train(args.storage, size, args.batches[0], args.text, is_sharded=args.fsdp)))
        return
    rows = []
    for batch in args.batches:
        for storage in ("dense", "masked", "compact"):
            words = ["--text", str(args.text), "--batches", str(batch), "--steps", str(size.steps)]
            words += ["--storage", storage]
            command = [sys.executable, __file__, *words, *(["--small"] if args.small else [])]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows.append(json.loads(said.splitlines()[-1]))
            print(f"{storage}, {batch}: {rows[-1]}", file=sys.stderr)
    show(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
