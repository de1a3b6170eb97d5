"""Images, files and settings that are not right."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from classification_cases import (
    CIFAR,
    CPU,
    NAMES,
    VARIANTS,
    Fixed,
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
from torch.nn import functional as F

from growprune.tasks.classification import UNREADABLE, Classification, images


def spoiled(files: list[tuple[bytes, int, bool]], *which: int) -> list[tuple[bytes, int, bool]]:
    return [(c[: len(c) // 2] if i in which else c, label, test) for i, (c, label, test) in enumerate(files)]


def bad_images(
    tmp_path: Path, files: list[tuple[bytes, int, bool]], kind: str, *which: int
) -> tuple[str, dict[int, str]]:
    files = spoiled(files, *which)
    if kind == "folder":
        data = write_folder(tmp_path, files)
        names = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*"))
        return data, dict(enumerate(sorted(names, key=lambda name: name.split("/")[2])))
    return write_packed(tmp_path / "images.npz", packed(files)), {i: f"image {i}:" for i in range(len(files))}


@pytest.mark.parametrize("kind", ["folder", "packed"])
def test_a_corrupt_image_in_memory_is_named_once_and_left_out(
    tmp_path: Path, files: list[tuple[bytes, int, bool]], kind: str
) -> None:
    data, names = bad_images(tmp_path, files, kind, 5, 40)
    with pytest.warns(UserWarning, match="skipped") as caught:
        task = small(data, num_validation=1, batch_size=64)
        assert task.num_batches() == 1
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2
    assert names[5] in messages[0] and "(1 so far)" in messages[0]
    assert names[40] in messages[1] and "(1 so far)" in messages[1]  # those to test with count apart
    ((pixels, labels),) = task.batches(seed=0, start=0, device=CPU)
    assert len(pixels) == len(labels) == 39 - 1 - 1
    assert len(shown(task, "test")) == 8


@pytest.mark.filterwarnings("ignore:.*skipped:UserWarning")
@pytest.mark.parametrize("in_memory", [True, False])
def test_results_say_how_many_images_they_lack(
    tmp_path: Path, files: list[tuple[bytes, int, bool]], in_memory: bool
) -> None:
    data, _ = bad_images(tmp_path, files, "folder", 40)
    task = small(data, in_memory=in_memory)
    assert task.evaluate(Recorder(), "test", device=CPU)["skipped"] == 1
    assert "skipped" not in task.evaluate(Recorder(), "validation", device=CPU)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["folder", "packed"])
def test_a_corrupt_image_that_is_streamed_has_no_label(
    tmp_path: Path, files: list[tuple[bytes, int, bool]], kind: str, workers: int
) -> None:
    bad = next(i for i in range(39) if i not in sources_validation(files))
    data, names = bad_images(tmp_path, files, kind, bad)
    task = small(data, in_memory=False, workers=workers, batch_size=11)
    with pytest.warns(UserWarning, match="1 so far") as caught:
        batches = list(task.batches(seed=0, start=0, device=CPU))
    assert names[bad] in str(caught[0].message)
    sizes = [int((labels != UNREADABLE).sum()) for _, labels in batches]
    assert sorted(sizes) == [10, 11, 11]
    assert all(len(pixels) == 11 for pixels, _ in batches)  # it keeps its place, and counts nothing
    assert len(list(task.batches(seed=1, start=0, device=CPU))) == 3  # the next epoch neither warns nor counts again


def sources_validation(files: list[tuple[bytes, int, bool]]) -> set[int]:
    train = [i for i, (_, _, is_test) in enumerate(files) if not is_test]
    return set(np.array(train)[np.random.default_rng(0).permutation(len(train))[:6]].tolist())


@pytest.mark.filterwarnings("ignore:.*skipped:UserWarning")
@pytest.mark.parametrize("in_memory", [True, False])
def test_too_many_corrupt_images_are_an_error(
    tmp_path: Path, files: list[tuple[bytes, int, bool]], in_memory: bool
) -> None:
    data, _ = bad_images(tmp_path, files, "folder", *range(0, 39, 2))
    with pytest.raises(ValueError, match=r"train/.*bad record number 11.*at most 10.*Repair or remove"):
        list(small(data, in_memory=in_memory, batch_size=32).batches(seed=0, start=0, device=CPU))


@pytest.mark.parametrize("mixup", [0.0, 0.4])
def test_images_without_a_label_count_nothing(mixup: float) -> None:
    task = Classification(model="resnet18", stem="cifar", width=4, num_classes=3, mixup=mixup)
    logits = torch.randn(4, 3)
    labels = torch.tensor([0, UNREADABLE, 2, 1])
    batch = (torch.zeros(4, 3, 8, 8), labels, *((labels.roll(1), torch.full((4,), 0.3)) if mixup else ()))
    each = F.cross_entropy(logits, labels.clamp(min=0), label_smoothing=0.1, reduction="none")
    other = F.cross_entropy(logits, labels.roll(1).clamp(min=0), label_smoothing=0.1, reduction="none")
    each[1], other[2] = 0, 0
    expected = (0.3 * each + 0.7 * other).mean() if mixup else each.mean()
    torch.testing.assert_close(task.loss(Fixed(logits), batch), expected)


@pytest.mark.parametrize("mixup", [0.0, 0.4])
def test_a_replica_has_its_own_images_right_and_reads_no_more(
    data: str, mixup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = small(data, in_memory=False, mixup=mixup, batch_size=11)
    whole = list(task.batches(seed=3, start=0, device=CPU))
    decode, read = images.Decoder.__call__, []

    def counting(decoder: images.Decoder, index: int) -> Any:
        read.append(index)
        return decode(decoder, index)

    monkeypatch.setattr(images.Decoder, "__call__", counting)
    for replica in range(3):
        read.clear()
        part = list(task.for_replica(replica, 3).batches(seed=3, start=0, device=CPU))
        for ours, theirs in zip(part, whole, strict=True):
            assert_same([tuple(t[replica::3] for t in ours)], [tuple(t[replica::3] for t in theirs)])
        assert len(read) == len(set(read))
        assert len(read) <= (24 if mixup else 12)  # of 33


@pytest.mark.filterwarnings("ignore:.*skipped:UserWarning")
def test_a_split_that_cannot_be_read_is_an_error(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    data, _ = bad_images(tmp_path, files, "packed", *range(39, 48))
    for in_memory in (True, False):
        with pytest.raises(ValueError, match="bad record number 2, but at most 1 are skipped"):
            shown(small(data, in_memory=in_memory), "test")
        images.report_bad.cache_clear()


def test_an_image_of_another_size_is_named(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    odd = [(jpeg(picture(0, 0, height=12, width=14)), 0, False) if i == 4 else f for i, f in enumerate(files)]
    data = write_packed(tmp_path / "images.npz", packed(odd))
    with pytest.warns(UserWarning, match=r"skipped image 4: .* 14 x 12, not 12 x 12\. .* task\.in_memory=false"):
        small(data).num_batches()
    with pytest.raises(ValueError, match=r"crop='padded' needs .* has images of 12 x 12\. Set task\.image_size"):
        list(small(data, image_size=16).batches(seed=0, start=0, device=CPU))


def test_data_that_is_not_there_is_an_error_that_shows_the_layout(tmp_path: Path) -> None:
    (tmp_path / "half" / "train").mkdir(parents=True)
    for given, why in {
        "": "--data is missing. Give --data DIR with",
        str(tmp_path / "none"): "--data .*none does not exist. Expected",
        str(tmp_path / "none.npz"): "--data .*none.npz does not exist. Expected",
        str(tmp_path / "half"): "half has no val",
    }.items():
        with pytest.raises(ValueError, match=f"{why}.* DIR/train/<class>"):
            small(given).num_batches()


def test_a_wrong_number_of_classes_is_an_error(data: str) -> None:
    with pytest.raises(ValueError, match=r"has 3 classes, but num_classes is 7\. Set task\.num_classes=3"):
        small(data, num_classes=7).num_batches()


def test_a_class_only_val_has_is_an_error(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    data = write_folder(tmp_path, files)
    (tmp_path / "val" / "dog").mkdir()
    with pytest.raises(ValueError, match="val has the class 'dog', which train does not have"):
        small(data).num_batches()


def test_class_that_only_train_has_is_allowed(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    data = write_folder(tmp_path, [f for f in files if not (f[2] and f[1] == 1)])
    recorder = Recorder()
    small(data).evaluate(recorder, "test", device=CPU)
    assert len(recorder.seen) == 6
    assert images.load(data, 3).labels[-6:].tolist() == [0, 0, 0, 2, 2, 2]


def test_an_empty_split_is_an_error(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    for name, is_test in (("train", True), ("test", False)):
        data = write_folder(tmp_path / name, [f for f in files if f[2] is is_test])
        for kept in NAMES:
            (tmp_path / name / ("train" if is_test else "val") / kept).mkdir(parents=True)
        with pytest.raises(ValueError, match=f"the {name} split has no examples"):
            small(data).num_batches()


def test_layouts_of_others_are_told_what_is_expected(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    flat = Path(write_folder(tmp_path / "flat", files))
    for name in NAMES:
        for file in (flat / "val" / name).iterdir():
            file.rename(flat / "val" / file.name)
    with pytest.raises(ValueError, match=r"flat/val: the test split has no examples\. Expected DIR/train/<class>"):
        small(str(flat)).num_batches()


def test_hidden_folders_are_no_classes_and_empty_ones_are_refused(
    tmp_path: Path, files: list[tuple[bytes, int, bool]]
) -> None:
    data = write_folder(tmp_path, files)
    (tmp_path / "train/.ipynb_checkpoints").mkdir()
    assert small(data).num_batches() > 0
    images.load.cache_clear()
    (tmp_path / "train/zebra").mkdir()
    with pytest.raises(ValueError, match=r"train/zebra has no images.*Remove the folder, or add images"):
        small(data, num_classes=4).num_batches()


@pytest.mark.filterwarnings("ignore:.*skipped:UserWarning")
def test_one_image_is_too_few_to_train_on(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    few = [*spoiled(files, 0)[:1], *files[13:14], *files[26:27], *files[-3:]]
    data = write_packed(tmp_path / "images.npz", packed(few))
    with pytest.raises(ValueError, match="training needs at least 2 readable images, got 1"):
        small(data, num_validation=1).num_batches()


@pytest.mark.parametrize("count", [0, 38, 39, 100])
def test_validation_images_must_leave_some_to_train_on(data: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"num_validation must leave .*, got {count} of the 39 training images of "):
        small(data, num_validation=count).num_batches()


WRONG_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "labels": ({"labels": np.arange(48) % 5}, "0 to 2 .* 3, 4"),
    "negative": ({"labels": -(np.arange(48) % 2)}, "0 to 2 .* -1"),
    "short": ({"labels": np.zeros(47, dtype=np.uint8)}, "47 labels, 48 splits and 49 offsets"),
    "split": ({"split": np.full(48, 2)}, "split .* 2"),
    "falling": ({"offsets": np.arange(49)[::-1]}, "offsets"),
    "beyond": ({"offsets": 10**9 * np.arange(49)}, "offsets"),
    "axes": ({"labels": np.zeros((48, 1), dtype=np.uint8)}, "labels .* 2"),
    "fractions": ({"labels": 0.9 * (np.arange(48) % 3)}, "labels .*float64"),
    "words": ({"labels": np.array(["cat"] * 48)}, "labels .*<U3"),
    "wide": ({"data": np.zeros(10**5, dtype=np.int64)}, "data .*int64"),
    "pickle": ({"classes": np.array([print, "b", "c"], dtype=object)}, "allow_pickle=False"),
    "absent": ({"offsets": None}, "offsets is not a file"),
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_packed_files_with_wrong_contents_are_refused(
    tmp_path: Path, files: list[tuple[bytes, int, bool]], name: str
) -> None:
    wrong, why = WRONG_ARRAYS[name]
    arrays = {key: value for key, value in {**packed(files), **wrong}.items() if value is not None}
    with pytest.raises(ValueError, match=why):
        small(write_packed(tmp_path / "images.npz", arrays)).num_batches()


def test_a_file_that_is_no_packed_file_is_refused(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    path = tmp_path / "images.npz"
    content = Path(write_packed(path, packed(files))).read_bytes()
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    for number, wrong in enumerate((b"", content[:10], content[: len(content) // 2], array.getvalue())):
        path = tmp_path / f"{number}.npz"
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="cannot read"):
            small(str(path)).num_batches()


def test_a_packed_file_damaged_anywhere_is_an_error_of_one_line(
    tmp_path: Path, files: list[tuple[bytes, int, bool]]
) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, **packed(files))
    for place in range(0, len(file.getvalue()), 97):
        content = bytearray(file.getvalue())
        content[place] ^= 0xFF
        path = tmp_path / f"{place}.npz"
        path.write_bytes(content)
        try:
            images.load(str(path), 3)
        except ValueError as error:
            assert str(path) in str(error)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # is a prototype feature, as torch says each time
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_on_a_gpu_an_epoch_is_the_same_each_time_and_does_not_wait(data: str, settings: dict[str, Any]) -> None:
    task, device = small(data, **settings), torch.device("cuda")
    epoch = list(task.batches(seed=1, start=0, device=device))
    assert all(tensor.is_cuda for batch in epoch for tensor in batch)
    assert_same(list(task.batches(seed=1, start=2, device=device)), epoch[2:])
    again = task.batches(seed=1, start=0, device=device)
    assert_same([next(again)], epoch[:1])  # what an epoch needs once is copied here
    if task.in_memory:
        torch.cuda.set_sync_debug_mode("error")
    try:
        rest = list(again)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(rest, epoch[1:])


@pytest.mark.skipif(not CIFAR.exists(), reason="the CIFAR-10 subset is not here")
def test_the_packed_cifar_subset_is_read() -> None:
    task = Classification(
        data=str(CIFAR), model="resnet18", stem="cifar", width=4, num_classes=10, image_size=32, batch_size=512,
        crop="padded", num_validation=500, in_memory=True, workers=0,
    )  # fmt: skip
    assert task.num_batches() == 9  # 4,500 images
    decoded = images.held(str(CIFAR), 10, 0)
    assert decoded.pixels.shape == (6000, 32, 32, 3)
    assert bool(decoded.good.all())
    assert images.load(str(CIFAR), 10).labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    means = decoded.pixels.float().mean((0, 1, 2)) / 255
    torch.testing.assert_close(means, torch.tensor([0.4917, 0.4826, 0.4472]), atol=0.01, rtol=0)
