"""Puts compiled kernels for AVX2 and AVX512 into the wheel if QKEEL_WHEEL_KERNELS=1 asks for them (`make wheel`)."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface):
    """Compiles the kernels for every target that a wheel carries, and names the platform in the wheel's tag."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the libraries to the files of the wheel."""
        if os.environ.get("QKEEL_WHEEL_KERNELS") != "1" or self.target_name != "wheel":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from qkeel.kernels.native import build

        for target in build.CARRIED:
            os.environ["QKEEL_NATIVE_ARCH"] = target
            os.environ["QKEEL_NATIVE_CACHE"] = str(Path(tempfile.mkdtemp()) / "cache")
            carried = f"qkeel/kernels/native/{build.carried_name(target)}"
            build_data["force_include"][str(build.compiled())] = carried
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"
