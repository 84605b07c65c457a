"""Reads what sacct was asked to save: text or JSON, packed or not."""

from __future__ import annotations

import gzip
import zlib
from datetime import tzinfo

from slurmspot.errors import UsageError
from slurmspot.timeline.json_export import read_json
from slurmspot.timeline.rows import Rows
from slurmspot.timeline.text import read_text

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


def read_rows(data: bytes, *, tz: tzinfo | None = None) -> Rows:
    """The rows of an export; what it is shows in its first bytes.

    Args:
        tz: the cluster's time zone, for times without one; None means this machine's.

    Raises:
        NotFoundError: there is nothing in it.
        UsageError: it is not what sacct saves, or lacks what is needed.
    """
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError("the packed export is damaged", why=str(error)) from None
    data = data.removeprefix(_BOM)
    return read_json(data) if data.lstrip()[:1] in {b"{", b"["} else read_text(data, tz=tz)
