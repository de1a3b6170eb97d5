"""Classify with a small BERT that is made 90 % sparse while the Trainer trains it. Seconds on a CPU, nothing fetched.

pip install '.[transformers]'
python transformers_classification.py --out /tmp/run
"""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from growprune.integrations.transformers import GrowPruneCallback


def make_data(size: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of 16 words; those with the label 1 are about words that the others hardly have."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % 2
    words = torch.randint(0, 40, (size, 16), generator=draw) + 24 * labels[:, None]
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def accuracy(prediction: tuple) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="classification_run")
    parser.add_argument("--method", default="gradual_gap")
    parser.add_argument("--storage", default="masked")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args()

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, **shape))
    callback = GrowPruneCallback(options.method, sparsity=0.9, storage=options.storage)
    args = TrainingArguments(
        options.out,
        num_train_epochs=5,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,  # of those that are 90 % sparse
        metric_for_best_model="accuracy",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data, held_out = make_data(256, seed=0), make_data(64, seed=1)
    trainer = Trainer(
        model, args, train_dataset=data, eval_dataset=held_out, compute_metrics=accuracy, callbacks=[callback]
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    print(callback.sparse.summary())
    print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}, best at step {trainer.state.best_global_step}")


if __name__ == "__main__":
    main()
