"""Translation (Table 4, and ablations): the big Transformer on WMT14 En-De, a small one on Multi30k."""

from dataclasses import replace
from typing import Any

from growprune import methods
from growprune.engine.recipe import LRSchedule, OptimizerConfig, Recipe
from growprune.recipes.study import Parts, Row, Study, cut_layers, recipes
from growprune.tasks.translation import Translation


def cut(encoder: tuple[int, ...], decoder: tuple[int, ...]) -> Parts:
    """Parts with the given numbers of layers, encoder first. The embedding is in the first part, norms in the last.

    >>> cut((2,), (1, 1))[1]
    ('decoder.layers.0',)
    """
    first, *others = (*cut_layers("encoder.", encoder), *cut_layers("decoder.", decoder))
    return ("embedding", *first), *others


SMALL = Translation(
    vocab_size=8000,
    d_model=256,
    ffn=1024,
    heads=4,
    encoder_layers=3,
    decoder_layers=3,
    dropout=0.3,
    max_tokens=8192,
    max_length=128,
)


def wmt14() -> Study:
    """The big Transformer, batches of 40,960 tokens, here eight of 5,120; BLEU without regard to case."""
    dense = Recipe(
        keep_dense=(),  # rankings and allocations decide, as in the paper
        task=Translation(d_model=1024, ffn=4096, heads=16, lowercase=True),
        method=methods.dense,
        options={"epochs": 40},
        optimizer=OptimizerConfig("adam", lr=8.46e-4, betas=(0.9, 0.997), eps=1e-9),
        lr_schedule=LRSchedule("inverse_sqrt", warmup_iterations=4000),
        accumulate=8,
        precision="bf16",
    )
    lengths: dict[str, Any] = {"steps": 30, "rounds": 10, "epochs": 10, "finetune": 40, "pretrain": 40}
    return Study(dense, cut((6,), (3, 3)), six_parts=cut((2, 2, 2), (2, 2, 2)), **lengths)


def multi30k() -> Study:
    """A small Transformer on image captions. Every method trains for 40 epochs in total."""
    dense = replace(
        wmt14().dense,
        task=SMALL,
        options={"epochs": 40},
        optimizer=OptimizerConfig("adam", lr=2e-3, betas=(0.9, 0.98), eps=1e-9),
        lr_schedule=LRSchedule("cosine", warmup_epochs=1),
        accumulate=1,
        evaluate_every=10,
        candidates=False,  # decoding takes as long as training here
    )
    parts, six_parts = cut((3,), (2, 1)), cut((1, 1, 1), (1, 1, 1))
    lengths: dict[str, Any] = {"steps": 6, "rounds": 2, "epochs": 3, "finetune": 22, "pretrain": 18}
    return replace(wmt14(), dense=dense, parts=parts, six_parts=six_parts, **lengths)


ROWS: dict[str, Row] = {
    "dense": "Table 4, dense: uncased BLEU 27.6",
    "one-shot-80-uniform": "Table 4, prune-from-dense 80 %: BLEU 27.1",
    "one-shot-90-uniform": "Table 4, prune-from-dense 90 %: BLEU 25.7",
    "cyclic-80-uniform": "Table 4, C-GaP 80 %, kappa = 3: BLEU 27.6",
    "cyclic-90-uniform": "Table 4, C-GaP 90 %, kappa = 3: BLEU 27.7",
    "cyclic-80-uniform-kappa6": "Table 4, C-GaP 80 %, kappa = 6: BLEU 27.6",
    "cyclic-90-uniform-kappa6": "Table 4, C-GaP 90 %, kappa = 6: BLEU 27.1",
    "parallel-80-uniform": "Table 4, P-GaP 80 %, kappa = 3: BLEU 27.9",
    "parallel-90-uniform": "Table 4, P-GaP 90 %, kappa = 3: BLEU 27.3",
    "parallel-80-uniform-kappa6": "Table 4, P-GaP 80 %, kappa = 6: BLEU 27.7",
    "parallel-90-uniform-kappa6": "Table 4, P-GaP 90 %, kappa = 6: BLEU 26.9",
    "cyclic-90-uniform-kappa1": "Ablation of the number of parts, kappa = 1: BLEU 26.8",
    "random-90-uniform": "Ablation of the partition, random: BLEU 27.0",
    "random-90-global": "Ablation of the partition, random, non-uniform: BLEU 26.9",
    "one-shot-80-uniform-1x8": "Ablation of blocks, prune-from-dense 1 x 8: BLEU 26.1",
    "cyclic-80-uniform-1x8": "Ablation of blocks, C-GaP 1 x 8: BLEU 27.2",
}

MEASURED = {
    "translation-multi30k/dense": "bleu 39.34",
    "translation-multi30k/cyclic-80-uniform": "bleu 37.19",
    "translation-multi30k/cyclic-90-uniform": "bleu 35.73",
    "translation-multi30k/parallel-80-uniform": "bleu 35.64",
}
"""Our own results. A test compares them with experiments/."""

RECIPES = recipes("translation-wmt14", wmt14(), ROWS)
RECIPES |= recipes("translation-multi30k", multi30k(), ROWS, like="Like {}, on multi30k/", measured=MEASURED)
