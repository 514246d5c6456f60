"""Which device a name means, on this machine."""

from __future__ import annotations

import re

import torch

from samebits.errors import DeviceError


def find_device(name: str | None) -> torch.device:
    """Return the device of that name, the first GPU or else the CPU for ``None``.

    Raises
    ------
    DeviceError
        It does not exist here, or is none that samebits knows.
    """
    cuda = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda:0" if cuda else "cpu")
    found = re.fullmatch(r"(cpu)|cuda(?::(\d{1,3}))?", name)
    if found is None:
        raise DeviceError(device=name, problem="expected cpu, cuda or cuda:N.")
    if found[1]:
        return torch.device("cpu")
    if not cuda:
        why = "this torch was built without CUDA" if torch.version.cuda is None else "no NVIDIA GPU or no driver"
        raise DeviceError(device=name, problem=f"no CUDA here ({why}, torch {torch.__version__}). Use --device cpu.")
    index, count = int(found[2] or 0), torch.cuda.device_count()
    if index >= count:
        raise DeviceError(device=name, problem=f"expected an index below {count}: so many GPUs are here.")
    return torch.device("cuda", index)
