"""`python -m qkeel` and the `qkeel` command."""

import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        import cyclopts  # noqa: F401
    except ImportError:
        print("error: the command line needs cyclopts and rich: pip install 'qkeel[lab]'", file=sys.stderr)
        return 2
    from qkeel.cli.app import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
