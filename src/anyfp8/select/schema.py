"""A line of a table → Header or Row, checked by pydantic, imported only when a table is read.

Fields and schemes that this version does not know are kept and ignored: a newer table is readable.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anyfp8.errors import InputError
from anyfp8.select.table import FORMAT, Header, Row


class _HeaderModel(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    format: int
    device: str = Field(min_length=1)
    source: str = ""
    date: str = ""


class _RowModel(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    op: str = Field("gemm", pattern="^(gemm|linear)$")
    scheme: str = Field(min_length=1)
    x_dtype: str = "bf16"
    out_dtype: str = "bf16"
    accumulate: str = Field("fast", pattern="^(fast|fp32_128)$")
    n: int = Field(ge=1)
    k: int = Field(ge=1)
    m: int = Field(ge=1)
    backend: str = ""
    role: str = Field("ours", pattern="^(ours|default|peer)$")
    config: dict[str, Any] | None = None
    us: float | None = Field(None, gt=0)


def header_of(values: Any) -> Header:
    """Raises InputError: what is wrong with which field."""
    model = _checked(_HeaderModel, values)
    if model.format != FORMAT:
        raise InputError(
            "a table of another format",
            got=f"format {model.format}",
            want=f"format {FORMAT}",
            hint="pip install -U anyfp8, or convert the table",
        )
    return Header(model.device, model.source, model.date, _extra(model))


def row_of(values: Any) -> Row:
    """Raises InputError: what is wrong with which field."""
    model = _checked(_RowModel, values)
    known = {name: getattr(model, name) for name in _RowModel.model_fields}
    config = known.pop("config")
    return Row(
        **known, config=None if config is None else tuple(config.items()), extra=_extra(model)
    )


def _checked(kind: Any, values: Any) -> Any:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the line"
        raise InputError(f"{where}: {first['msg']}", got=repr(first["input"])[:80]) from error


def _extra(model: BaseModel) -> tuple[tuple[str, Any], ...]:
    return tuple((model.model_extra or {}).items())
