"""Does a sparse training reach its target in every trainer, and does a resume give the same bits?

    python benchmarks/every_trainer.py                      # all, in under three minutes on a CPU
    python benchmarks/every_trainer.py --only BERT,CLI      # rows whose trainer or model has one of these in its name

Tiny models are made of configurations; nothing is fetched. Each is trained by `gradual_gap`; a model of another
seed is then trained from a checkpoint in the middle. A package that cannot be imported is a row that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import growprune as gp

SPARSITY, STEPS, MIDDLE = 0.8, 12, 5
TEXT = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LONG = {**TEXT, "intermediate_size": 32, "max_position_embeddings": 16}
MOE = {**LONG, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
IMAGE = {name: value for name, value in LONG.items() if name not in ("vocab_size", "max_position_embeddings")} | {
    **{"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
}


class Trained(NamedTuple):
    sparsity: float
    weights: dict[str, Tensor]


Train = Callable[[Path, bool], Trained]
"""Trains in a folder: from the beginning, with a checkpoint in the middle, or from that checkpoint."""


def trained(sparse: gp.SparseModel) -> Trained:
    return Trained(sparse.sparsity, {name: tensor.clone() for name, tensor in sparse.model.state_dict().items()})


# transformers, TRL and PEFT


def make_model(name: str, seed: int) -> nn.Module:
    hf = importlib.import_module("transformers")
    makers: dict[str, Callable[[], nn.Module]] = {
        "LLaMA": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LONG, num_key_value_heads=2)),
        "BERT": lambda: hf.BertForSequenceClassification(hf.BertConfig(**LONG, num_labels=3)),
        "T5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)),
        "ViT": lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGE)),
        "Mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**MOE)),
    }
    torch.manual_seed(seed)
    return makers[name]()


def make_data(name: str, size: int = 16) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    if name == "ViT":
        return [{"pixel_values": torch.randn(1, 8, 8, generator=draw), "labels": i % 3} for i in range(size)]
    words = torch.randint(0, 32, (size, 8), generator=draw)
    return [{"input_ids": row, "labels": i % 3 if name == "BERT" else row} for i, row in enumerate(words)]


def arguments_of(folder: Path) -> dict[str, Any]:
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    saving = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": MIDDLE}
    return {"output_dir": str(folder), "per_device_train_batch_size": 4, "learning_rate": 1e-2, **quiet, **saving}


def run(trainer: Any, callback: Any, folder: Path, resume: bool) -> Trained:
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{MIDDLE}") if resume else None)
    return trained(callback.sparse)


def in_transformers(name: str, folder: Path, resume: bool) -> Trained:
    hf = importlib.import_module("transformers")
    callback = importlib.import_module("growprune.integrations.transformers").GrowPruneCallback(sparsity=SPARSITY)
    args = hf.TrainingArguments(**arguments_of(folder))
    trainer = hf.Trainer(make_model(name, resume), args, train_dataset=make_data(name), callbacks=[callback])
    return run(trainer, callback, folder, resume)


def in_peft(folder: Path, resume: bool) -> Trained:
    peft, hf = importlib.import_module("peft"), importlib.import_module("transformers")
    callback = importlib.import_module("growprune.integrations.transformers").GrowPruneCallback(sparsity=SPARSITY)
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    model, args = peft.get_peft_model(make_model("BERT", resume), config), hf.TrainingArguments(**arguments_of(folder))
    trainer = hf.Trainer(model, args, train_dataset=make_data("BERT"), callbacks=[callback])
    return run(trainer, callback, folder, resume)


def in_trl(folder: Path, resume: bool) -> Trained:
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    hf, tokenizers = importlib.import_module("transformers"), importlib.import_module("tokenizers")
    callback = importlib.import_module("growprune.integrations.transformers").GrowPruneCallback(sparsity=SPARSITY)
    words = {f"w{i}": i for i in range(31)} | {"<end>": 31}
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0")),
        eos_token="<end>",
        pad_token="<end>",
    )
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in make_data("LLaMA")])
    args = trl.SFTConfig(**arguments_of(folder), dataset_kwargs={"skip_prepare_dataset": True})
    trainer = trl.SFTTrainer(
        make_model("LLaMA", resume), args, train_dataset=data, processing_class=tokenizer, callbacks=[callback]
    )
    return run(trainer, callback, folder, resume)


# Lightning


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def make_loader(batch_size: int = 8) -> DataLoader[Any]:
    x = torch.randn(batch_size * STEPS // 2, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, (x[:, :4] + x[:, 4:]).argmax(1)), batch_size)


def lightning_module(seed: int) -> Any:
    pl = importlib.import_module("lightning.pytorch")

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net(seed)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def train_dataloader(self) -> DataLoader[Any]:
            return make_loader()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    return Module


def in_lightning(folder: Path, resume: bool) -> Trained:
    pl = importlib.import_module("lightning.pytorch")
    callback = importlib.import_module("growprune.integrations.lightning").GrowPrune(sparsity=SPARSITY)
    saving = pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=2, callbacks=[callback, saving], **quiet)
    trainer.fit(lightning_module(resume)(), ckpt_path=folder / "epoch=0.ckpt" if resume else None)
    return trained(callback.sparse)


def in_lightning_cli(folder: Path, resume: bool) -> Trained:
    cli = importlib.import_module("lightning.pytorch.cli").LightningCLI
    sparse, saving = "growprune.integrations.lightning.GrowPrune", "lightning.pytorch.callbacks.ModelCheckpoint"
    command = [
        *("fit", "--trainer.max_epochs=2", "--trainer.logger=false", "--trainer.accelerator=cpu"),
        *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
        *(f"--trainer.callbacks+={sparse}", f"--trainer.callbacks.sparsity={SPARSITY}"),
        *(f"--trainer.callbacks+={saving}", f"--trainer.callbacks.dirpath={folder}"),
        *("--trainer.callbacks.filename={epoch}", "--trainer.callbacks.save_top_k=-1"),
        *([f"--ckpt_path={folder}/epoch=0.ckpt"] if resume else []),
    ]
    made = cli(lightning_module(resume), args=command, save_config_callback=None)
    return trained(next(c for c in made.trainer.callbacks if type(c).__name__ == "GrowPrune").sparse)


# Loops of one's own


def loop(folder: Path, resume: bool, model: nn.Module, loss: Callable[[nn.Module, int], Tensor]) -> Trained:
    """A plain loop with `gp.sparsify`, and its state as the checkpoint."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    sparsifier = gp.sparsify(model, optimizer, sparsity=SPARSITY, iterations=STEPS)
    if resume:
        sparsifier.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    model.train()
    for step in range(sparsifier.cursor.iteration, STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
        if step + 1 == MIDDLE and not resume:
            torch.save(sparsifier.state_dict(), folder / "state.pt")
    return trained(sparsifier.sparse)


def with_timm(folder: Path, resume: bool) -> Trained:
    timm = importlib.import_module("timm")
    torch.manual_seed(resume)
    model = timm.create_model("resnet10t", pretrained=False, num_classes=4)
    return loop(folder, resume, model, lambda model, _: model(torch.randn(2, 3, 32, 32)).square().mean())


def with_diffusers(folder: Path, resume: bool) -> Trained:
    diffusers = importlib.import_module("diffusers")
    torch.manual_seed(resume)
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    shape = {"block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": 4, "layers_per_block": 1}
    model = diffusers.UNet2DModel(8, 1, 1, down_block_types=down, up_block_types=up, **shape)
    schedule = diffusers.DDPMScheduler(100)

    def loss(model: nn.Module, _: int) -> Tensor:
        images, noise, times = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8), torch.randint(100, (2,))
        return nn.functional.mse_loss(model(schedule.add_noise(images, noise, times), times).sample, noise)

    return loop(folder, resume, model, loss)


def on_two_processes(folder: Path, resume: bool) -> Trained:
    """Start this file once a rank; both have to end with the same bits."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1], "WORLD_SIZE": 2}
    command = [sys.executable, __file__, "--rank-in", str(folder), *(["--resume"] if resume else [])]
    ranks = [{**where, "LOCAL_WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank} for rank in range(2)]
    environments = [os.environ | {name: str(value) for name, value in rank.items()} for rank in ranks]
    processes = [subprocess.Popen(command, env=environment) for environment in environments]
    if any([process.wait() for process in processes]):
        raise RuntimeError("a process failed: see above")
    one, other = (load_file(folder / f"rank{rank}.safetensors") for rank in range(2))
    if not is_same(one, other):
        raise RuntimeError("the processes ended with different weights")
    return Trained(float(one.pop("sparsity")), one)


def run_rank(folder: Path, resume: bool) -> None:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    keep = importlib.import_module("growprune.integrations.accelerate").keep_in_checkpoints
    model = make_net(resume)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(2))
    sparsifier = gp.sparsify(model, optimizer, sparsity=SPARSITY, iterations=4 * len(loader))
    keep(accelerator, sparsifier)
    if resume:
        accelerator.load_state(str(folder / "state"))
    for epoch in range(sparsifier.cursor.iteration // len(loader), 4):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        if epoch == 1 and not resume:
            accelerator.save_state(str(folder / "state"))
    found = trained(sparsifier.sparse)
    file = folder / f"rank{accelerator.process_index}.safetensors"
    save_file({**found.weights, "sparsity": torch.tensor(found.sparsity, dtype=torch.float64)}, file)
    accelerator.end_training()


# The table

CASES: list[tuple[str, str, str, Train]] = [
    *(
        ("transformers", name, "transformers", functools.partial(in_transformers, name))
        for name in ("LLaMA", "BERT", "T5", "ViT", "Mixtral")
    ),
    ("TRL SFTTrainer", "LLaMA", "trl datasets", in_trl),
    ("PEFT (LoRA)", "BERT", "transformers peft", in_peft),
    ("Lightning", "MLP", "lightning.pytorch", in_lightning),
    ("Lightning CLI", "MLP", "lightning.pytorch jsonargparse", in_lightning_cli),
    ("accelerate, 2 processes", "MLP", "accelerate", on_two_processes),
    ("timm", "resnet10t", "timm", with_timm),
    ("diffusers", "UNet2D", "diffusers", with_diffusers),
]
"""Trainer, model, what is imported, and how it is trained."""


def is_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show no warnings and no logs, and keep what trainers print out of the table."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)


def result_of(packages: str, train: Train) -> str:
    """The cells of a row: the sparsity that was reached, and whether a resume gives the same bits."""
    try:
        for package in packages.split():
            importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # torch raises the latter if torchvision is of another build
        return f"skipped: {str(error).splitlines()[0]} | "
    with tempfile.TemporaryDirectory() as folder:
        whole, again = (train(Path(folder), resume) for resume in (False, True))
    return f"{whole.sparsity:.4f} | {'same bits' if is_same(whole.weights, again.weights) else 'DIFFERENT BITS'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="some of the trainers and models, by a part of their names")
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank_in:
        with quiet():
            run_rank(options.rank_in, options.resume)
        return
    print("| trainer | model | method | asked | reached | resumed |\n|---|---|---|---:|---:|---|", flush=True)
    for trainer, model, packages, train in CASES:
        if any(part in f"{trainer} {model}" for part in options.only.split(",")):
            with quiet():
                result = result_of(packages, train)
            print(f"| {trainer} | {model} | gradual_gap | {SPARSITY} | {result} |", flush=True)


if __name__ == "__main__":
    main()
