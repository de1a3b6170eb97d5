"""Language models (not in the paper): a small GPT on the bytes of Shakespeare."""

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


ROWS: dict[str, Row] = {
    "dense": "dense, not in the paper",
    "cyclic-80-uniform": "C-GaP 80 %, not in the paper",
    "cyclic-90-uniform": "C-GaP 90 %, not in the paper",
}
ROWS |= rows_of([Baseline("gmp", methods.gmp, "global", epochs=30)], table="", metric="bits_per_byte")

RECIPES = recipes("language-shakespeare", shakespeare(), ROWS, like="{}, on tinyshakespeare")
