"""The task, on images in folders and packed files."""

import io
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from classification_cases import (
    CPU,
    NAMES,
    VARIANTS,
    Image,
    Recorder,
    assert_same,
    jpeg,
    packed,
    picture,
    shown,
    small,
    write_folder,
    write_packed,
)
from torch import Tensor, nn

from growprune.tasks.classification import Classification, images
from growprune.tasks.images import UnreadableImage, opened, to_rgb


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_an_epoch_is_the_same_each_time_and_can_be_entered_anywhere(data: str, settings: dict[str, Any]) -> None:
    task = small(data, **settings)
    epoch = list(task.batches(seed=2**62 + 1, start=0, device=CPU))
    assert [len(batch[1]) for batch in epoch] == [8, 8, 8, 8]  # 33 = 4 * 8 + 1, and the one is left out
    assert len(epoch) == task.num_batches()
    for start in range(5):
        assert_same(list(task.batches(seed=2**62 + 1, start=start, device=CPU)), epoch[start:])
    other = next(iter(task.batches(seed=5, start=0, device=CPU)))
    assert not torch.equal(other[0], epoch[0][0])


def test_batches_do_not_touch_the_global_generators(data: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for settings in VARIANTS:
        list(small(data, **settings).batches(seed=0, start=0, device=CPU))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of fork, from Python 3.12 on
@pytest.mark.parametrize("crop", ["padded", "resized"])
def test_workers_change_nothing(data: str, crop: str) -> None:
    alone, helped = (small(data, crop=crop, in_memory=False, workers=workers) for workers in (0, 2))
    for start in (0, 2):
        batches = [list(task.batches(seed=3, start=start, device=CPU)) for task in (alone, helped)]
        assert_same(*batches)


@pytest.mark.parametrize("crop", ["padded", "resized"])
def test_a_folder_and_a_packed_file_of_the_same_images_are_the_same(
    tmp_path: Path, files: list[tuple[bytes, int, bool]], crop: str
) -> None:
    where = [write_folder(tmp_path / "folder", files), write_packed(tmp_path / "images.npz", packed(files))]
    for in_memory in (True, False) if crop == "padded" else (False,):
        epochs = [list(small(d, crop=crop, in_memory=in_memory).batches(seed=0, start=0, device=CPU)) for d in where]
        assert_same(*epochs)


def test_without_crops_images_in_memory_are_those_that_are_streamed(data: str) -> None:
    epochs = [list(small(data, in_memory=held).batches(seed=0, start=0, device=CPU)) for held in (True, False)]
    assert_same(*epochs)


def test_pixels_are_those_of_the_files(data: str, files: list[tuple[bytes, int, bool]]) -> None:
    assert images.load(data, 3).labels.tolist() == [label for _, label, _ in files]
    for pixels, (content, _, _) in zip(images.held(data, 3, 0).pixels, files, strict=True):
        np.testing.assert_array_equal(pixels.numpy(), np.array(Image.open(io.BytesIO(content))))


def trained(task: Classification, monkeypatch: pytest.MonkeyPatch) -> set[bytes]:
    """The images of several epochs, without what is done to them."""
    monkeypatch.setattr(images, "flipped", lambda pixels, which: pixels)
    monkeypatch.setattr(images, "shifted", lambda pixels, offsets: pixels)
    epochs = (task.batches(seed=seed, start=0, device=CPU) for seed in range(6))
    return {image.contiguous().numpy().tobytes() for epoch in epochs for batch in epoch for image in batch[0]}


@pytest.mark.parametrize("in_memory", [True, False])
def test_no_image_is_in_two_splits(data: str, in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    task = small(data, in_memory=in_memory)
    train, validation, test = trained(task, monkeypatch), shown(task, "validation"), shown(task, "test")
    assert (len(train), len(validation), len(test)) == (33, 6, 9)
    assert not train & validation
    assert not train & test
    assert not validation & test


def test_the_test_split_is_the_val_folder(data: str, files: list[tuple[bytes, int, bool]]) -> None:
    task = small(data, mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255))
    expected = [np.array(Image.open(io.BytesIO(content))) for content, _, is_test in files if is_test]
    recorder = Recorder()
    task.evaluate(recorder, "test", device=CPU)
    for found, pixels in zip(recorder.seen, expected, strict=True):
        np.testing.assert_allclose(found.permute(1, 2, 0).numpy(), pixels, atol=1e-3)


def test_metrics_are_in_percent_and_over_the_whole_split(data: str) -> None:
    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor([0.0, 2.0, 1.0]).expand(len(x), 3)

    metrics = small(data).evaluate(Always(), "test", device=CPU)  # three of each class
    total = math.log(1 + math.e + math.e**2)
    assert metrics == {"top1": pytest.approx(100 / 3), "top5": 100.0, "loss": pytest.approx(total - 1)}


def test_a_mixed_batch_is_the_mixture_of_the_plain_one(data: str) -> None:
    plain = next(iter(small(data).batches(seed=4, start=0, device=CPU)))
    inputs, labels, others, share = next(iter(small(data, mixup=0.4).batches(seed=4, start=0, device=CPU)))
    assert torch.equal(labels, plain[1])
    assert others.tolist() == [labels.tolist()[i - 1] for i in range(8)]
    assert len(set(share.tolist())) == 1
    assert 0 < float(share[0]) < 1
    for i in range(8):
        expected = float(share[0]) * plain[0][i] + (1 - float(share[0])) * plain[0][i - 1]
        torch.testing.assert_close(inputs[i], expected)


def test_about_half_of_the_images_are_flipped_and_all_shifts_occur(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flips: list[bool] = []
    shifts: set[tuple[int, int]] = set()
    flipped, shifted = images.flipped, images.shifted
    monkeypatch.setattr(images, "flipped", lambda p, which: (flips.extend(which.tolist()), flipped(p, which))[1])
    monkeypatch.setattr(images, "shifted", lambda p, by: (shifts.update(map(tuple, by.tolist())), shifted(p, by))[1])
    for seed in range(30):
        list(small(data).batches(seed=seed, start=0, device=CPU))
    assert 0.45 < sum(flips) / len(flips) < 0.55
    assert shifts == set(itertools.product(range(9), range(9)))


def test_evaluation_looks_at_the_centre(tmp_path: Path) -> None:
    files = [(jpeg(picture(i % 3, i, height=64, width=96)), i % 3, i >= 9) for i in range(12)]
    data = write_packed(tmp_path / "images.npz", packed(files))
    scale = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}
    task = small(data, crop="resized", image_size=28, num_validation=2, in_memory=False, **scale)
    recorder = Recorder()
    task.evaluate(recorder, "test", device=CPU)
    for found, (content, _, _) in zip(recorder.seen, files[9:], strict=True):
        resized = Image.open(io.BytesIO(content)).resize((48, 32), Image.Resampling.BILINEAR)
        expected = np.array(resized.crop((10, 2, 38, 30)))
        # Images are decoded at half their size already, which rounds otherwise.
        assert np.abs(found.permute(1, 2, 0).numpy() - expected).max() <= 6


def test_streamed_crops_are_parts_of_their_images(tmp_path: Path) -> None:
    """Images whose colours tell the place: red from left to right, green from top to bottom."""
    y, x = np.mgrid[:100, :200]
    image = np.stack([x, 2 * y, 0 * x], -1).astype(np.uint8)
    data = write_packed(tmp_path / "images.npz", packed([(jpeg(image), i % 3, i >= 9) for i in range(12)]))
    scale = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}
    task = small(data, crop="resized", image_size=16, num_validation=1, batch_size=8, in_memory=False, **scale)
    (pixels, _), *_ = task.batches(seed=7, start=0, device=CPU)
    order = images.splits(data, 3, 1)["train"][np.random.default_rng(7).permutation(8)]
    for found, index in zip(pixels, order.tolist(), strict=True):
        left, top, right, bottom = images.random_box(index, 200, 100, seed=7, min_scale=task.min_scale)
        centres = left + (right - left) * (np.arange(16) + 0.5) / 16 - 0.5
        row = found[0].mean(0).numpy()
        row = row if row[0] < row[-1] else row[::-1]  # it may be flipped
        assert np.abs(row - centres).max() < 4
        assert (
            np.abs(found[1].mean(1).numpy() - 2 * (top + (bottom - top) * (np.arange(16) + 0.5) / 16 - 0.5)).max() < 4
        )


def test_grey_and_transparent_images_become_colour(tmp_path: Path) -> None:
    for split, mode in itertools.product(("train", "val"), ("L", "P", "RGBA", "CMYK")):
        for name in NAMES:
            (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
            kind = "jpg" if mode == "CMYK" else "png"
            Image.fromarray(picture(1, 2)).convert(mode).save(tmp_path / split / name / f"{mode}.{kind}")
    for in_memory in (True, False):
        batches = list(small(str(tmp_path), in_memory=in_memory).batches(seed=0, start=0, device=CPU))
        assert batches[0][0].shape == (6, 3, 12, 12)


@pytest.mark.parametrize("mode", ["I", "I;16", "F"])
def test_images_without_a_known_white_are_named(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (12, 12)).save(tmp_path / "a.tiff")
    with Image.open(tmp_path / "a.tiff") as image, pytest.raises(ValueError, match=f"got Pillow mode '{mode}'"):
        to_rgb(image)


def test_errors_of_pillows_decoders_are_caught(tmp_path: Path) -> None:
    Image.new("RGB", (12, 12)).save(tmp_path / "a.png")
    with pytest.raises(UnreadableImage, match="frame 0"), opened(tmp_path / "a.png", "tasks"):
        raise RuntimeError("Failed to decode frame 0")
