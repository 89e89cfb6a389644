"""The command line: parse, call, print. Importing it imports neither torch nor NumPy."""

from klinic.cli.app import main

__all__ = ["main"]
