"""Prune a trained language model by data, retrain it with fixed masks, save it and generate. Seconds on a CPU.

pip install '.[transformers]'
python prune_pretrained.py --out /tmp/run
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import growprune as gp

TEXT = "the quick brown fox jumps over the lazy dog. how much wood would a woodchuck chuck if a woodchuck could chuck "
TEXT += "wood? peter piper picked a peck of pickled peppers. she sells sea shells by the sea shore. "
LENGTH = 48


def make_batch(count: int) -> dict[str, torch.Tensor]:
    """Pieces of the text, by characters, that begin anywhere."""
    letters = torch.tensor([ord(letter) for letter in TEXT * 2])
    tokens = torch.stack([letters[i : i + LENGTH] for i in torch.randint(len(TEXT), (count,)).tolist()])
    return {"input_ids": tokens, "labels": tokens}


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, *, steps: int) -> str:
    for _ in range(steps):
        optimizer.zero_grad()
        model(**make_batch(16)).loss.backward()
        optimizer.step()
    return f"{model(**make_batch(64)).loss.item():.3f}"


def memory_of_adamw(model: PreTrainedModel) -> str:
    """Weights, gradients and two averages in float32. With compact storage only live weights count."""
    return f"{16 * sum(parameter.numel() for parameter in model.parameters()) / 2**20:.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="pruned_lm")
    parser.add_argument("--by", default="sparsegpt", help="sparsegpt, wanda or magnitude")
    options = parser.parse_args()

    torch.manual_seed(0)  # a trained model in a folder: take your own
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=2 * LENGTH, **shape))
    dense = train(model, torch.optim.AdamW(model.parameters(), 3e-3), steps=300)
    model.save_pretrained(f"{options.out}/dense")

    model = AutoModelForCausalLM.from_pretrained(f"{options.out}/dense")
    batches, settings = [make_batch(16) for _ in range(8)], {"sparsity": 0.7, "by": options.by, "storage": "compact"}
    before = memory_of_adamw(model)
    sparse = gp.prune_pretrained(model, batches, **settings)
    print(f"retraining needs {memory_of_adamw(model)} and activations; dense, it would need {before}")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)  # keeps pruned weights exactly zero, as any optimizer does
    pruned, retrained = train(model, optimizer, steps=0), train(model, optimizer, steps=60)
    gp.save_pretrained(sparse, f"{options.out}/sparse")

    again = AutoModelForCausalLM.from_pretrained(f"{options.out}/sparse")  # plain tensors with zeros, for anybody
    prompt = torch.tensor([[ord(letter) for letter in "the quick brown"]])
    written = again.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=25, do_sample=False)
    print("".join(map(chr, written[0].tolist())))
    live = f"{sparse.num_alive} of {sparse.num_prunable} weights live"
    print(f"loss {dense} dense, {pruned} pruned, {retrained} retrained; {live}")


if __name__ == "__main__":
    main()
