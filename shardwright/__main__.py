"""``python -m shardwright`` is the command ``shardwright``."""

from shardwright.cli import main

main()
