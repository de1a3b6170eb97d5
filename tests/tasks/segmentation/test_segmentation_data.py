"""Shapes, lists and files that are not right."""

import json
import warnings
import zipfile
from pathlib import Path

import pytest
from segmentation_cases import BAG, GOOD, MUG, SUBSET, forget, small, zipped

from growprune.tasks.segmentation import shapenet


def refusal(data: Path | str) -> str:
    with pytest.raises(ValueError) as refused:
        small(data=str(data)).num_batches()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    assert "--data is missing. Give --data DIR with" in refusal("")
    assert f"--data {tmp_path / 'nowhere'} does not exist. Expected the folder" in refusal(tmp_path / "nowhere")
    lists = "train_test_split/shuffled_val_file_list.json"
    (folder / lists).unlink()
    assert f"{folder} has no {lists}" in refusal(folder)
    assert f"has no {lists}" in refusal(zipped(folder, tmp_path / "a.zip"))
    (folder / shapenet.INDEX).unlink()
    assert f"{folder} has no {shapenet.INDEX}. Expected the folder" in refusal(folder)
    assert f"{folder.parent} has no {shapenet.INDEX}" in refusal(folder.parent)
    assert f"has no {shapenet.INDEX}" in refusal(zipped(folder, tmp_path / "b.zip"))


def test_a_zip_file_that_is_none_or_is_cut_off_is_refused(folder: Path, tmp_path: Path) -> None:
    path = zipped(folder, tmp_path / "a.zip")
    path.write_bytes(path.read_bytes()[:-500])
    assert "is not a folder or a valid zip file" in refusal(path)
    (tmp_path / "b.zip").write_text("hello")
    assert "is not a folder or a valid zip file" in refusal(tmp_path / "b.zip")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["shape_data/02691156/sha', "is not JSON (Unterminated string"),
        ('{"a": 1}', "must be a list such as"),
        ("[1, 2]", "must be a list such as"),
        ("[" * 100_000, "(maximum recursion depth"),
    ],
)
def test_a_broken_list_is_refused(folder: Path, text: str, message: str) -> None:
    relative = "train_test_split/shuffled_train_file_list.json"
    (folder / relative).write_text(text)
    assert relative in refusal(folder)
    assert message in refusal(folder)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_split_without_shapes_is_refused(folder: Path, split: str) -> None:
    (folder / "train_test_split" / f"shuffled_{shapenet.SPLITS[split]}_file_list.json").write_text("[]")
    assert f"the {split} split has no examples" in refusal(folder)


BAD_TEXTS = {
    "03797390/shape6.txt does not exist": None,
    "the shape has no points": " \n\n",
    "the number of columns changed from 7 to 6 at row 3": GOOD * 2 + "0 0 0 0 0 36\n" + GOOD,
    "its lines have 6 numbers, not the 7 of x y z nx ny nz label": "0 0 0 0 0 36\n" * 3,
    "could not convert string 'O.5' to float32 at row 1, column 2": GOOD + "0 O.5 0 0 0 1 36\n",
    "could not convert string '#' to float32 at row 1": GOOD + "# 0 0 0 0 1 36\n",
    "could not convert string '1_0' to float32 at row 1": GOOD + "1_0 0 0 0 0 1 36\n",
    "point 3 has a non-finite value": GOOD * 2 + "nan 0 0 0 0 1 36\n",
    "labels of category Mug must be 36 to 37, got 38 for point 2": GOOD + "0 0 0 0 0 1 38\n",
    "labels of category Mug must be 36 to 37, got 36.5 for point 1": "0 0 0 0 0 1 36.5\n",
    "could not convert string '\\x00": "\x00\x01ÿ",
}


@pytest.mark.parametrize("message", BAD_TEXTS)
def test_a_bad_shape_is_named_and_skipped(folder: Path, tmp_path: Path, message: str) -> None:
    text, path = BAD_TEXTS[message], folder / MUG / "shape6.txt"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    for _ in range(2):  # each process warns
        with pytest.warns(UserWarning) as caught:
            shapes = shapenet.load(str(folder))["train"]
        (warning,) = caught
        assert f"skipped shape_data/{MUG}/shape6: {message}" in str(warning.message)
        assert sorted(shapes.categories.tolist()) == [0] * 5 + [1] * 5 + [11] * 4
        forget()


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("shape_data/01234567/dragon", "'01234567'"),
        ("nonsense", "nonsense"),
        (f"shape_data/{MUG}/../{BAG}/shape11", BAG),
    ],
)
def test_a_bad_entry_of_a_list_is_named_and_skipped(folder: Path, entry: str, named: str) -> None:
    path = folder / "train_test_split" / "shuffled_train_file_list.json"
    path.write_text(json.dumps([entry, *json.loads(path.read_text())]))
    with pytest.warns(UserWarning, match=named):
        assert len(shapenet.load(str(folder))["train"]) == 15


def test_a_shape_damaged_inside_a_zip_file_is_named_and_skipped(folder: Path, tmp_path: Path) -> None:
    path = zipped(folder, tmp_path / "a.zip")
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{shapenet.NAME}/{MUG}/shape6.txt")
    content = bytearray(path.read_bytes())
    middle = info.header_offset + 30 + len(info.filename) + info.compress_size // 2
    content[middle : middle + 8] = bytes(8)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="shape6: cannot read .*"):
        assert len(shapenet.load(str(path))["train"]) == 14


@pytest.mark.parametrize("split", ["val", "test"])
def test_no_shape_that_is_measured_on_is_skipped(folder: Path, split: str) -> None:
    path = folder / "train_test_split" / f"shuffled_{split}_file_list.json"
    path.write_text(json.dumps([f"shape_data/{MUG}/lost", *json.loads(path.read_text())]))
    name = {"val": "validation", "test": "test"}[split]
    said = refusal(folder)
    assert f"shape_data/{MUG}/lost" in said and name in said


def test_shapes_of_any_size_are_brought_into_the_unit_sphere(folder: Path) -> None:
    (folder / MUG / "shape6.txt").write_text("1e25 0 0 0 0 1 36\n3e25 0 0 0 0 1 37\n")
    shapes = shapenet.load(str(folder))["train"]
    place = shapes.counts.tolist().index(2)
    start = int(shapes.counts[:place].sum())
    assert shapes.points[start : start + 2, 0].tolist() == [-1, 1]


def test_too_many_bad_shapes_are_an_error(folder: Path) -> None:
    path = folder / "train_test_split" / "shuffled_train_file_list.json"
    path.write_text(json.dumps([f"shape_data/{MUG}/lost{n}" for n in range(11)] + json.loads(path.read_text())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "bad record number 11" in refusal(folder)


@pytest.mark.skipif(not SUBSET.exists(), reason="the real subset is not here")
def test_the_real_subset_is_read_as_its_description_says() -> None:
    shapes = shapenet.load(str(SUBSET))
    assert {split: len(s) for split, s in shapes.items()} == {"train": 384, "validation": 60, "test": 120}
    assert {int(c) for c in shapes["train"].categories} == {0, 4, 6, 10, 11, 15}
    assert (shapes["train"].counts == 2048).all()
    rare = [sum(bool((part == 49).any()) for part in s.labels.split(s.counts.tolist())) for s in shapes.values()]
    assert rare == [14, 1, 8]
