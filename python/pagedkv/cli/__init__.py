"""The command line. One module per command; heavy imports wait until a command runs, so that
`pagedkv --help` is quick.
"""

from pagedkv.cli.app import main

__all__ = ["main"]
