"""Element types: torch's names, and how HDF5 stores each. Loads neither torch nor NumPy.

HDF5 has no bfloat16 or float8 and torch's bool is one byte, so those are stored as unsigned
integers of the same width; the torch name beside the data says what the bits mean.
"""

from __future__ import annotations

STORED_AS = {
    "bool": "|u1",
    "uint8": "|u1",
    "int8": "|i1",
    "uint16": "<u2",
    "int16": "<i2",
    "uint32": "<u4",
    "int32": "<i4",
    "uint64": "<u8",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
    "complex32": "<u4",
    "bfloat16": "<u2",
    "float8_e4m3fn": "|u1",
    "float8_e4m3fnuz": "|u1",
    "float8_e5m2": "|u1",
    "float8_e5m2fnuz": "|u1",
    "float8_e8m0fnu": "|u1",
}
"""Torch dtype name to NumPy dtype of the dataset, both of the same width."""


def item_size(name: str) -> int:
    """Bytes of one element of the torch dtype ``name``."""
    return int(STORED_AS[name][2:])
