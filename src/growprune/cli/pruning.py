"""The verbs for pretrained language models: prune and perplexity."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from growprune.cli.app import AsJson, check_new_folder, one_line_errors
from growprune.cli.screen import err, print_json, say, size
from growprune.errors import GrowpruneError

if TYPE_CHECKING:
    from torch import Tensor

Model = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a causal language model of transformers.")]
Text = Annotated[Path, typer.Option("--text", metavar="FILE", help="A text file in UTF-8.")]
Length = Annotated[int, typer.Option(min=2, help="Tokens of a window, at most what the model can take.")]


@one_line_errors
def prune(
    folder: Model,
    text: Text,
    out_folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder to write.")],
    by: Annotated[str, typer.Option(help="sparsegpt, wanda or magnitude.")] = "sparsegpt",
    sparsity: Annotated[float | None, typer.Option(help="Fraction of zeros in each layer. Default: 0.5.")] = None,
    pattern: Annotated[str, typer.Option(help="unstructured, a block such as 1x8, or N:M such as 2:4.")] = "",
    reconstruct: Annotated[
        int, typer.Option(min=0, help="Steps to train each block for the output of the dense block; 64, say.")
    ] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Prune in several steps, each with new statistics.")] = 1,
    samples: Annotated[int, typer.Option(min=1, help="Windows of the text to calibrate with.")] = 128,
    length: Length = 512,
    seed: Annotated[int, typer.Option(help="Seed of the choice of windows.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Prune a pretrained language model with text of your own, and measure its perplexity before and after.

    The last tenth of the text is held out for the perplexity. The new folder loads in transformers as it is.
    """
    from growprune.files.pretrained import save_pretrained
    from growprune.masks.patterns import NofM, parse_pattern
    from growprune.sparse.pretrained_pruning import prune_pretrained
    from growprune.sparse.text import perplexity, text_batches

    check_new_folder(out_folder)
    parsed = parse_pattern(pattern or "unstructured")
    if isinstance(parsed, NofM):
        fixed = 1 - parsed.n / parsed.m
        if sparsity not in (None, fixed):
            raise GrowpruneError(
                f"--pattern {pattern} keeps {parsed.n} of {parsed.m} weights, a sparsity of {fixed:g}; got --sparsity "
                f"{sparsity:g}. Leave --sparsity out, or choose another --pattern"
            )
        sparsity = fixed
    sparsity = 0.5 if sparsity is None else sparsity
    model, tokenizer, length = _load(folder, length)
    batches = text_batches(tokenizer, text, samples=samples, length=length, seed=seed)
    with _bar("perplexity before") as show:
        before = perplexity(model, tokenizer, text, length=length, part="held-out", progress=show)
    if not as_json:
        _say_what_it_takes(model, batches, by, reconstruct)
    started = time.monotonic()
    with _bar(f"pruning by {by}") as show, _enough_memory():
        sparse = prune_pretrained(
            model,
            batches,
            sparsity=sparsity,
            by=by,
            pattern=parsed,
            unreached="magnitude",
            reconstruct=reconstruct,
            steps=steps,
            progress=show,
        )
    seconds = time.monotonic() - started
    with _bar("perplexity after") as show:
        after = perplexity(model, tokenizer, text, length=length, part="held-out", progress=show)
    partial = out_folder.with_name(f"{out_folder.name}.partial")  # so that --out is whole or not there
    shutil.rmtree(partial, ignore_errors=True)
    save_pretrained(sparse, partial)
    tokenizer.save_pretrained(partial)
    partial.replace(out_folder)
    content = {
        "folder": str(out_folder),
        "by": by,
        "pattern": parsed.name,
        "sparsity": sparse.sparsity,
        "perplexity": {"before": before, "after": after, "length": length, "stride": length, "text": str(text)},
        "reconstruct": reconstruct,
        "steps": steps,
        "samples": samples,
        "seconds": seconds,
    }
    if as_json:
        print_json(content)
        return
    windows = f"windows of {length} tokens, stride {length}"
    say(f"perplexity on held-out text: {before:.4g} before, {after:.4g} after ({windows})")
    say(f"pruned: {sparse.sparsity:.4f} of {sparse.num_prunable:,} weights, in {seconds:.0f} s")
    say(f"folder: {out_folder}, which transformers loads as it is")


@one_line_errors
def perplexity(folder: Model, text: Text, length: Length = 512, as_json: AsJson = False) -> None:
    """Measure the perplexity of a language model on a text, in windows that do not overlap."""
    from growprune.sparse.text import perplexity as measure

    model, tokenizer, length = _load(folder, length)
    with _bar("perplexity") as show:
        found = measure(model, tokenizer, text, length=length, progress=show)
    if as_json:
        print_json({"folder": str(folder), "perplexity": found, "length": length, "stride": length, "text": str(text)})
    else:
        say(f"perplexity: {found:.6g} (windows of {length} tokens, stride {length})")


def _load(folder: Path, length: int) -> tuple[Any, Any, int]:
    """Load a causal language model and its tokenizer, and cut the length to what it can take. Downloads nothing."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise GrowpruneError("this needs transformers: pip install transformers") from error
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what is missing is said in one line
    if not (folder / "config.json").is_file():
        raise GrowpruneError(f"{folder} has no config.json. Give the folder of a model of transformers")
    what = "config"
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise GrowpruneError(f"{folder} holds a {config.model_type} model, which has no causal language model head")
        what = "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        what = "model"
        options = {"local_files_only": True, "dtype": "auto", "output_loading_info": True}
        model, loaded = AutoModelForCausalLM.from_pretrained(folder, **options)
        if missing := sorted(loaded["missing_keys"]):
            raise GrowpruneError(f"{folder} lacks {missing[0]}: pass a causal language model, with its output layer")
    except GrowpruneError:
        raise
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise GrowpruneError(f"transformers cannot load the {what} in {folder}: {error}") from error
    return model, tokenizer, min(length, getattr(model.config, "max_position_embeddings", None) or length)


@contextmanager
def _enough_memory() -> Iterator[None]:
    """Say in one line that memory has run out."""
    try:
        yield
    except RuntimeError as error:  # also torch.OutOfMemoryError
        if "memory" not in str(error):
            raise
        said = str(error).splitlines()[0]
        raise GrowpruneError(
            f"there is not enough memory ({said}): use fewer --samples, a shorter --length or no --reconstruct"
        ) from error


def _say_what_it_takes(model: Any, batches: list[dict[str, Tensor]], by: str, reconstruct: int) -> None:
    """Say how much memory and time pruning takes, by the sizes of layers and one forward pass."""
    import torch

    from growprune.masks.layers import layer_weights
    from growprune.masks.partition import blocks_of

    parameters = sum(p.nbytes for p in model.parameters())
    blocks = blocks_of(model)
    widest: dict[str, int] = {}
    for weights in layer_weights(model).values() if by != "magnitude" else ():
        for weight in weights:
            inputs = weight.numel // max(weight.shape[0], 1) if not weight.transposed else weight.shape[0]
            bytes_ = 4 * inputs * (inputs if by == "sparsegpt" else 1)
            block = blocks.get(weight.parameter, "")
            widest[block] = widest.get(block, 0) + bytes_
    with torch.no_grad():
        started = time.monotonic()
        model.eval()(**{name: tensor.to(model.device) for name, tensor in batches[0].items()})
        forward = time.monotonic() - started
    needed = f"{size(parameters)} for the model, about {size(max(widest.values(), default=0) * 2)} for statistics"
    if reconstruct:
        tokens, width = sum(batch["input_ids"].numel() for batch in batches), model.get_input_embeddings().embedding_dim
        needed += f", {size(2 * tokens * width * model.dtype.itemsize)} for the inputs and outputs of a block"
    passes = len(batches) * (1 + len(set(blocks.values())) / 2) if by != "magnitude" else 0
    say(f"memory: {needed}; time: about {passes * forward:.0f} s for forward passes, and the choice of weights")


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr. Yields the function to call with (done, total)."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err(), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
