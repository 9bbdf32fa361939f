"""`python -m qkeel` and the `qkeel` command."""

import os
import sys

import qkeel


def main() -> int:
    """Runs the command line and returns the exit code. The list of commands and the version do not need any library."""
    from qkeel.cli.output import open_output

    words = sys.argv[1:]
    open_output()
    if words in ([], ["--help"], ["-h"], ["--version"]):
        from qkeel.cli.commands import overview

        try:
            print(
                qkeel.__version__ if words == ["--version"] else overview(), flush=True
            )
        except BrokenPipeError:  # `qkeel --help | head`: on exit, the interpreter needs a stdout that it can flush
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    try:
        import cyclopts  # noqa: F401
    except ImportError:
        print(
            "error: the command line needs cyclopts and rich: pip install --upgrade qkeel",
            file=sys.stderr,
        )
        return 2
    from qkeel.cli.app import main as run

    return run(words)


if __name__ == "__main__":
    sys.exit(main())
