"""Train a small Llama as a language model, 80 % sparse throughout, with compact weights. Seconds on a CPU.

pip install '.[transformers]'
python transformers_causal_lm.py --out /tmp/run
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from growprune.integrations.transformers import GrowPruneCallback

TEXT = "the quick brown fox jumps over the lazy dog, and the lazy dog sleeps on. " * 40
LENGTH = 32


def make_data() -> list[dict[str, torch.Tensor]]:
    """The text, by characters, in pieces."""
    letters = torch.tensor([ord(letter) for letter in TEXT])
    return [{"input_ids": piece, "labels": piece} for piece in letters.split(LENGTH) if len(piece) == LENGTH]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="causal_lm_run")
    parser.add_argument("--storage", default="compact")
    options = parser.parse_args()

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=LENGTH, **shape))
    callback = GrowPruneCallback("rigl", sparsity=0.8, storage=options.storage, every=5)
    args = TrainingArguments(
        options.out,
        max_steps=60,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        logging_steps=10,  # sparsity, live_weights, phase and churn are logged with the loss
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, args, train_dataset=make_data(), callbacks=[callback])
    trainer.train()
    trainer.save_model(options.out)
    again = LlamaForCausalLM.from_pretrained(options.out)  # plain tensors with zeros, for anybody
    same = all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    live = f"{callback.sparse.num_alive} of {callback.sparse.num_prunable} weights live"
    print(f"loss {trainer.state.log_history[-2]['loss']:.3f}, {live}, saved and loaded the same: {same}")


if __name__ == "__main__":
    main()
