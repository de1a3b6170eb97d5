"""Language models (not in the paper): a small GPT on the bytes of Shakespeare, and one of 85 M weights on C source."""

from dataclasses import replace

from growprune import methods
from growprune.engine.recipe import LRSchedule, OptimizerConfig, Recipe
from growprune.recipes.study import Baseline, Parts, Row, Study, cut_layers, recipes, rows_of
from growprune.tasks.language import Language


def cut(*lengths: int) -> Parts:
    """Parts with the given numbers of layers. The embeddings belong to the first, the last norm to the last.

    >>> cut(2, 1)
    (('embedding', 'positions', 'layers.0', 'layers.1'), ('layers.2', 'norm'))
    """
    first, *others = cut_layers("", lengths)
    return ("embedding", "positions", *first), *others


def shakespeare() -> Study:
    """10.6 M prunable weights, in matrices that large blocks fill. Every method trains for 30 epochs.

    The settings are those of nanoGPT's model of characters, but for the length. It trains for 5,000 iterations, has its
    lowest validation loss after about 1,750 (1.47), and then overfits (1.71 at the end). Its 1.1 MB of text make 61
    iterations an epoch, so these are 1,830.
    """
    dense = Recipe(
        keep_dense=(),  # rankings and allocations decide, as in the paper
        task=Language(),
        method=methods.dense,
        options={"epochs": 30},
        optimizer=OptimizerConfig("adamw", lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
        lr_schedule=LRSchedule("cosine", warmup_iterations=50),
        clip=1.0,
        precision="bf16",
        evaluate_every=2,
    )
    return Study(dense, cut(2, 2, 2), steps=3, rounds=1, epochs=4, finetune=18, pretrain=12, budget=30)


def linux() -> Study:
    """84.9 M prunable weights: GPT-2 small, on one pass over the C source of Linux (experiments/linux_text.py).

    2,400 iterations of 64 pieces of 512 tokens are about 80 M tokens.
    """
    task = Language(
        vocab_size=16_384, context=512, d_model=768, ffn=3072, heads=12, layers=12, dropout=0.0, batch_size=64
    )
    dense = replace(
        shakespeare().dense,
        task=task,
        options={"epochs": 1},
        optimizer=OptimizerConfig("adamw", lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1),
        lr_schedule=LRSchedule("cosine", warmup_iterations=100),
        evaluate_every=1,
        candidates=False,
    )
    return Study(dense, cut(3, 3, 3, 3), steps=4, rounds=1, epochs=1, finetune=2, pretrain=1, budget=1)


ROWS: dict[str, Row] = {
    "dense": "dense, not in the paper",
    "cyclic-80-uniform": "C-GaP 80 %, not in the paper",
    "cyclic-90-uniform": "C-GaP 90 %, not in the paper",
}
ROWS |= rows_of([Baseline("gmp", methods.gmp, "global", epochs=30)], table="", metric="bits_per_byte")

RECIPES = recipes("language-shakespeare", shakespeare(), ROWS, like="{}, on tinyshakespeare")
RECIPES |= recipes("language-linux", linux(), {"dense": ROWS["dense"]}, like="{}, on C source")
