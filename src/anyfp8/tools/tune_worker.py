"""`python -m anyfp8.tools.tune_worker measure|compile`: the child processes of a tuner.

One measures on the GPU that its environment shows as ordinal 0; the others compile, for that GPU
and without touching it, into Triton's cache, where the measuring one finds the code. Those import
neither torch nor the rest of the library: a dozen of them start in a second.
"""

from __future__ import annotations

import base64
import pickle
import sys
from typing import Any

from anyfp8.tools.tune_child import answer


def compiling(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one candidate's forms: {"refused": "" or why it cannot run on its GPU}."""
    from anyfp8.form import target_is

    # from the tuner that started this process
    target, forms = pickle.loads(base64.b64decode(request["forms"]))
    limit = request["limit"]
    try:
        with target_is(target):
            for form in forms:
                need = form.compile().metadata.shared
                if need > limit:
                    why = f"needs {need:,} B of shared memory and {request['gpu']} has {limit:,}"
                    return {"refused": why}
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"refused": f"does not compile: {lines[-1][:200]}"}
    return {"refused": ""}


def main() -> None:
    if sys.argv[1] == "compile":
        answer(compiling)
        return
    from anyfp8.tools.tune_measure import Bench

    answer(Bench().serve)


if __name__ == "__main__":
    main()
