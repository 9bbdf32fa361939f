"""Python reads this first in the processes that a mutant's tests start, which see the mutant too."""

import importlib.machinery
import linecache
import os
import sys
from pathlib import Path


def replace_source(path, source):
    """From now on the import system reads another source for a file, and no compiled one."""
    read, file = importlib.machinery.SourceFileLoader.get_data, str(path)

    def get_data(self, wanted):
        if wanted == file:
            return source.encode()
        if Path(wanted).name.startswith(path.stem + ".") and wanted.endswith(".pyc"):
            raise OSError("a mutant has no compiled file")
        return read(self, wanted)

    sys.dont_write_bytecode = True
    # Triton's interpreter reads the text of a kernel itself.
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    importlib.machinery.SourceFileLoader.get_data = get_data  # type: ignore[method-assign]


if "MUTATED_FILE" in os.environ:
    replace_source(
        Path(os.environ["MUTATED_FILE"]),
        Path(os.environ["MUTATED_SOURCE"]).read_text(encoding="utf-8"),
    )
