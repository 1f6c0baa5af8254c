"""Virtual environments of their own, for what must not be in ours."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(name: str, pins: tuple[str, ...], *, with_ours: bool = False) -> Path:
    """The Python of a virtual environment with ``pins``: made once, and anew when they change.

    ``with_ours`` puts shardwright in, as it is in this working tree, with the tested set of what it needs.
    """
    folder = ROOT / "build" / "interop" / name
    python, ready = folder / "bin" / "python", folder / "pins.txt"
    wanted = "\n".join([sys.version, *pins])
    if with_ours:
        constraints = ROOT / "constraints.txt"
        wanted += "\n" + constraints.read_text() + (ROOT / "pyproject.toml").read_text()
        pins = ("-c", str(constraints), "-e", str(ROOT), *pins)
    if not ready.exists() or ready.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        quiet = ("--quiet", "--disable-pip-version-check", "--only-binary=:all:")
        subprocess.run([python, "-m", "pip", "install", *quiet, *pins], check=True)
        ready.write_text(wanted)
    return python
