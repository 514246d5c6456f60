"""``python -m samebits`` is ``samebits``."""

from samebits.cli import main

main(prog_name="samebits")
