"""Image files of every kind: what is accepted becomes the right pixels, and the rest is refused by name."""

import base64
import struct
import zipfile
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from refusals import refuses

from dovetail.core.errors import RequestError
from dovetail.io.images.decode import as_image, decode

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def file(image, kind="PNG", **settings):
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    out = BytesIO()
    image.save(out, kind, **settings)
    return out.getvalue()


def png(width, height, *chunks, depth=8, colour=2):
    """Return a PNG of these chunks after its header."""
    head = (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    parts = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in [head, *chunks]
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def refused(data, code, **limits):
    with refuses("messages[0]", RequestError, code) as caught:
        decode(data, param="messages[0]", **limits)
    assert "0x" not in str(caught.value) and "<_io" not in str(caught.value)


@pytest.mark.parametrize("kind, settings", [("PNG", {}), ("WEBP", {"lossless": True})])
def test_lossless_files_keep_every_pixel(kind, settings):
    assert (decode(file(PIXELS, kind, **settings)) == PIXELS).all()


def test_jpeg_and_gif_equal_pillow():
    for kind in ("JPEG", "GIF"):
        data = file(PIXELS, kind)
        assert (decode(data) == np.asarray(Image.open(BytesIO(data)).convert("RGB"))).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_exif_orientation_is_applied(orientation, kind):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file(PIXELS, kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    assert (decode(data) == np.asarray(upright)).all()


@pytest.mark.parametrize("orientation", [0, 9, 77])
def test_unknown_orientation_is_ignored(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert (decode(file(PIXELS, exif=exif)) == PIXELS).all()


def test_damaged_exif_is_ignored():
    assert (decode(file(PIXELS, exif=b"Exif\x00\x00MM\x00*\x00\x00\xff\xff broken")) == PIXELS).all()


def test_transparency_is_put_on_white():
    colours = np.zeros((1, 3, 4), np.uint8)
    colours[0, :, 3] = (0, 128, 255)  # black, more and more of it
    assert decode(file(colours))[0, :, 0].tolist() == [255, 127, 0]
    gray = Image.fromarray(colours).convert("LA")
    assert decode(file(gray))[0, :, 0].tolist() == [255, 127, 0]


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_transparent_entry_of_a_palette_is_white(kind):
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    data = file(image, kind, transparency=1)
    assert decode(data)[0].tolist() == [[10, 20, 30], [255, 255, 255], [70, 80, 90]]


def test_transparent_colour_of_rgb_and_gray_is_white():
    image = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    assert decode(file(image, transparency=(4, 5, 6)))[0].tolist() == [[1, 2, 3], [255, 255, 255]]
    assert decode(file(Image.fromarray(np.array([[7, 8]], np.uint8)), transparency=7))[0, :, 0].tolist() == [255, 8]


def test_sixteen_bits_keep_the_high_byte():
    gray = np.array([[0, 255, 256, 65535]], np.uint16)
    assert decode(file(Image.fromarray(gray)))[0].tolist() == [[0] * 3, [0] * 3, [1] * 3, [255] * 3]
    row = zlib.compress(b"\0" + struct.pack(">6H", 0, 0x1234, 0xFFFF, 0x00FF, 0x0100, 0xABCD))
    colours = png(2, 1, (b"IDAT", row), (b"IEND", b""), depth=16)
    assert decode(colours)[0].tolist() == [[0, 0x12, 0xFF], [0, 1, 0xAB]]


def test_cmyk_bilevel_and_gray_become_rgb():
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    red = decode(file(cmyk, "JPEG", quality=100))[8, 8].astype(int)
    assert red[0] > 250 and red[1] < 5 and red[2] < 5
    assert decode(file(Image.fromarray(np.array([[False, True]]))))[0].tolist() == [[0] * 3, [255] * 3]


def test_photo_with_a_preview_behind_it_is_accepted():
    out = BytesIO()
    preview = Image.fromarray(PIXELS[:3])
    Image.fromarray(PIXELS).save(out, "MPO", save_all=True, append_images=[preview])
    assert decode(out.getvalue()).shape == PIXELS.shape


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animation_is_refused(kind):
    frames = [Image.fromarray(PIXELS), Image.fromarray(255 - PIXELS)]
    out = BytesIO()
    frames[0].save(out, kind, save_all=True, append_images=frames[1:])
    refused(out.getvalue(), "unsupported_image_media_type")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("part", [0.05, 0.5, 0.9])
def test_truncated_file_is_refused(kind, part):
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = file(noise, kind)
    with pytest.raises(RequestError) as caught:
        decode(data[: int(len(data) * part)], param="messages[0]")
    assert caught.value.param == "messages[0]" and "0x" not in str(caught.value)


def test_flipped_bytes_never_raise_anything_else():
    rng = np.random.default_rng(2)
    noise = rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        data = bytearray(file(noise, kind))
        for _ in range(60):
            broken = bytearray(data)
            for at in rng.integers(0, len(data), 3):
                broken[at] = rng.integers(0, 256)
            try:
                assert decode(bytes(broken)).dtype == np.uint8
            except RequestError as error:
                assert error.code is not None


@pytest.mark.parametrize("size", [(100_000, 100_000), (9_000, 9_000), (2**31 - 1, 1)])
def test_size_in_the_header_is_checked_first(size):
    refused(png(*size, (b"IDAT", b""), (b"IEND", b"")), "image_too_large")


def test_large_webp_header_is_checked_first():
    data = bytearray(file(PIXELS, "WEBP", lossless=True))
    at = data.index(b"VP8L") + 9  # 14 bits each of width - 1 and height - 1
    data[at : at + 4] = struct.pack("<I", 16382 | 16382 << 14)
    refused(bytes(data), "image_too_large")


def test_limits_are_arguments():
    refused(file(PIXELS), "image_too_large", max_pixels=53)
    refused(file(PIXELS), "image_file_too_large", max_bytes=10)
    assert decode(file(PIXELS), max_pixels=54).shape == (6, 9, 3)


@pytest.mark.parametrize("data", [
    b"<svg xmlns='http://www.w3.org/2000/svg'></svg>", b"%!PS-Adobe-3.0 EPSF-3.0", b"not an image", b"\x00" * 100,
    b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a",
])  # fmt: skip
def test_other_files_are_refused(data):
    refused(data, "unsupported_image_media_type")


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "ICO", "PCX"])
def test_formats_that_are_not_named_are_refused(kind):
    refused(file(PIXELS, kind), "unsupported_image_media_type")


def test_files_that_are_another_document_too_are_refused():
    archive = BytesIO(file(PIXELS))
    archive.seek(0, 2)
    with zipfile.ZipFile(archive, "a") as z:
        z.writestr("x.txt", "hello")
        z.comment = b"a comment"
    refused(archive.getvalue(), "invalid_image")
    refused(file(PIXELS, "JPEG", comment=b"%PDF-1.4"), "invalid_image")


def test_empty_file_is_refused():
    refused(b"", "empty_image_file")


def test_python_objects(tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(file(PIXELS))
    for given in (path, str(path), path.read_bytes(), bytearray(path.read_bytes()), Image.fromarray(PIXELS), PIXELS):
        assert (as_image(given) == PIXELS).all()
    assert (as_image(PIXELS[:, ::-1]) == PIXELS[:, ::-1]).all()
    assert (as_image(np.dstack([PIXELS, np.zeros((6, 9), np.uint8)])) == 255).all()


@pytest.mark.parametrize("given", [
    PIXELS.astype(np.float32), PIXELS.transpose(2, 0, 1), PIXELS[:0], np.zeros((2, 2, 1), np.uint8), 7, None,
])  # fmt: skip
def test_other_python_objects_are_refused(given):
    with refuses("images[0]", RequestError, "invalid_image"):
        as_image(given, param="images[0]")


def test_data_urls():
    data = base64.b64encode(file(PIXELS)).decode()
    assert (as_image(f"data:image/png;base64,{data}") == PIXELS).all()
    for url, code in (
        ("data:text/html;base64,aGk=", "invalid_image_url"), ("http://localhost/a.png", "invalid_image_url"),
        ("file:///etc/passwd", "invalid_image_url"), ("data:image/png;base64,%%", "invalid_base64_image"),
        (f"data:image/png;base64,{data * 9}", "image_file_too_large"),
    ):  # fmt: skip
        with refuses("images[0]", RequestError, code):
            as_image(url, param="images[0]", max_bytes=1000)


def test_memory_is_flat_over_a_thousand_images():
    resource = pytest.importorskip("resource")
    files = [file(np.random.default_rng(i).integers(0, 256, (256, 256, 3), dtype=np.uint8), "JPEG") for i in range(4)]

    def most_after(count):
        for i in range(count):
            decode(files[i % 4])
            with pytest.raises(RequestError):
                decode(files[i % 4][:3000])
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = most_after(50)
    assert most_after(950) - before < 20_000, "kilobytes"  # one image in ten kept would be 19 MB of pixels


def test_a_file_is_measured_before_it_is_read(tmp_path):
    path = tmp_path / "large.png"
    with path.open("wb") as out:
        out.truncate(10**9)
    with refuses("image", RequestError, "image_file_too_large"):
        as_image(path)


def test_a_missing_file_is_refused(tmp_path):
    with refuses("image", RequestError, "invalid_image"):
        as_image(tmp_path / "missing.png")
