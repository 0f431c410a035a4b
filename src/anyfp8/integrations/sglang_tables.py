"""anyfp8's tables ↔ the engines' JSON files: one file for each (N, K, device), tiles by M.

SGLang reads `N=…,K=…,device_name=…,dtype=fp8_w8a8_channelwise.json` for per-token by per-channel
layers and `…,dtype=fp8_w8a8,block_shape=[128, 128].json` for block layers; vLLM writes the latter
without the space. A channelwise `null` says that the engine's default kernel was faster at that M;
block files have none. The look-ups keep SGLang's names, signatures and rule: the plainly nearest M.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from anyfp8 import env
from anyfp8.device import Device, planning_device
from anyfp8.errors import AnyFp8Error, InputError, TableError
from anyfp8.gemm.tiles import TileConfig
from anyfp8.problem import Scheme
from anyfp8.select.table import Header, Row, Table, load_tables, winner_of

log = logging.getLogger(__name__)

CHANNELWISE = Scheme("channel", "token", True)
Configs = dict[int, "dict[str, Any] | None"]

_FILE = re.compile(
    r"N=(?P<n>\d+),K=(?P<k>\d+),device_name=(?P<device>[^,]+),dtype=fp8_w8a8"
    r"(?P<channelwise>_channelwise)?(,block_shape=\[(?P<bn>\d+), ?(?P<bk>\d+)\])?\.json"
)
_FIELDS = {
    "BLOCK_SIZE_M": "block_m",
    "BLOCK_SIZE_N": "block_n",
    "BLOCK_SIZE_K": "block_k",
    "GROUP_SIZE_M": "group_m",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}


def block_scheme(block_n: int, block_k: int) -> Scheme:
    """The scheme of a block layer: weights in blocks, activations in groups of the same columns."""
    return Scheme("block", "group", True, block=(block_n, block_k), group=block_k)


def file_name(n: int, k: int, device_name: str, scheme: Scheme, engine: str = "sglang") -> str:
    """The engine's name of a file. Raises InputError for a scheme that they have no file for."""
    start = f"N={n},K={k},device_name={device_name.replace(' ', '_')},dtype=fp8_w8a8"
    if scheme == CHANNELWISE:
        return f"{start}_channelwise.json"
    if scheme.block is not None and scheme == block_scheme(*scheme.block):
        space = " " if engine == "sglang" else ""
        return f"{start},block_shape=[{scheme.block[0]},{space}{scheme.block[1]}].json"
    raise InputError(
        "the engines have no table for this scheme",
        got=scheme.name,
        want="w8a8-channel-token or w8a8-block…-group…",
    )


def to_engine(config: TileConfig, scheme: Scheme) -> dict[str, int]:
    """A tile in the engines' spelling; the channelwise kernel has no group of rows."""
    spelled = {name: getattr(config, ours) for name, ours in _FIELDS.items()}
    if scheme == CHANNELWISE:
        spelled.pop("GROUP_SIZE_M")
    return spelled


def from_engine(values: Mapping[str, Any]) -> TileConfig:
    """A tile from the engines' spelling. Raises InputError: a field is missing or not a tile's."""
    known = {_FIELDS[name]: value for name, value in values.items() if name in _FIELDS}
    try:
        tile: dict[str, Any] = {"group_m": 1} | known
        return TileConfig(**tile)
    except TypeError as error:
        raise InputError(
            "not an engine's tile", got=json.dumps(dict(values)), want=", ".join(_FIELDS)
        ) from error


def export(table: Table, engine: str = "sglang") -> dict[str, Configs]:
    """File name → {M: tile or None} for every (N, K) that the engines have a file for."""
    files: dict[str, Configs] = {}
    for scheme_name in dict.fromkeys(row.scheme for row in table.rows):
        try:
            scheme = Scheme.parse(scheme_name)
            file_name(1, 1, "", scheme)
        except InputError:
            continue
        rows = [row for row in table.rows if row.scheme == scheme_name]
        for n, k in dict.fromkeys((row.n, row.k) for row in rows):
            configs = configs_of(table, scheme, n, k)
            if configs:
                files[file_name(n, k, table.header.device, scheme, engine)] = configs
    return files


def configs_of(table: Table, scheme: Scheme, n: int, k: int) -> Configs:
    """{M: tile} of the "fast" bf16 rows.

    A channelwise entry is None where the default path won. A block layer's tile is the best there
    is, won or lost: the engines run it as the only kernel, and their look-ups fail on a null.
    """
    by_m = table.group(("gemm", scheme.name, "", "bf16", "fast", n, k))
    configs: Configs = {}
    for m in sorted(by_m):
        rows = [theirs for row in by_m[m] if (theirs := _plain(row)) is not None]
        if scheme != CHANNELWISE:
            rows = [row for row in rows if row.role != "default"]
        row = winner_of(rows, ("triton_row", "triton_block"))
        if row is not None and row.config is not None:
            # fields of kernels that are not here (AMD's waves_per_eu, SWAP_AB) go back as they came
            more = dict(row.extra).get("engine", {})
            configs[m] = to_engine(TileConfig(**dict(row.config)), scheme) | more
        elif scheme == CHANNELWISE:
            configs[m] = None
    return configs


def _plain(row: Row) -> Row | None:
    """A row as the engines' kernels can run it, which have no form with the weight first and none
    with K tiles side by side: with the tile that the row names as its `plain` one, or None."""
    if not {"swap", "parts"} & set(dict(row.config or ())):
        return row
    plain = dict(row.extra).get("plain")
    return replace(row, config=tuple(plain.items())) if plain else None


def write_files(files: Mapping[str, Configs], folder: Path) -> list[Path]:
    """Write exported files as the engines do: indented JSON, M as text."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, configs in files.items():
        path = folder / name
        path.write_text(json.dumps({str(m): c for m, c in configs.items()}, indent=4) + "\n")
        paths.append(path)
    return paths


def read_files(paths: Iterable[Path], source: str = "") -> list[Table]:
    """The engines' files as tables, one for each device named in them.

    Raises:
        TableError: a name or a content that is not theirs; names the file.
    """
    rows: dict[str, list[Row]] = {}
    for path in paths:
        found = _FILE.fullmatch(path.name)
        if found is None or bool(found["channelwise"]) == bool(found["bn"]):
            raise TableError(
                f"{path.name} is not named as an engine's table",
                want=file_name(4096, 4096, "NVIDIA_L40S", CHANNELWISE),
                got=path.name,
                hint="keep the name that the engine gave it: it says N, K, GPU and dtype",
            )
        scheme = CHANNELWISE
        if found["bn"]:
            scheme = block_scheme(int(found["bn"]), int(found["bk"]))
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            new = [
                _row(scheme, int(found["n"]), int(found["k"]), int(m), values)
                for m, values in content.items()
                # triton_version and the like
                if m.isdigit()
            ]
        except (ValueError, AttributeError) as error:
            raise TableError(
                f"cannot read {path}",
                got=str(error),
                want="a JSON object of M -> tile",
                hint="copy the file again from the engine",
            ) from error
        rows.setdefault(found["device"].replace("_", " "), []).extend(new)
    return [Table(Header(device, source), tuple(mine)) for device, mine in rows.items()]


def _row(scheme: Scheme, n: int, k: int, m: int, values: Any) -> Row:
    if values is None:
        return Row(scheme.name, n, k, m, role="default")
    backend = "triton_row" if scheme == CHANNELWISE else "triton_block"
    config = tuple(from_engine(values).to_dict().items())
    more = {name: value for name, value in values.items() if name not in _FIELDS}
    extra = (("variant", "plain"), *((("engine", more),) if more else ()))
    return Row(scheme.name, n, k, m, backend, config=config, extra=extra)


def get_w8a8_channelwise_fp8_configs(N: int, K: int) -> Configs | None:
    """SGLang's look-up: {M: tile or None} for per-token by per-channel layers on this GPU.

    Returns:
        None for a device or a shape without rows, and with tuning switched off.
    """
    return _configs(CHANNELWISE, N, K)


def get_w8a8_channelwise_fp8_config(N: int, K: int, M: int) -> dict[str, Any] | None:
    """The tile of the plainly nearest M, ties to the smaller; None for "default" or no rows."""
    configs = get_w8a8_channelwise_fp8_configs(N, K)
    if not configs:
        return None
    return configs[min(configs, key=lambda m: (abs(m - M), m))]


def get_w8a8_block_fp8_configs(N: int, K: int, block_n: int, block_k: int) -> Configs | None:
    """SGLang's and vLLM's look-up: {M: tile} for block layers on this GPU; None without rows."""
    return _configs(block_scheme(block_n, block_k), N, K)


def _configs(scheme: Scheme, n: int, k: int) -> Configs | None:
    snapshot = env.snapshot()
    if not snapshot["ANYFP8_ENABLE_FP8_GEMM_CONFIG_TUNE"]:
        return None
    try:
        device = planning_device()
    except AnyFp8Error as error:
        log.info("no tuned tables: %s", error.what)
        return None
    return _configs_cached(device, snapshot, scheme, n, k)


@cache
def _configs_cached(
    device: Device, snapshot: env.Snapshot, scheme: Scheme, n: int, k: int
) -> Configs | None:
    for _, table in load_tables(device, snapshot).tables:
        configs = configs_of(table, scheme, n, k)
        if configs:
            return configs
    return None
