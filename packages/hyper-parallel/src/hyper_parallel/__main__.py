"""`python -m hyper_parallel` is the `hyper-parallel` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command, or say what to install for it."""
    try:
        from hyper_parallel import cli
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("error: the hyper-parallel command needs typer: pip install 'hyper-parallel[train]'")
    cli.main()


if __name__ == "__main__":
    main()
