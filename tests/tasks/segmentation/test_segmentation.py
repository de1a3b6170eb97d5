"""The task: its metric and its files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from segmentation_cases import CPU, MUG, forget, small, small_model, zipped
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.tasks.segmentation import PartSegmentation, shapenet
from growprune.tasks.segmentation.shapenet import (
    NUM_CATEGORIES,
    NUM_PARTS,
    SYNSETS,
    mean_ious,
    parts_of,
    predict,
    shape_ious,
)

# The metric


def test_parts_are_numbered_through_the_categories() -> None:
    owned = [mask.nonzero().flatten().tolist() for mask in parts_of(torch.arange(16))]
    parts = dict(zip((name for name, _ in SYNSETS.values()), owned, strict=True))
    assert (NUM_CATEGORIES, NUM_PARTS) == (16, 50)
    assert (parts["Motorbike"], parts["Mug"]) == ([30, 31, 32, 33, 34, 35], [36, 37])
    assert (parts["Table"], parts["Airplane"]) == ([47, 48, 49], [0, 1, 2, 3])
    assert (parts["Earphone"], parts["Lamp"]) == ([16, 17, 18], [24, 25, 26, 27])
    assert parts_of(torch.tensor([1, 15])).nonzero().tolist() == [[0, 4], [0, 5], [1, 47], [1, 48], [1, 49]]


def test_a_prediction_is_a_part_of_the_category() -> None:
    logits = torch.zeros(1, 2, 50)
    logits[0, :, 7] = 9  # of no bag
    logits[0, 0, 5] = -1
    logits[0, 1, 4] = -1
    assert predict(logits, torch.tensor([1])).tolist() == [[4, 5]]
    logits[...] = -5
    logits[..., 5] = -4
    assert predict(logits, torch.tensor([1])).tolist() == [[5, 5]]


def test_the_iou_of_a_shape_is_the_mean_over_the_parts_of_its_category() -> None:
    # bag: part 4 has 2 of 3, part 5 has 1 of 2
    labels, predicted = torch.tensor([[4, 4, 4, 5]]), torch.tensor([[4, 4, 5, 5]])
    torch.testing.assert_close(shape_ious(predicted, labels, torch.tensor([1])), torch.tensor([(2 / 3 + 1 / 2) / 2]))


def test_a_part_that_is_neither_there_nor_predicted_counts_one_and_a_part_only_predicted_zero() -> None:
    airplane = torch.tensor([0])
    labels = torch.tensor([[0, 0, 1, 1]])
    torch.testing.assert_close(shape_ious(labels, labels, airplane), torch.ones(1))
    predicted = torch.tensor([[0, 0, 1, 3]])  # parts: 2/2, 1/2, absent, 0/1
    torch.testing.assert_close(shape_ious(predicted, labels, airplane), torch.tensor([(1 + 0.5 + 1 + 0) / 4]))


def test_instances_are_averaged_over_shapes_and_classes_over_the_categories_there_are() -> None:
    ious, categories = torch.tensor([1.0, 0.5, 0.0, 0.8]), torch.tensor([2, 2, 2, 9])
    assert mean_ious(ious, categories) == pytest.approx((2.3 / 4, (0.5 + 0.8) / 2))


# Files


def batches_of(task: PartSegmentation, seed: int = 1, start: int = 0) -> list[tuple[Tensor, ...]]:
    return list(task.batches(seed=seed, start=start, device=CPU))


def are_equal(one: list[tuple[Tensor, ...]], other: list[tuple[Tensor, ...]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) for batch, clone in pairs for a, b in zip(batch, clone, strict=True))


def test_a_folder_its_parent_and_zip_files_of_both_give_the_same_batches(folder: Path, tmp_path: Path) -> None:
    sources = [folder, folder.parent, zipped(folder, tmp_path / "a.zip"), zipped(folder, tmp_path / "b.zip", top="")]
    batches = [batches_of(small(data=str(source))) for source in sources]
    assert len(batches[0]) == small(data=str(folder)).num_batches() == 8
    assert all(are_equal(batches[0], others) for others in batches[1:])


def test_batches_depend_on_the_seed_alone_and_can_be_entered_anywhere(folder: Path) -> None:
    task = small(data=str(folder))
    whole = batches_of(task)
    assert are_equal(whole, batches_of(task))
    assert are_equal(whole[3:], batches_of(task, start=3))
    assert batches_of(task, start=8) == []
    assert not torch.equal(whole[0][0], batches_of(task, seed=2)[0][0])


def test_an_epoch_has_every_shape_once_with_its_category_and_labels(folder: Path) -> None:
    seen = batches_of(small(data=str(folder), scale=(1.0, 1.0), shift=0.0))
    assert [len(categories) for _, categories, _ in seen] == [2] * 7 + [1]
    assert sorted(torch.cat([c for _, c, _ in seen]).tolist()) == [0] * 5 + [1] * 5 + [11] * 5
    for shapes, categories, labels in seen:
        assert torch.equal(shapes[..., 3].long(), labels)  # as written in shape_text
        assert parts_of(categories).gather(1, labels).all()


def test_points_are_drawn_without_replacement_while_there_are_any(folder: Path) -> None:
    for shapes, _, _ in batches_of(small(data=str(folder), scale=(1.0, 1.0), shift=0.0)):
        for shape in shapes:
            there = shapenet.load(str(folder))["train"]
            clouds = there.points.split(there.counts.tolist())
            rows = {tuple(row) for row in shape.tolist()}
            (whole,) = [cloud for cloud in clouds if rows <= {tuple(row) for row in cloud.tolist()}]
            assert len(rows) == min(32, len(whole))


def test_shapes_fill_the_unit_sphere(folder: Path) -> None:
    text = (folder / MUG / "shape6.txt").read_text()
    raw = np.array([line.split() for line in text.splitlines()], np.float64)[:, :3]
    centred = raw - raw.mean(0)
    expected = centred / np.sqrt((centred**2).sum(1).max())
    train = shapenet.load(str(folder))["train"]
    np.testing.assert_allclose(train.points.split(train.counts.tolist())[5][:, :3], expected, atol=1e-5)


def test_augmentation_scales_and_moves_a_shape_as_a_whole_and_leaves_normals(folder: Path) -> None:
    plain = batches_of(small(data=str(folder), scale=(1.0, 1.0), shift=0.0))
    factors, moves = [], []
    for (shapes, _, _), (changed, _, _) in zip(plain, batches_of(small(data=str(folder))), strict=True):
        assert torch.equal(shapes[..., 3:], changed[..., 3:])
        for before, after in zip(shapes[..., :3], changed[..., :3], strict=True):
            factor = (after[1] - after[0]) / (before[1] - before[0])
            torch.testing.assert_close(after, before * factor[0] + (after[0] - before[0] * factor[0]))
            factors.append(float(factor[0]))
            moves.append((after[0] - before[0] * factor[0]).tolist())
    assert 0.8 <= min(factors) < 0.95 < 1.1 < max(factors) <= 1.25
    assert len(set(factors)) == 15
    flat = np.array(moves)
    assert -0.1001 < flat.min() < -0.05 < 0.05 < flat.max() < 0.1001
    assert (np.ptp(flat, axis=1) > 0).all()


class Oracle(nn.Module):
    """Knows the labels, which the test data writes into the normals; prefers a part of no category there is."""

    def __init__(self, wrong: int | None = None) -> None:
        super().__init__()
        self.wrong = wrong
        self.num_seen = 0

    def forward(self, shapes: Tensor, categories: Tensor) -> Tensor:
        self.num_seen += len(shapes)
        logits = F.one_hot(shapes[..., 3].long(), 50).float()
        logits[..., 20] = 2
        if self.wrong is not None:
            logits[categories == self.wrong] *= -1
        return logits


def test_a_model_that_knows_has_all_and_one_wrong_category_costs_its_share(folder: Path) -> None:
    task = small(data=str(folder))
    model = Oracle()
    assert task.evaluate(model, "test", device=CPU) == dict.fromkeys(("instance_miou", "class_miou", "accuracy"), 100)
    assert model.num_seen == 9
    # a bag has two parts: with the other one always predicted, both have 0
    metrics = task.evaluate(Oracle(wrong=1), "test", device=CPU)
    assert metrics == pytest.approx(dict.fromkeys(metrics, 200 / 3))


def test_evaluation_sees_the_same_points_each_time(folder: Path) -> None:
    task, model = small(data=str(folder)), small_model().eval()
    with torch.no_grad():
        first = task.evaluate(model, "validation", device=CPU)
        forget()
        assert task.evaluate(model, "validation", device=CPU) == first


def test_the_loss_is_the_mean_cross_entropy_over_shapes(folder: Path) -> None:
    task, model = small(data=str(folder)), small_model().eval()
    batch = batches_of(task)[0]
    losses = [task.loss(model, tuple(t[i : i + 1] for t in batch)) for i in range(2)]
    torch.testing.assert_close(task.loss(model, batch), torch.stack(losses).mean())
    probabilities = model(*batch[:2]).softmax(2).gather(2, batch[2].unsqueeze(2))
    torch.testing.assert_close(task.loss(model, batch), -probabilities.log().mean())
