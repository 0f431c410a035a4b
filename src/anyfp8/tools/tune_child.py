"""A plain subprocess that answers one JSON line with one JSON line, or is killed for its silence.

Both kinds of the tuner's helpers are one: the worker that owns a GPU and the compilers. Whatever a
candidate does to its process (a hang, a fault, a corrupted context), the next call starts a fresh
one. The surprise: libraries print to stdout, so answers travel over a descriptor of their own.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any


class ChildFailed(Exception):
    """A child gave no answer. `kind` is "hung" or "crashed"."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Child:
    """One helper process, started when it is first asked."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        """Args:
        command: of the process. environ: changes to this process's environment.
        """
        self._command = list(command)
        self._environ = dict(environ or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None
        self._answers = -1
        self._buffer = b""
        self._ended = 0

    @property
    def generation(self) -> int:
        """How many processes have ended: who keeps state in one tells it again when this grows."""
        if self._process is not None and self._process.poll() is not None:
            self._kill()
        return self._ended

    def call(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Ask and wait. Raises ChildFailed: the process died or was killed after `limit_s`."""
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            raise ChildFailed("crashed", self._end("before it could be asked")) from None
        return json.loads(self._line(time.monotonic() + limit_s, limit_s))

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._kill()

    def stop(self) -> None:
        """End the process that another thread is waiting for: its `call` fails at once."""
        process = self._process
        if process is not None:
            _kill_group(process)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._answers, theirs = os.pipe()
        # closed in `_kill`, when the process has ended
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._buffer = b""
        environ = {**os.environ, **self._environ, "ANYFP8_ANSWERS": str(theirs)}
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=self._errors, stderr=self._errors,
                env=environ, pass_fds=(theirs,), start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(theirs)
        return self._process

    def _line(self, deadline: float, limit_s: float) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    self._kill()
                    raise ChildFailed("hung", f"gave no answer within {limit_s:.0f} s")
                part = os.read(self._answers, 65536)
                if not part:
                    raise ChildFailed("crashed", self._end("and gave no answer"))
                self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _end(self, when: str) -> str:
        """Why a process that is gone went, in words."""
        assert self._process is not None
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            code = None
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        how = "stopped answering" if code is None else f"ended with {_status(code)}"
        self._kill()
        return " ".join(("its process", how, when, *(f"({line[:200]})" for line in said)))

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._ended += 1
        _kill_group(process)
        process.wait()
        if process.stdin is not None:
            # what was not read is lost anyway
            with suppress(OSError):
                process.stdin.close()
        os.close(self._answers)
        self._errors.close()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # with what it started itself: an assembler may be what hangs
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


def answer(serve: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's side: answer each line of stdin until it ends, or until the parent is gone."""
    answers = os.fdopen(int(os.environ.pop("ANYFP8_ANSWERS")), "w", encoding="utf-8")
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    for line in sys.stdin:
        reply = serve(json.loads(line))
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _watch(parent: int) -> None:
    # a killed parent says nothing, and a hanging kernel reads no stdin
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _status(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
