"""The errors a user can meet: what failed, what we got, what would do, and the next step.

Every error of the library derives from `AnyFp8Error`, so one `except` catches them all; the command
line prints the four parts on stderr and never shows a traceback for them.
"""

from __future__ import annotations


class AnyFp8Error(Exception):
    """A failure that the caller can act on.

    Args:
        what: the operation that failed and on which object, one sentence without a full stop.
        got: what was found.
        want: what would have been accepted.
        hint: the next step, usually a command or an argument.
    """

    def __init__(self, what: str, *, got: str = "", want: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.got = got
        self.want = want
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.what]
        for label in ("got", "want", "hint"):
            text = getattr(self, label)
            if text:
                parts.append(f"  {label}: {text}")
        return "\n".join(parts)

    def __reduce__(self):
        # the default would call the class with `args` alone and lose what subclasses keep
        return (type(self), (self.what,), dict(vars(self)))


class InputError(AnyFp8Error, ValueError):
    """An argument (tensor, dtype, shape, option) that the function does not take."""


class EnvError(AnyFp8Error, ValueError):
    """An environment variable whose value cannot be read; names the variable."""


class CheckpointError(AnyFp8Error):
    """A checkpoint that cannot be read or written as it stands; names the file and the tensor."""


class CalibrationError(AnyFp8Error):
    """Calibration data or statistics that give no usable scale; names the layer."""


class NoBackend(AnyFp8Error):
    """No kernel is willing to run a problem; carries each backend's own reason in `reasons`."""

    def __init__(
        self,
        what: str,
        *,
        got: str = "",
        want: str = "",
        hint: str = "",
        reasons: dict[str, str] | None = None,
    ) -> None:
        super().__init__(what, got=got, want=want, hint=hint)
        self.reasons = dict(reasons or {})


class TableError(AnyFp8Error):
    """A tuning table that cannot be read or used; names the file and the line."""


class DeviceError(AnyFp8Error):
    """A device that is unknown, absent, or not the one a tensor lies on."""


class MissingPackage(AnyFp8Error, ImportError):
    """An optional package that the request needs; the hint is the command that installs it."""
