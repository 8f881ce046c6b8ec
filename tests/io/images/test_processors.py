"""Processors against the slow ones of transformers: the same pixels, sizes and text."""

import json
from dataclasses import replace

import image_cases
import numpy as np
import pytest
from image_cases import FAMILIES, image_processor_of, noise
from PIL import Image
from refusals import refuses

from dovetail.core.errors import RequestError
from dovetail.io.images.processor import at_detail, read_processor

pytestmark = pytest.mark.slow

SIZES = [(1, 1), (33, 47), (64, 64), (100, 37), (37, 1201), (611, 433), (500, 8)]


def ours(family, folder, **changes):
    return image_cases.processor_of(family, folder, **changes)[0]


def normalised(item, family):
    """Return the patches as floats, as a tower makes them."""
    patches = item.patches.reshape(len(item.patches), family.patch, family.patch, 3).astype(np.float64) / 255
    if family.name.startswith("Gemma4"):
        return patches
    mean = family.settings.get("image_mean", [0.48145466, 0.4578275, 0.40821073])
    std = family.settings.get("image_std", [0.26862954, 0.26130258, 0.27577711])
    return (patches - mean) / std


def as_picture(item, family):
    """Return [3, H, W] of an item's patches, put where its positions say."""
    width, height = (item.positions.max(0) + 1) * family.patch
    out = np.full((height, width, 3), np.nan)
    for patch, (x, y) in zip(normalised(item, family), item.positions * family.patch, strict=True):
        out[y : y + family.patch, x : x + family.patch] = patch
    return out.transpose(2, 0, 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["smolvlm", "gemma3", "siglip"])
def test_pictures_equal_transformers(name, size, tmp_path):
    family, image = FAMILIES[name], noise(*size)
    wanted = np.array(image_processor_of(family)(Image.fromarray(image))["pixel_values"])
    wanted = wanted.reshape(-1, *wanted.shape[-3:])
    found = ours(family, tmp_path)(image)
    assert len(found.items) == len(wanted)
    for item, picture in zip(found.items, wanted, strict=True):
        np.testing.assert_allclose(as_picture(item, family), picture, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", SIZES)
def test_gemma4_patches_equal_transformers(size, tmp_path):
    family, image = FAMILIES["gemma4"], noise(*size)
    wanted = image_processor_of(family)(Image.fromarray(image))
    (item,) = ours(family, tmp_path)(image).items
    count = len(item.patches)
    np.testing.assert_allclose(
        normalised(item, family).reshape(count, -1), wanted["pixel_values"][0][:count], atol=1e-6, rtol=0
    )
    assert (wanted["image_position_ids"][0][:count] == item.positions).all()
    assert (np.asarray(wanted["image_position_ids"][0][count:]) == -1).all()
    assert item.grid[0] * item.grid[1] == wanted["num_soft_tokens_per_image"][0] <= 70


@pytest.mark.parametrize("size", SIZES)
def test_gemma4_12b_takes_the_same_picture_in_squares(size, tmp_path):
    """The installed transformers has its processor for torchvision alone."""
    pictures = []
    for name in ("gemma4", "gemma4-unified"):
        (item,) = ours(FAMILIES[name], tmp_path)(noise(*size)).items
        pictures.append(as_picture(item, FAMILIES[name]))
    np.testing.assert_array_equal(*pictures)
    assert len(item.patches) == item.grid[0] * item.grid[1]
    assert [tuple(at) for at in item.positions] == [(x, y) for y in range(item.grid[0]) for x in range(item.grid[1])]


@pytest.mark.parametrize("size", [size for size in SIZES if max(size) < 200 * min(size)])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_qwen_patches_equal_one_frame_of_transformers(name, size, tmp_path):
    family, image = FAMILIES[name], noise(*size)
    wanted = image_processor_of(family)(Image.fromarray(image))
    (item,) = ours(family, tmp_path)(image).items
    frames = np.asarray(wanted["pixel_values"]).reshape(-1, 3, 2, family.patch, family.patch)
    for frame in (0, 1):
        picture = frames[:, :, frame].transpose(0, 2, 3, 1)
        np.testing.assert_allclose(normalised(item, family), picture, atol=1e-6, rtol=0)
    assert [1, *(side * 2 for side in item.grid)] == list(wanted["image_grid_thw"][0])
    first = [tuple(xy) for xy in item.positions[:4]]
    assert first == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_smolvlm_published_size_of_a_photo(tmp_path):
    """512 pixels a tile and 64 tokens: 4 x 3 tiles and the small copy, as for SmolVLM-256M."""
    settings = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    family = replace(FAMILIES["smolvlm"], patch=16, max_patches=1024, more={"image_seq_len": 64})
    found = ours(family, tmp_path, **settings)(noise(750, 1000))
    assert len(found.items) == 13 and found.items[0].patches.shape == (1024, 768)
    assert found.text.count("<image>") == 13 * 64
    assert found.text.startswith("<fake_token_around_image><row_1_col_1><image>")
    assert (
        found.text.endswith("<image><fake_token_around_image>")
        and "\n\n<fake_token_around_image><global-img>" in found.text
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_tell_images_and_settings_apart(name, tmp_path):
    family = FAMILIES[name]
    processor = ours(family, tmp_path)
    keys = [processor(image).items[-1].key for image in (noise(64, 64), noise(64, 64), noise(64, 64, seed=1))]
    assert keys[0] == keys[1] != keys[2]
    flat = [processor(np.zeros((h, w, 3), np.uint8)).items[0] for h, w in ((40, 80), (80, 40))]
    assert flat[0].grid == flat[1].grid or flat[0].key != flat[1].key
    other = ours(family, tmp_path, resample=2 if name != "gemma3" else 3)
    assert other(noise(64, 64)).items[-1].key != keys[0]


def test_low_detail_has_fewer_tokens(tmp_path):
    for name, family in FAMILIES.items():
        processor = ours(family, tmp_path)
        low = at_detail(processor, "low")(noise(300, 400)).text.count(family.tokens["image_token"])
        high = at_detail(processor, "high")(noise(300, 400)).text.count(family.tokens["image_token"])
        assert low < high if name == "smolvlm" else low <= high
    with refuses("detail", RequestError, naming="fine"):
        at_detail(processor, "fine")


def test_settings_inside_processor_config(tmp_path):
    """As transformers 5 saves them."""
    family = FAMILIES["gemma4"]
    nested = {"image_processor_type": family.name, **family.settings}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": nested, "audio_seq_length": 750}))
    tokenizer = image_cases.tokenizer_of(family)
    processor = read_processor(tmp_path, image_cases.vision_of(family, tokenizer), tokenizer)
    assert processor.budget == 70


@pytest.mark.parametrize("name, changes, param", [
    ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan"),
    ("gemma3", {"size": {"height": 896, "width": 896}}, "size"),
    ("gemma3", {"image_mean": [0.4, 0.5, 0.5]}, "image_mean"),
    ("gemma3", {"do_center_crop": True}, "do_center_crop"),
    ("gemma4", {"max_soft_tokens": 100}, "max_soft_tokens"),
    ("gemma4", {"patch_size": 16}, "patch_size"),
    ("gemma4", {"do_normalize": True}, "do_normalize"),
    ("qwen3", {"merge_size": 4}, "merge_size"),
    ("qwen3", {"temporal_patch_size": 1}, "temporal_patch_size"),
    ("siglip", {"resample": 0}, "resample"),
    ("smolvlm", {"do_resize": False}, "do_resize"),
    ("smolvlm", {"rescale_factor": 1.0}, "rescale_factor"),
    ("smolvlm", {"max_image_size": {"longest_edge": 512}}, "max_image_size"),
    ("smolvlm", {"image_processor_type": "CLIPImageProcessor"}, "image_processor_type"),
])  # fmt: skip
def test_settings_that_are_not_supported_are_named(name, changes, param, tmp_path):
    with refuses(param):
        ours(FAMILIES[name], tmp_path, **changes)


def test_folder_without_settings_is_refused(tmp_path):
    tokenizer = image_cases.tokenizer_of(FAMILIES["siglip"])
    with refuses(naming="preprocessor_config.json"):
        read_processor(tmp_path, image_cases.vision_of(FAMILIES["siglip"], tokenizer), tokenizer)


def test_qwen_refuses_a_strip(tmp_path):
    with refuses("messages[0]", RequestError, "invalid_image", naming="1000 x 4"):
        ours(FAMILIES["qwen3"], tmp_path)(noise(4, 1000), "messages[0]")
