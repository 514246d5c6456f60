"""What a person sees: quiet libraries, the table of sites, one line that sums it up."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def quiet(progress: bool) -> Iterator[None]:
    """Keep warnings and, unless ``progress``, the progress bars of the libraries off the screen.

    Their switches are global; they are put back at the end. What samebits itself would warn of is in the report.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import diffusers
        import transformers
        from huggingface_hub.utils import (
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )

        ours = logging.getLogger("samebits")
        our_level = ours.level
        libraries: list[Any] = [diffusers.utils.logging, transformers.utils.logging]
        levels = [library.get_verbosity() for library in libraries]
        bars = [library.is_progress_bar_enabled() for library in libraries]
        hub_bars = not are_progress_bars_disabled()
        try:
            ours.setLevel(logging.ERROR)
            for library in libraries:
                library.set_verbosity_error()
                if not progress:
                    library.disable_progress_bar()
            if not progress and hub_bars:
                disable_progress_bars()
            yield
        finally:
            ours.setLevel(our_level)
            for library, level, bar in zip(libraries, levels, bars, strict=True):
                library.set_verbosity(level)
                if bar:
                    library.enable_progress_bar()
            if not progress and hub_bars:
                enable_progress_bars()


def summary(rows: Sequence[Any]) -> str:
    """One line: how many sites were answered by kernels, and the commonest reason for the others.

    A site counts as fused when eager answered only the calls at which the two were compared.
    """
    from samebits.gate import COMPARED, RECHECKED

    both = (COMPARED, RECHECKED)
    fused = partly = 0
    reasons: Counter[str] = Counter()
    for row in rows:
        why = {reason.removeprefix("unsupported: ") for reason in row.reasons if reason not in both}
        reasons.update(why)
        if row.fused:
            fused, partly = (fused, partly + 1) if why else (fused + 1, partly)
    line = f"{fused} of {len(rows)} sites fused{f', {partly} more at some of their calls' if partly else ''}"
    if not reasons:
        return f"{line}."
    (first, _), *others = reasons.most_common()
    more = f" ({len(others)} more {'reason' if len(others) == 1 else 'reasons'} above)" if others else ""
    return f"{line}{'; elsewhere' if fused or partly else ''}: {first}{more}"
