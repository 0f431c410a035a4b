"""`python -m anyfp8.tools.tune_worker measure|compile`: the child processes of a tuner.

One measures on the GPU that its environment shows as ordinal 0; the others compile, for that GPU's
architecture and without touching it, into Triton's cache, where the measuring one finds the code.
"""

from __future__ import annotations

import sys
from typing import Any

from anyfp8.tools.tune_child import answer


def compiling(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one candidate of one cell; the reason when it cannot be."""
    from anyfp8.tools.tune_compile import compile_candidate

    try:
        return {"refused": compile_candidate(request)}
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"refused": f"does not compile: {lines[-1][:200]}"}


def main() -> None:
    if sys.argv[1] == "compile":
        answer(compiling)
        return
    from anyfp8.tools.tune_measure import Bench

    answer(Bench().serve)


if __name__ == "__main__":
    main()
