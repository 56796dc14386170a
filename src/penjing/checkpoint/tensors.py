"""Write tensors in the safetensors format in one pass: each tensor's bytes are written and hashed without a copy.

The library's writer copies every tensor first and holds the GIL while it writes, so a saving thread would stop the
training thread. The library reads the files and checks their headers.

Format: 8 bytes, length of the header, little endian; a JSON header of name -> {dtype, shape, data_offsets}, padded with
spaces to a multiple of 8; then the data without gaps (https://github.com/huggingface/safetensors#format).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penjing.base.files import NewFile, disk_errors

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Write CPU tensors to a new file; return its size and SHA-256. Raises OSError if the disk refuses."""
    # The largest elements come first, as in the library, so that every tensor is aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with NewFile(path) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            if tensor.numel():
                raw_N = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                stream.write(raw_N.numpy().data)
    return stream.facts()


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, replacing an existing one. Raises UserError if the disk refuses."""
    with disk_errors(path):
        path.unlink(missing_ok=True)
        write_file(path, tensors, metadata)
