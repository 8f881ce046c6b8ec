"""Batches of images depend on (seed, number) alone, and every form of a source gives the same images."""

import io
from itertools import islice

import numpy as np
import pytest
from PIL import Image
from refusals import refuses

from dovetail.core.errors import FileError, RecipeError
from dovetail.data.augment import OPERATIONS, eval_image, inception_box, train_image
from dovetail.data.image_loader import open_image_data
from dovetail.data.image_settings import Augment, ImageData

pytestmark = pytest.mark.slow

CHANGED = Augment(crop_area=0.3, randaugment=2, magnitude=7)


def opened(path="digits", **more):
    hosts = {name: more.pop(name) for name in ("host_index", "host_count") if name in more}
    return open_image_data(ImageData(str(path), **{"augment": CHANGED} | more), 8, 16, **hosts)


def same(one, other):
    assert np.array_equal(one.images, other.images) and np.array_equal(one.labels, other.labels)


def test_a_batch_depends_on_seed_and_number_alone():
    rows, other = opened()[0], opened()[0]
    same(rows.batch(3), other.batch(3))
    for one, number in zip(islice(rows.iterate(2), 3), range(2, 5), strict=True):
        same(one, other.batch(number))
    assert not np.array_equal(opened(seed=1)[0].batch(3).images, rows.batch(3).images)
    halves = [opened(host_index=i, host_count=2)[0].batch(3) for i in range(2)]
    assert np.array_equal(np.concatenate([half.images for half in halves]), rows.batch(3).images)


def test_an_image_changes_from_epoch_to_epoch_and_each_comes_once():
    rows = opened()[0]
    epoch = len(rows.chosen)
    seen = np.concatenate([rows.batch(i).labels for i in range(epoch // 16 + 1)])[:epoch]
    assert np.array_equal(np.bincount(seen), np.bincount(rows.source.labels))
    assert not np.array_equal(rows.batch(0).images, rows.batch(epoch // 16).images)


def test_held_out_images_come_once_unchanged_and_are_never_trained_on():
    rows, held_out, _ = opened(held_out=0.2)
    assert not set(rows.chosen) & set(held_out.chosen) and len(rows.chosen) + len(held_out.chosen) == 1797
    many = len(held_out.chosen)
    last = held_out.batch(many // 16)
    assert last.loss_mask.sum() == many % 16 and held_out.batch(many // 16 + 1).loss_mask.sum() == 0
    whole = opened(held_out=0.2, augment=Augment(crop_area=1.0))[1].batch(0).images[0]
    assert np.array_equal(whole[..., 0], rows.source.read(held_out.chosen[0]))


def write(form, folder, images, labels):
    """Write images [N, H, W, 3] in a form; return the path."""
    if form == "npz":
        np.savez(folder / "some.npz", image=images, label=labels)
        return folder / "some.npz"
    if form == "npy":
        np.save(folder / "some.npy", images)
        np.save(folder / "some-labels.npy", labels)
        return folder / "some.npy"
    if form == "folder":
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            (folder / f"class{label}").mkdir(exist_ok=True)
            Image.fromarray(image).save(folder / f"class{label}" / f"{i}.png")
        return folder
    import pyarrow as pa
    import pyarrow.parquet as pq

    def png(image):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        return file.getvalue()

    pq.write_table(pa.table({"image": [{"bytes": png(x)} for x in images], "label": labels}), folder / "some.parquet")
    return folder / "some.parquet"


@pytest.mark.parametrize("form", ["npz", "npy", "folder", "parquet"])
def test_every_form_gives_the_same_images(form, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 12, 8, 3), dtype=np.uint8)
    labels = np.sort(np.arange(6) % 3)  # a folder lists them by class
    rows, _, prints = opened(write(form, tmp_path, images, labels), augment=Augment(crop_area=1.0, flip=False))
    assert len(prints) == 1 and len(rows.classes) == 3
    for i in range(6):
        found = eval_image(rows.source.read(i), "", 8, crop=False)
        assert np.array_equal(found, eval_image(images[i], "", 8, crop=False)) and rows.source.labels[i] == labels[i]


def test_every_operation_of_randaugment_keeps_size_and_kind():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    for run in OPERATIONS:
        for strength in (0.0, 0.5, 1.0):
            found = run(image, strength, np.random.default_rng(0))
            assert found.size == (32, 32) and found.mode == "RGB"


def test_crops_lie_inside_with_the_area_and_ratio_asked_for():
    rng = np.random.default_rng(0)
    for _ in range(200):
        left, upper, right, lower = inception_box((120, 80), 0.05, rng)
        assert left >= 0 and upper >= 0 and right <= 120.001 and lower <= 80.001
        share, ratio = (right - left) * (lower - upper) / 9600, (right - left) / (lower - upper)
        assert 0.0499 <= share <= 1.001 and (0.749 <= ratio <= 1.334 or share == 1)


def test_a_large_jpeg_is_decoded_small_and_looks_the_same():
    x = np.linspace(0, 255, 900).astype(np.uint8)
    picture = np.stack(np.broadcast_arrays(x[None, :], x[:600, None], np.uint8(90)), axis=-1)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=95)
    found = eval_image(file.getvalue(), "", 32, crop=True).astype(int)
    assert abs(found - eval_image(picture, "", 32, crop=True)).max() <= 6


def test_bad_sources_are_refused_by_name(tmp_path):
    with refuses("path", FileError):
        opened(tmp_path / "nowhere")
    with refuses("path"):
        opened(tmp_path)
    with refuses("held_out", RecipeError):
        ImageData("digits", held_out=1.5)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "torn.jpg").write_bytes(b"\xff\xd8\xff\xe0 not an image")
    with refuses(None, FileError, naming="torn.jpg"):
        opened(tmp_path)[0].batch(0)


def test_the_same_generator_gives_the_same_image():
    image = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    one, other = (train_image(image, "", 16, CHANGED, np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(one, other)


@pytest.mark.thorough
def test_worker_processes_give_the_same_batches():
    rows = opened(workers=2)[0]
    for one, number in zip(islice(rows.iterate(1), 3), range(1, 4), strict=True):
        same(one, rows.batch(number))
