"""These tests need Triton's interpreter, which is chosen before Triton is imported.

`tests/quantize/test_interpreter.py` runs this folder in a process of its own.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
