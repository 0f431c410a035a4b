"""Compiled kernel → the C code that starts it, built where no GPU is.

Triton builds it with the C compiler before a process's first launch: one module of its own, and in
3.6 a launcher for each signature, 0.3 s each. An image without a compiler cannot, so `anyfp8 warm`
does it ahead. From 3.8 on its key holds where the driver lies, which is not known here.

The surprise: the linker asks for libcuda.so.1, which comes with a GPU's driver. An empty library of
that name will do, because its functions are looked up when the module is loaded on the GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any


class Stubs:
    """Builds into Triton's cache, in a process that launches nothing: no module is loaded.

    Attributes:
        error: why nothing more is built; "" while all is well.
    """

    def __init__(self, target: Any) -> None:
        """Takes Triton's `GPUTarget`; only NVIDIA's is served."""
        self.error = ""
        self._count = 0
        self._wanted = target.backend == "cuda"
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def build(self, kernel: Any) -> int:
        """Build what starting a compiled kernel takes; returns how many modules were not there."""
        if not self._wanted or self.error:
            return 0
        before = self._count
        try:
            from triton.backends.nvidia import driver

            if self._folder is None:
                self._wanted = hasattr(driver, "compile_module_from_src")
                if not self._wanted:
                    return 0
                self._prepare()
                driver.CudaUtils()
            # 3.7 starts every kernel through CudaUtils
            if hasattr(driver, "make_launcher"):
                driver.CudaLauncher(kernel.src, kernel.metadata)
        except Exception as error:
            # whatever the compiler and Triton raise; the kernels are there all the same
            self.error = (str(error).strip().splitlines() or [repr(error)])[-1][:300]
        return self._count - before

    def _prepare(self) -> None:
        from triton import knobs
        from triton.runtime import build

        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise RuntimeError("no C compiler: neither gcc nor clang, and CC names none")
        self._folder = tempfile.TemporaryDirectory(prefix="anyfp8-stub-")
        folder = Path(self._folder.name)
        library = folder / "libcuda.so.1"
        command = [compiler, "-shared", "-x", "c", os.devnull, "-o", str(library)]
        subprocess.run([*command, f"-Wl,-soname,{library.name}"], check=True, capture_output=True)
        knobs.nvidia.libcuda_path = str(folder)
        # a library that gives no symbol is dropped, and would not be loaded on the GPU
        script = folder / "cc"
        script.write_text(f'#!/bin/sh\nexec {compiler} -Wl,--no-as-needed "$@"\n')
        script.chmod(0o755)
        os.environ["CC"] = str(script)
        run: Any = build._build

        def counted(*arguments: Any, **named: Any) -> Any:
            self._count += 1
            return run(*arguments, **named)

        build._build = counted
        build._load_module_from_path = lambda *arguments: _Unloaded()


class _Unloaded:
    """A module that was built and not loaded."""

    def __getattr__(self, name: str) -> None:
        return None
