"""Read the bytes of an image that a request names: a data: URL, an allowed http(s) URL, or an allowed local file."""

from __future__ import annotations

import base64
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dovetail.core.errors import UserError
from dovetail.io.images.decode import MAX_BYTES
from dovetail.serve.config import ServerConfig
from dovetail.serve.media.fetch import Fetcher

_DATA = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
_DATA_HEAD = 256  # characters before the comma


@dataclass(frozen=True)
class ImageReference:
    """Hold an image as a request names it."""

    where: str  # the path of its field in the request, for errors
    url: str
    detail: str = "auto"


class MediaSources:
    """Read images from where the server's options allow it; `data:` URLs are always allowed."""

    def __init__(self, config: ServerConfig, fetcher: Fetcher | None = None):
        self._fetcher = fetcher or Fetcher(config.allowed_media_domains, MAX_BYTES)
        folder = config.allowed_local_media_path
        self._folder = None if folder is None else Path(os.path.realpath(folder))

    async def fetch(self, url: str) -> bytes | None:
        """Return the file of an http(s) URL, or None for a URL that `read` takes.

        Raises:
            UserError: The URL is not allowed, or the file cannot be fetched.
        """
        if url[:5].lower() in ("data:", "file:"):
            return None
        return await self._fetcher.fetch(url)

    def read(self, url: str) -> bytes:
        """Return the file of a data: or file: URL. Call it in a thread.

        Raises:
            UserError: The URL is not allowed, or the file cannot be read.
        """
        return _read_data(url) if url[:5].lower() == "data:" else self._read_file(url)

    def _read_file(self, url: str) -> bytes:
        if self._folder is None:
            raise UserError("the server reads no local files: start it with --allowed-local-media-path to allow it")
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or "\0" in unquote(parts.path):
            raise UserError("a local file must be given as file:///FOLDER/FILE")
        path = Path(os.path.realpath(unquote(parts.path)))  # follows links, so that none leads outside
        outside = UserError("the local file must be an existing file below --allowed-local-media-path")
        if not path.is_relative_to(self._folder):
            raise outside
        try:
            # O_NOFOLLOW: it has been resolved. O_NONBLOCK: a named pipe would wait for a writer.
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise outside
                data = file.read(MAX_BYTES + 1)
        except OSError:
            raise outside from None
        if len(data) > MAX_BYTES:
            raise _too_large()
        return data


def _read_data(url: str) -> bytes:
    head = _DATA.match(url[:_DATA_HEAD])
    if head is None:
        raise UserError("a data: URL must have the form data:image/png;base64,DATA")
    if (len(url) - head.end()) // 4 * 3 > MAX_BYTES + 2:  # 2: padding
        raise _too_large()
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except ValueError:
        raise UserError("the data: URL is not valid base64") from None


def _too_large() -> UserError:
    return UserError(f"the image file must have at most {MAX_BYTES:,} bytes", code="image_file_too_large")
