"""Reads what sacct was asked to save: text or JSON, packed or not."""

from __future__ import annotations

import gzip
import zlib
from datetime import tzinfo

from slurmspot.errors import UsageError
from slurmspot.timeline.json_export import read_json
from slurmspot.timeline.lines import Source
from slurmspot.timeline.rows import Rows
from slurmspot.timeline.text import read_text

_GZIP = b"\x1f\x8b"
_FIRST_BYTES = 4096


def read_rows(source: Source, *, tz: tzinfo | None = None) -> Rows:
    """The rows of an export; what it is shows in its first bytes.

    Args:
        source: open for reading from its beginning, and seekable.
        tz: the cluster's time zone, for times without one; None means this machine's.

    Raises:
        NotFoundError: there is nothing in it.
        UsageError: it is not what sacct saves, or lacks what is needed.
    """
    if _peek(source).startswith(_GZIP):
        try:
            # Left open: a row that is rejected later is looked up again.
            return _read(gzip.GzipFile(fileobj=source), tz)
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError("the packed export is damaged", why=str(error)) from None
    return _read(source, tz)


def _read(source: Source, tz: tzinfo | None) -> Rows:
    if _peek(source).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in {b"{", b"["}:
        return read_json(source.read())
    return read_text(source, tz=tz)


def _peek(source: Source) -> bytes:
    first = source.read(_FIRST_BYTES)
    source.seek(0)
    return first
