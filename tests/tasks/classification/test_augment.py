"""What is done to images before they are trained on."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from classification_cases import Fixed
from torch import Tensor

from growprune.tasks.classification import Classification, images, score


def random_pixels(count: int, height: int = 6, width: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, height, width, 3), generator=generator, dtype=torch.uint8)


def test_flips_mirror_the_images_that_are_chosen() -> None:
    pixels = random_pixels(4)
    which = torch.tensor([True, False, False, True])
    for image, out, is_flipped in zip(pixels, images.flipped(pixels, which), which, strict=True):
        expected = [[image[y, 5 - x if is_flipped else x].tolist() for x in range(6)] for y in range(6)]
        assert out.tolist() == expected


def test_shifts_cut_from_the_image_padded_with_black() -> None:
    pixels = random_pixels(6, height=5, width=7)
    offsets = torch.tensor([[0, 0], [8, 8], [4, 4], [0, 8], [3, 5], [6, 1]])
    shifted = images.shifted(pixels, offsets)
    for image, out, (top, left) in zip(pixels.numpy(), shifted.numpy(), offsets.tolist(), strict=True):
        padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
        np.testing.assert_array_equal(out, padded[top : top + 5, left : left + 7])
    assert shifted.dtype == torch.uint8
    assert torch.equal(shifted[2], pixels[2])


def box_of(numbers: list[list[float]], width: int, height: int, min_scale: float) -> tuple[float, ...]:
    """A random resized crop, one image at a time."""
    x, y = numbers[-1]
    w, h = min(width, height * 4 / 3), min(height, width * 4 / 3)
    for first, second in reversed(numbers[:-1]):
        area = width * height * (min_scale + (1 - min_scale) * first)
        ratio = (3 / 4) * (16 / 9) ** second
        if math.sqrt(area * ratio) <= width and math.sqrt(area / ratio) <= height:
            w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
    left, top = (width - w) * x, (height - h) * y
    return left, top, left + w, top + h


@pytest.mark.parametrize(("width", "height"), [(32, 32), (50, 30), (20, 90), (300, 10)])
def test_boxes_are_those_drawn_one_image_at_a_time(width: int, height: int) -> None:
    boxes = torch.tensor([images.random_box(index, width, height, seed=1, min_scale=0.08) for index in range(200)])
    for index, found in enumerate(boxes.tolist()):
        drawn = torch.rand(images.NUM_TRIES + 1, 2, generator=images.generator("cpu", 1, index)).tolist()
        assert found == pytest.approx(box_of(drawn, width, height, 0.08), rel=1e-4, abs=1e-3)
    sides = boxes[:, 2:] - boxes[:, :2]
    assert bool((boxes >= 0).all())
    assert bool((boxes[:, 2] <= width + 1e-3).all() and (boxes[:, 3] <= height + 1e-3).all())
    assert bool(((sides[:, 0] / sides[:, 1]) < 4 / 3 + 1e-3).all() and ((sides[:, 0] / sides[:, 1]) > 0.749).all())


def test_every_image_that_is_streamed_and_every_seed_has_its_own_box() -> None:
    boxes = {images.random_box(i, 50, 40, seed=seed, min_scale=0.08) for i in range(10) for seed in range(10)}
    assert len(boxes) == 100


def test_normalising_takes_the_mean_and_divides_by_the_deviation() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    out = images.normalised(pixels, (0.5, 0.2, 0.6), (0.25, 0.1, 0.2))
    torch.testing.assert_close(out.flatten(), torch.tensor([-2.0, 0.0, 2.0]))


def test_mixing_takes_the_rest_from_the_image_before() -> None:
    values = torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1, 1)
    assert images.mixed(values, 0.75).flatten().tolist() == [0.75 + 25.0, 7.5 + 0.25, 75.0 + 2.5]


def test_the_loss_of_a_mixture_is_that_of_its_soft_targets() -> None:
    task = Classification(num_classes=4, label_smoothing=0.2)
    logits = [[1.0, 2.0, -1.0, 0.5], [0.0, -3.0, 2.0, 1.0], [4.0, 0.0, 0.0, 1.0]]
    labels, others, share = torch.tensor([1, 2, 0]), torch.tensor([3, 2, 1]), torch.tensor([0.7, 0.7, 0.4])
    batch = torch.zeros(3, 3, 2, 2), labels, others, share
    targets = torch.full((3, 4), 0.2 / 4)
    for i in range(3):
        targets[i, labels[i]] += 0.8 * share[i]
        targets[i, others[i]] += 0.8 * (1 - share[i])
    expected = -(targets * torch.tensor(logits).log_softmax(1)).sum(1)
    torch.testing.assert_close(task.loss(Fixed(logits), batch), expected.mean())
    plain = -(torch.tensor(logits).log_softmax(1)[[0, 1, 2], labels]).mean()
    torch.testing.assert_close(replace(task, label_smoothing=0.0).loss(Fixed(logits), batch[:2]), plain)


def test_scores_count_first_guesses_and_first_five() -> None:
    ranked = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3]]).expand(5, 7)
    labels = torch.tensor([0, 4, 5, 1, 6])
    first, five, loss = score(ranked, labels).tolist()
    assert (first, five) == (1, 3)
    total = math.log(sum(math.exp(v) for v in range(3, 10)))
    assert loss == pytest.approx(5 * total - (9 + 5 + 4 + 8 + 3), rel=1e-5)


def test_with_fewer_than_five_classes_all_are_among_the_first_five() -> None:
    assert score(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([0])).tolist()[:2] == [0, 1]
