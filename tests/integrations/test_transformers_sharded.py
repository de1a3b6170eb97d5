"""GrowPruneCallback with accelerate's FSDP2 on two processes: masks are those of one process, and resumes exact."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch.distributed.tensor import DTensor
from transformers_cases import LONG, make_data
from two_ranks import on_two_ranks, sharded_code_of

import growprune as gp
from growprune.integrations.transformers import GrowPruneCallback

pytestmark = pytest.mark.slow


class OnCpus(hf.Trainer):
    """accelerate shards on GPUs only, and torch anywhere: this one takes CPUs for GPUs."""

    def create_accelerator_and_postprocess(self) -> None:
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

        super().create_accelerator_and_postprocess()
        if self.args.fsdp_plugin_args is not None:
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.is_fsdp_enabled = True


def make_model() -> hf.LlamaForCausalLM:
    """Smooth, and in double precision, which leaves no near ties."""
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LONG, num_key_value_heads=2, tie_word_embeddings=False)).double()


def make_trainer(folder: Path, callback: GrowPruneCallback, world: int, **config: Any) -> OnCpus:
    """8 steps, with a checkpoint in the middle; the best model is loaded at the end."""
    sharding = {} if world == 1 else {"ddp_backend": "gloo", "fsdp": True, "fsdp_config": config}
    usual = {"per_device_train_batch_size": 4 // world, "learning_rate": 1e-2, "seed": 1, "max_steps": 8}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    saving = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    args = hf.TrainingArguments(str(folder), **usual, **quiet, **saving, **sharding, load_best_model_at_end=True)
    data = make_data("llama")
    return OnCpus(make_model(), args, train_dataset=data, eval_dataset=data[:4], callbacks=[callback])


def train(
    folder: Path, method: str, world: int, *, resume: str | None = None, **config: Any
) -> tuple[hf.Trainer, GrowPruneCallback]:
    callback = GrowPruneCallback(method, sparsity=0.75, storage="compact", every=3)
    trainer = make_trainer(folder, callback, world, **config)
    trainer.train(resume_from_checkpoint=resume)
    assert callback.sparse is not None and callback.sparse.is_at_target
    return trainer, callback


def weights_of(callback: GrowPruneCallback) -> dict[str, Any]:
    assert callback.sparse is not None
    whole = {name: values.numpy() for name, (values, _) in callback.sparse.snapshot().items()}
    return whole | {f"{name} (mask)": mask.numpy() for name, mask in callback.sparse.masks.items()}


KINDS = {"rigl": "FULL_STATE_DICT", "gradual_gap": "SHARDED_STATE_DICT"}
"""How the checkpoints of a method are written."""


def trained(folder: Path) -> dict[str, Any]:
    """Trainings as a whole, and from the checkpoint in the middle."""
    found: dict[str, Any] = {}
    for method, kind in KINDS.items():
        trainer, callback = train(folder / method, method, 2, state_dict_type=kind)
        assert callback.sparse is not None
        assert isinstance(callback.sparse.model.model.layers[0].mlp.up_proj.weight, DTensor)
        found[method] = weights_of(callback)
        gp.save(callback.sparse, folder / f"{method}.safetensors")
        trainer.save_model(str(folder / f"{method}-dense"))
        middle = str(folder / method / "checkpoint-4")
        _, again = train(folder / "again", method, 2, state_dict_type=kind, resume=middle)
        found[f"{method}, resumed"] = weights_of(again)
    return found


def documented(folder: Path) -> float:
    """What docs/transformers.md shows, on CPUs."""
    usual = {"use_cpu": True, "ddp_backend": "gloo", "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    names: dict[str, Any] = {"gp": gp, "model": make_model(), "data": make_data("llama"), "Trainer": OnCpus}
    names |= {"GrowPruneCallback": GrowPruneCallback}
    names |= {"TrainingArguments": functools.partial(hf.TrainingArguments, **usual)}
    with contextlib.chdir(folder):
        exec(sharded_code_of("transformers.md").replace("max_steps=1000", "max_steps=8"), names)
    found = gp.load(folder / "model.safetensors", make_model())
    assert isinstance(names["callback"].sparse.model.model.layers[0].mlp.up_proj.weight, DTensor)
    return found.num_alive / found.num_prunable


def refused(folder: Path) -> str:
    callback = GrowPruneCallback("rigl", sparsity=0.9, storage="compact")
    with pytest.raises(gp.GrowpruneError) as caught:
        make_trainer(folder, callback, 2, activation_checkpointing=True).train()
    return str(caught.value)


Told = tuple[list[list[Any]], Path]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each of two processes has found, and where they wrote."""
    folder = tmp_path_factory.mktemp("sharded")
    return on_two_ranks(
        (trained, refused, documented), folder, ["growprune.integrations.transformers", "accelerate"]
    ), folder


def test_masks_and_weights_are_those_of_one_process(told: Told, tmp_path: Path) -> None:
    for method in KINDS:
        _, alone = train(tmp_path / method, method, 1)
        for found, *_ in told[0]:
            for name, array in weights_of(alone).items():
                assert found[method][name].shape == array.shape
                assert abs(found[method][name] * 1.0 - array * 1.0).max() < 1e-9, name


def test_a_checkpoint_of_the_trainer_resumes_to_the_same_bits(told: Told) -> None:
    for found, *_ in told[0]:
        for method in KINDS:
            whole, again = found[method], found[f"{method}, resumed"]
            assert [name for name in whole if whole[name].tobytes() != again[name].tobytes()] == []


def test_what_is_saved_is_a_sparse_file_and_a_dense_folder_that_anybody_loads(told: Told) -> None:
    sparse = gp.load(told[1] / "rigl.safetensors", make_model())
    dense = hf.LlamaForCausalLM.from_pretrained(told[1] / "rigl-dense", dtype=torch.float64).state_dict()
    assert sparse.is_at_target
    for name, tensor in sparse.model.state_dict().items():
        assert torch.equal(dense[name], tensor), name
    assert not (told[1] / "gradual_gap-dense" / "model.safetensors").exists()  # as without growprune


def test_the_code_of_the_page_trains_to_the_sparsity_it_asks_for(told: Told) -> None:
    assert [density for _, _, density in told[0]] == [pytest.approx(0.1, abs=0.001)] * 2


def test_what_would_rename_weights_is_refused_in_one_line(told: Told) -> None:
    for _, line, _ in told[0]:
        assert line == (
            "GrowPruneCallback does not work with activation_checkpointing in fsdp_config, which renames weights: use "
            "TrainingArguments(gradient_checkpointing=True)"
        )
