"""Record what eager computes on this GPU for small inputs of every op, for the tests that have no GPU.

    python tests/gpu/record.py [FILE]

Writes ``tests/host/recorded/h200_ops.safetensors`` (under a MB): inputs, eager outputs, and the GPU's ``rsqrt``,
``exp`` and ``tanh`` at the values of which the emulated chains take them. Nothing is written if eager differs from
itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "host"), str(Path(__file__).parent)]

import aten_chains  # noqa: E402
from binary32 import F32  # noqa: E402
from record_cases import CASES, TREE_ROWS  # noqa: E402, F401
from recording import FILE, FUNCTIONS, FunctionTable, RecordedCase, functions_of, same_bits, save  # noqa: E402


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    """One tensor or several, always as a tuple."""
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def main(
    path: Path,
    device: torch.device,
    references: Mapping[str, Callable[..., Any]],
    environment: Mapping[str, Any],
) -> int:
    """Record every case of every reference on ``device`` into ``path``; returns the exit code.

    The file is written even if the emulator differs from eager somewhere (exit code 1): that is worth having.
    """
    pairs: dict[str, dict[int, int]] = {name: {} for name in FUNCTIONS}

    def recording(name: str) -> Callable[[F32], F32]:
        def function(x: F32) -> F32:
            # NaN is asked for in one form only, which is how the table is read too.
            x = np.where(np.isnan(x), np.uint32(0x7FFFFFFF).view(np.float32), x).astype(np.float32)
            y = getattr(torch, name)(torch.from_numpy(x).to(device)).cpu().numpy()
            bits = (part.view(np.uint32).flatten().tolist() for part in (x, y))
            pairs[name].update(zip(*bits, strict=True))
            return y

        return function

    recorders = {name: recording(name) for name in FUNCTIONS}
    recorded, emulated_wrongly = [], 0
    for op_name, reference in references.items():
        for name, args, repeats in CASES[op_name]():
            on_device = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
            outputs, again = (tuple(t.cpu() for t in as_tuple(reference(*on_device))) for _ in range(2))
            if not all(map(same_bits, outputs, again)):
                print(f"{op_name} {name}: eager differs from itself; nothing was written", file=sys.stderr)
                return 1
            chain = getattr(aten_chains, op_name)
            emulated = as_tuple(chain(*args, **functions_of(chain, recorders)))
            if not all(map(same_bits, emulated, outputs)):
                emulated_wrongly += 1
                print(f"{op_name} {name}: the emulator differs from eager", file=sys.stderr)
            case = RecordedCase(f"{op_name} {name}", op_name, args, outputs)
            recorded.append((case, repeats, {0: repeats[0]} if repeats else {}))
    tables = {}
    for name, known in pairs.items():
        parts = (np.array(list(part), np.uint32).view(np.float32) for part in (known.keys(), known.values()))
        tables[name] = FunctionTable(name, *parts)
    save(path, recorded, tables, environment)
    size_kib = path.stat().st_size / 1024
    print(f"{path}: {len(recorded)} cases, {size_kib:.0f} KiB; the emulator differs in {emulated_wrongly}")
    return 1 if emulated_wrongly else 0


def run() -> int:
    """The command line: one optional argument, the file."""
    if not torch.cuda.is_available():
        print("recording needs an NVIDIA GPU; torch sees none", file=sys.stderr)
        return 2
    from samebits.environment import fingerprint
    from samebits.ops import by_name

    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    with torch.inference_mode():
        return main(path, torch.device("cuda"), {name: by_name(name).reference for name in CASES}, fingerprint())


if __name__ == "__main__":
    sys.exit(run())
