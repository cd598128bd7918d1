"""Downloads that need nobody at the keyboard: time limit, resume, checksum, atomic result."""

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from pathlib import Path

from tqdm import tqdm

TIMEOUT = 15.0  # seconds to connect, and to wait for the next bytes
CHUNK = 2**20
TRIES = 5  # connections that each brought something before they broke


def fetch(url: str, path: Path, *, sha256: str | None = None) -> Path:
    """Download `url` to `path`, which appears whole or not at all.

    The bytes go to `path` + ".part". If the connection breaks they stay there, and the next call
    asks the server for the rest only. Proxies are taken from the environment (`http_proxy`,
    `https_proxy`, `no_proxy`).

    Args:
        url: An http or https address.
        path: The file to write. If it is there already, with the right checksum if one is given,
            nothing is downloaded: a file brought from elsewhere is used.
        sha256: The checksum in hexadecimal, if known.

    Returns:
        `path`.

    Raises:
        ConnectionError: If the server cannot be reached within 15 seconds, refuses, or breaks off.
        ValueError: If the checksum is wrong; what was downloaded is removed.
    """
    if path.is_file() and (sha256 is None or checksum(path) == sha256):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    for left in reversed(range(TRIES)):
        before = _size(part)
        reason = _receive(url, part)
        if reason is None:
            break
        if left == 0 or _size(part) <= before:
            raise ConnectionError(
                f"download: {url} broke off after {_size(part)} bytes ({reason}). They are kept in "
                f"{part}: run it again to fetch the rest."
            )
    if sha256 is not None:
        got = checksum(part)
        if got != sha256:
            part.unlink()
            raise ValueError(
                f"download: {url} has SHA-256 {got}, expected {sha256}. It was removed: try again, "
                "and if that does not help, the file was changed at its source or on the way."
            )
    os.replace(part, path)
    return path


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _receive(url: str, part: Path) -> str | None:
    """Append what is missing of `url` to `part`; return None, or why it is still incomplete."""
    start = _size(part)
    headers = {"User-Agent": "graphattn"}
    if start > 0:
        headers["Range"] = f"bytes={start}-"
    try:
        # A new opener: the global one keeps the proxies of its first use.
        opener = urllib.request.build_opener()
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            whole = error.code == 416 and error.headers.get("Content-Range") == f"bytes */{start}"
        if whole:  # nothing was missing
            return None
        if error.code == 416:  # the file became shorter: what we have is of another version
            part.unlink()
            return _receive(url, part)
        raise ConnectionError(
            f"download: {url} answered {error.code} {error.reason}. {_advice(part)}"
        ) from error
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
        reason = getattr(error, "reason", error)
        raise ConnectionError(
            f"download: cannot reach {url} ({reason}; limit {TIMEOUT:g} seconds). {_advice(part)}"
        ) from error
    with response:
        resumed = re.fullmatch(rf"bytes {start}-\d+/.*", response.headers.get("Content-Range", ""))
        if response.status != 206 or resumed is None:
            start = 0
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        bar = tqdm(
            total=total, initial=start, unit="B", unit_scale=True, desc=part.stem, disable=None
        )
        with bar, open(part, "ab" if start > 0 else "wb") as file:
            try:
                while chunk := response.read(CHUNK):
                    file.write(chunk)
                    bar.update(len(chunk))
            except (OSError, http.client.HTTPException) as error:
                return f"{type(error).__name__}: {error}"
    if total is not None and _size(part) != total:
        return f"{total} bytes were announced"
    return None


def _advice(part: Path) -> str:
    return (
        "Check the network and the proxy variables (http_proxy, https_proxy), or bring the file "
        f"from elsewhere to {part.with_name(part.stem)}, and run it again."
    )
