"""`python -m hyper_parallel` is the `hyper-parallel` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command, or say what to install for it."""
    try:
        from hyper_parallel.commands import cli

        cli.main()
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("error: the hyper-parallel command needs typer: pip install 'hyper-parallel[train]'")
    except KeyboardInterrupt:  # libraries are still imported
        sys.stderr.write("error: interrupted before anything had begun\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
