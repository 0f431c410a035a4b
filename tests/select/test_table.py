"""Tables: the M rule, winners, siblings, lowering, reading and writing, and the engines' files."""

import json
import logging
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyfp8 import gemm
from anyfp8.device import ARCHES, find_device, generic_device
from anyfp8.errors import TableError
from anyfp8.gemm.tiles import TileConfig
from anyfp8.integrations import sglang_tables
from anyfp8.problem import Problem, Scheme
from anyfp8.select import Request, plan, select
from anyfp8.select import table as tables
from anyfp8.select.table import Header, Row, Table, Tables, nearest_m

ROW = Scheme("channel", "token", True)
L40S = find_device("NVIDIA L40S")
H200 = find_device("NVIDIA H200")
A = {"block_m": 64, "block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 3}
B = A | {"block_m": 128}
C = A | {"block_n": 128}


def row(m, config=None, us=None, **more):
    config = None if config is None else tuple(config.items())
    backend = "triton_row" if config is not None else ""
    values = {"backend": backend, "role": "ours" if config else "default"} | more
    return Row(ROW.name, 6144, 4096, m, config=config, us=us, **values)


def tables_of(device, *rows):
    return Tables(device, (("user table", Table(Header(device.name, "hand", "2026-01-01"), rows)),))


def problem(m, **more):
    return Problem("linear", ROW, m, 6144, 4096, **more)


@pytest.mark.parametrize(
    ("rows", "m", "want"),
    [
        ((2048, 3072, 4096), 1, None),
        ((2048, 3072, 4096), 16, None),
        ((2048, 3072, 4096), 2560, 2048),
        ((2048, 3072, 4096), 4096, 4096),
        ((2048, 3072, 4096), 100000, 4096),
        ((1, 1024), 512, 1024),
        ((1, 1024), 4, 1),
        ((1, 1024), 5, None),
        ((), 5, None),
    ],
)
def test_nearest_row_within_a_factor_of_four_serves(rows, m, want):
    assert nearest_m(rows, m) == want


def test_sparse_table_leaves_far_ms_to_the_ranker_and_serves_the_rest():
    found = tables_of(L40S, row(2048, A), row(3072, B), row(4096, C))
    for m, config in ((2560, A), (4096, C), (100000, C)):
        choice = select(problem(m), L40S, Request(), found)
        assert choice.source == "user table"
        assert choice.config == TileConfig(**config)
        assert "hand" in choice.provenance
    for m in (1, 16):
        assert select(problem(m), L40S, Request(), found).source == "ranker"


def test_a_default_row_gives_the_default_path_and_keeps_neighbours_away():
    found = tables_of(L40S, row(64, A), row(128))
    choice = select(problem(128), L40S, Request(), found)
    untuned = select(problem(128), L40S, Request(tune=False))
    assert choice.source == "user table"
    assert (choice.backend, choice.config) == (untuned.backend, untuned.config)


def test_a_row_whose_tiles_would_take_another_wave_leaves_m_to_the_next_larger_one():
    # 4096 columns in tiles of 128 by 64 rows: 128 tiles at M = 256, 160 at 257, for 132 SMs
    wide = A | {"block_n": 128, "block_k": 256, "num_stages": 4}
    rows = [replace(row(m, c), n=4096) for m, c in ((256, wide), (384, B))]
    default = replace(row(384), n=4096)

    def chosen(m, *rows, device=H200):
        return select(replace(problem(m), n=4096), device, Request(), tables_of(device, *rows))

    for m in (200, 256):
        assert chosen(m, *rows).config == TileConfig(**wide)
    for m in (257, 320):
        assert chosen(m, *rows).config == TileConfig(**B)
        assert "M=256 would take longer" in chosen(m, *rows).reason
        assert chosen(m, rows[0], default).backend == "torch_scaled_mm"
    # no larger row within four times M, or tiles of which all SMs hold more at once
    assert chosen(320, rows[0]).config == TileConfig(**wide)
    shallow = replace(row(256, wide | {"num_stages": 2}), n=4096)
    assert chosen(320, shallow, rows[1]).config.num_stages == 2

    # two of them on an SM take longer than one, but less than twice as long
    def timed(us):
        return chosen(320, replace(shallow, us=10.0), replace(rows[1], us=us)).config

    assert timed(12.5) == TileConfig(**B)
    assert timed(14.0).num_stages == 2
    # a smaller M's tiles are as many as were measured, whatever the larger row takes
    assert chosen(250, replace(shallow, us=10.0), replace(rows[1], us=9.0)).config.num_stages == 2


def test_the_kill_switch_restores_the_default_path():
    found = tables_of(L40S, row(64, A))
    choice = select(problem(64), L40S, Request(tune=False), found)
    assert choice.source == "default"
    assert choice == replace(select(problem(64), L40S, Request(tune=False)), reason=choice.reason)


def test_the_fastest_willing_backend_wins_if_it_beats_the_default_path_by_the_margin():
    tile = tuple(A.items())
    peer = Row(ROW.name, 6144, 4096, 64, "deep_thought", "peer", None, 1.0)
    default = Row(ROW.name, 6144, 4096, 64, "torch_scaled_mm", "default", None, 10.0)
    ours = Row(ROW.name, 6144, 4096, 64, "triton_row", "ours", tile, 9.0)
    choice = select(problem(64), H200, Request(), tables_of(H200, peer, default, ours))
    assert choice.backend == "triton_row"
    slower = replace(ours, us=9.9)
    choice = select(problem(64), H200, Request(), tables_of(H200, peer, default, slower))
    assert (choice.backend, choice.source) == ("torch_scaled_mm", "user table")


def test_a_linear_takes_gemm_rows_where_it_has_none_of_its_own():
    gemm_row, linear_row = row(64, A, 9.0), row(64, B, 30.0, op="linear")
    tile = select(problem(64), L40S, Request(), tables_of(L40S, gemm_row)).config
    assert tile == TileConfig(**A)
    tile = select(problem(64), L40S, Request(), tables_of(L40S, gemm_row, linear_row)).config
    assert tile == TileConfig(**B)


def test_gemm_rows_do_not_decide_between_backends_that_quantize_and_that_do_not():
    ours = row(64, A, 9.0)
    default = row(64, None, 10.0, backend="torch_scaled_mm")
    exact = replace(ours, backend="triton_w8a16", config=None, us=1.0)
    request = Request(numerics="at_least")
    found = tables_of(H200, ours, default, exact)
    assert select(problem(64), H200, request, found).source == "ranker"
    assert select(problem(64), H200, Request(), found).backend == "triton_row"
    timed = [replace(r, op="linear") for r in (ours, default, exact)]
    assert select(problem(64), H200, request, tables_of(H200, *timed)).backend == "triton_w8a16"
    # rows without a time of the other kind say nothing of it
    half = tables_of(H200, *timed[:2])
    assert select(problem(64), H200, request, half).source == "ranker"
    assert select(problem(64), H200, Request(), half).source == "user table"


def test_the_shipped_h200_table_serves_what_it_measured_and_never_what_lost():
    found = tables.load_tables(H200)
    table = found.tables[0][1]
    facts = dict(table.header.facts)
    assert (facts["torch"], facts["triton"], facts["sms"]) == ("2.11.0+cu130", "3.6.0", H200.sms)
    by_key = {}
    for line in table.rows:
        by_key.setdefault(line.key, {}).setdefault(line.role, []).append(line)
    qwen = {(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)}
    assert {key[-3:-1] for key in by_key} >= qwen
    for rows in by_key.values():
        (default,) = rows["default"]
        ours = min(rows.get("ours", [default]), key=lambda row: row.us)
        asked = Problem(ours.op, Scheme.parse(ours.scheme), ours.m, ours.n, ours.k)
        choice = select(asked, H200, Request(), found)
        assert choice.source == "shipped table"
        wins = ours.us <= default.us * 0.98
        assert choice.backend == (ours.backend if wins else default.backend)


def test_the_last_of_two_rows_with_one_key_counts():
    found = tables_of(L40S, row(64, A), row(64, B))
    assert select(problem(64), L40S, Request(), found).config == TileConfig(**B)


def test_rows_of_one_accumulate_mode_never_serve_another():
    found = tables_of(L40S, row(64, A))
    promoted = select(problem(64), L40S, Request(accumulate="fp32_128"), found)
    assert promoted.source == "ranker"
    assert promoted.accumulate == "fp32_128"


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA GeForce RTX 5090", "AMD Instinct MI300X"])
def test_a_hopper_row_is_lowered_elsewhere_with_one_log_line(name, caplog):
    device = find_device(name)
    big = {"block_m": 128, "block_n": 256, "block_k": 128, "num_warps": 8, "num_stages": 4}
    assert TileConfig(**big).smem_bytes(H200) == 196_608
    tables._say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            choice = select(problem(4096), device, Request(), tables_of(device, row(4096, big)))
    assert choice.source == "user table"
    assert gemm.backend(choice.backend).illegal(choice.config, problem(4096), device) is None
    assert choice.config.num_stages < 4 or choice.config.block_n < 256
    assert len([r for r in caplog.records if "lowered" in r.message]) == 1


def test_an_over_limit_row_is_lowered_on_its_own_gpu():
    big = {"block_m": 128, "block_n": 256, "block_k": 128, "num_warps": 8, "num_stages": 5}
    choice = select(problem(4096), H200, Request(), tables_of(H200, row(4096, big)))
    assert choice.config == TileConfig(**(big | {"num_stages": 4}))


def test_a_table_in_the_users_folder_comes_before_the_shipped_one(tmp_path, monkeypatch):
    table = Table(Header(L40S.name, "mine", "2026-02-02"), (row(1, B),))
    tables.write_table(tmp_path / tables.file_name(L40S.name), table)
    shipped = plan(ROW, 6144, 4096, L40S).choice(1)
    assert (shipped.source, shipped.config.block_k) == ("shipped table", 1024)
    monkeypatch.setenv("ANYFP8_TABLE_DIR", str(tmp_path))
    mine = plan(ROW, 6144, 4096, L40S)
    assert mine.choice(1).source == "user table"
    # the user's one row serves every M: above its largest row a table answers always
    assert {c.source for _, c in mine.choices} == {"user table"}


def test_another_devices_tables_serve_when_named(monkeypatch):
    assert "NVIDIA L40S" not in plan(ROW, 6144, 4096, H200).choice(1).provenance
    monkeypatch.setenv("ANYFP8_TABLE_DEVICE", "NVIDIA L40S")
    choice = plan(ROW, 6144, 4096, H200).choice(1)
    assert choice.source == "shipped table"
    assert "NVIDIA L40S" in choice.reason


def test_a_sibling_lends_its_table_and_is_named(tmp_path, monkeypatch):
    a100, a800 = find_device("NVIDIA A100-SXM4-80GB"), find_device("NVIDIA A800-SXM4-80GB")
    config = (("how", "fused"), ("block_m", 16), ("block_n", 128), ("num_stages", 3))
    mine = Row(
        "w8a16-channel", 6144, 4096, 16, "triton_w8a16", config=config, accumulate="fp32_128"
    )
    tables.write_table(tmp_path / tables.file_name(a100.name), Table(Header(a100.name), (mine,)))
    monkeypatch.setenv("ANYFP8_TABLE_DIR", str(tmp_path))
    choice = plan(Scheme("channel"), 6144, 4096, a800).choice(16)
    assert choice.source == "user table"
    assert a100.name in choice.reason
    assert choice.config.block_n == 128


def test_a_missing_table_is_said_once_and_names_the_file_and_the_command(caplog):
    tables._say_once.cache_clear()
    device = find_device("NVIDIA H100 80GB HBM3")
    with caplog.at_level(logging.INFO):
        for _ in range(61):
            plan(ROW, 2112, 7168, device)
    said = [r.message for r in caplog.records if "no tuned row" in r.message]
    assert len(said) == 1
    assert "nvidia_h100_80gb_hbm3.jsonl" in said[0]
    assert "anyfp8 tune 2112,7168" in said[0]
    assert "anyfp8 tables import" in said[0]


def test_unknown_fields_and_schemes_survive_a_round_trip(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [
        {"format": 1, "device": "NVIDIA L40S", "source": "s", "date": "d", "clocks": [1, 2]},
        row(64, A, 5.0).to_dict() | {"runner_up": "x"},
        {"op": "gemm", "scheme": "nvfp4-future", "n": 1, "k": 2, "m": 3, "backend": "new"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = tables.read_table(path)
    tables.write_table(path, table)
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert again[0]["clocks"] == [1, 2]
    assert again[1]["runner_up"] == "x"
    assert again[2]["scheme"] == "nvfp4-future"
    assert tables.read_table(path) == replace(table)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"format": 2, "device": "x"}', "format 2"),
        ('{"device": "x"}', "format"),
        ('{"format": 1, "device": "x"}\n{"scheme": "a", "n": 0, "k": 1, "m": 1}\n{}', "line 2"),
        ('{"format": 1, "device": "x"}\n{"scheme": "a", "n": "9", "k": 1, "m": 1}', "n:"),
        (
            '{"format": 1, "device": "x"}\nnot json\n{"scheme": "a", "n": 1, "k": 1, "m": 1}',
            "line 2",
        ),
        ("", "empty"),
    ],
)
def test_a_broken_table_is_refused_by_file_and_line(tmp_path, line, what):
    path = tmp_path / "broken.jsonl"
    path.write_text(line)
    with pytest.raises(TableError, match=r"broken\.jsonl") as caught:
        tables.read_table(path)
    assert what in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b""])
def test_what_is_no_table_is_named_with_a_next_step(tmp_path, content):
    path = tmp_path / "strange.jsonl"
    path.write_bytes(content)
    with pytest.raises(TableError, match=r"strange\.jsonl") as caught:
        tables.read_table(path)
    assert caught.value.hint


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "t.jsonl"
    tables.write_table(path, Table(Header("NVIDIA L40S"), (row(1, A), row(2, B))))
    path.write_text(path.read_text()[:-20])
    assert [r.m for r in tables.read_table(path).rows] == [1]


def test_shipped_l40s_rows_are_those_that_were_published(published_l40s):
    table = tables.read_table(tables.shipped_path("NVIDIA L40S"))
    files = sglang_tables.export(table)
    assert len(files) == 4
    for n, k, m, config in published_l40s:
        name = f"N={n},K={k},device_name=NVIDIA_L40S,dtype=fp8_w8a8_channelwise.json"
        assert files[name][m] == config
    assert all(len(configs) == 17 for configs in files.values())
    assert sum(c is None for configs in files.values() for c in configs.values()) == 3


@pytest.fixture
def published_l40s():
    def tile(m, n, k, warps, stages):
        sizes = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k}
        return sizes | {"num_warps": warps, "num_stages": stages}

    return (
        (24576, 4096, 1, tile(16, 16, 1024, 2, 2)),
        (24576, 4096, 192, tile(256, 64, 256, 8, 1)),
        (24576, 4096, 512, None),
        (24576, 4096, 2048, None),
        (24576, 4096, 8192, tile(256, 128, 128, 8, 2)),
        (4096, 12288, 4, tile(16, 32, 1024, 4, 3)),
    )


@pytest.mark.parametrize("out", ["bf16", "fp16", "fp32"])
def test_every_shipped_row_fits_every_gpu_and_output_after_the_one_check(out):
    kept = 0
    for shipped in tables.shipped_folder().glob("*.jsonl"):
        for line in tables.read_table(shipped).rows:
            # a library's kernel has no tile
            if not line.config or not tables.known_backend(line.backend):
                continue
            backend, scheme = gemm.backend(line.backend), Scheme.parse(line.scheme)
            asked = Problem("gemm", scheme, line.m, line.n, line.k, "bf16", out)
            for name, arch in ARCHES.items():
                if arch.vendor == "cpu" or backend.why_not(asked, generic_device(arch)):
                    continue
                device = generic_device(arch)
                config = tables.usable(line, backend, asked, device)
                assert config is not None, f"{line} is dropped on {name}"
                assert backend.smem_bytes(config, asked, device) <= device.shared_memory
                kept += 1
    assert kept > 1000


POWERS = st.sampled_from([16, 32, 64, 128, 256])
TILES = st.fixed_dictionaries(
    {
        "BLOCK_SIZE_M": POWERS,
        "BLOCK_SIZE_N": POWERS,
        "BLOCK_SIZE_K": POWERS,
        "num_warps": st.sampled_from([1, 2, 4, 8, 16]),
        "num_stages": st.integers(1, 12),
    },
    optional={"waves_per_eu": st.integers(0, 4), "matrix_instr_nonkdim": st.just(16)},
)
GROUPED = st.tuples(TILES, st.integers(1, 64)).map(lambda t: t[0] | {"GROUP_SIZE_M": t[1]})
SIZES, MS = st.integers(1, 60_000), st.integers(1, 100_000)


@st.composite
def engine_files(draw):
    """(engine, {file name: {M: tile or None}}) as SGLang or vLLM spell them, of one GPU."""
    engine = draw(st.sampled_from(["sglang", "vllm"]))
    gpu = draw(st.sampled_from(["NVIDIA_L40S", "NVIDIA_H100_80GB_HBM3", "AMD_Instinct_MI300X"]))
    space = " " if engine == "sglang" else ""
    files = {}
    for _ in range(draw(st.integers(1, 3))):
        start = f"N={draw(SIZES)},K={draw(SIZES)},device_name={gpu},dtype=fp8_w8a8"
        if draw(st.booleans()):
            name, tile = f"{start}_channelwise.json", st.none() | TILES
        else:
            block = f"[{draw(POWERS)},{space}{draw(POWERS)}]"
            name, tile = f"{start},block_shape={block}.json", GROUPED
        files[name] = draw(st.dictionaries(MS, tile, min_size=1, max_size=5))
    return engine, files


@settings(deadline=None, max_examples=60)
@given(given_files=engine_files())
def test_any_engines_files_come_back_as_they_were(tmp_path_factory, given_files):
    engine, files = given_files
    folder = tmp_path_factory.mktemp("engine")
    # written by hand, as the engines write them
    for name, configs in files.items():
        text = json.dumps({str(m): config for m, config in configs.items()}, indent=4)
        (folder / name).write_text(text + "\n")
    [table] = sglang_tables.read_files([folder / name for name in files])
    path = folder / tables.file_name(table.header.device)
    tables.write_table(path, table)
    again = tables.read_table(path)
    assert again.rows == table.rows
    assert sglang_tables.export(again, engine) == files
    [other] = {"sglang", "vllm"} - {engine}
    moved = sglang_tables.write_files(sglang_tables.export(again, other), folder / other)
    assert sglang_tables.export(sglang_tables.read_files(moved)[0], engine) == files


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_engine_files_survive_a_round_trip(tmp_path, engine):
    scheme = Scheme("block", "group", True, block=(128, 128), group=128)
    tile = TileConfig(64, 128, 128, 32, 4, 3)
    rows = (
        Row(scheme.name, 2112, 7168, 64, "triton_block", config=tuple(tile.to_dict().items())),
        row(64, A),
        row(128),
    )
    files = sglang_tables.export(Table(Header("NVIDIA H200"), rows), engine)
    space = " " if engine == "sglang" else ""
    block = (
        f"N=2112,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,{space}128].json"
    )
    assert files[block] == {
        64: {
            "BLOCK_SIZE_M": 64,
            "BLOCK_SIZE_N": 128,
            "BLOCK_SIZE_K": 128,
            "GROUP_SIZE_M": 32,
            "num_warps": 4,
            "num_stages": 3,
        }
    }
    [back] = sglang_tables.read_files(sglang_tables.write_files(files, tmp_path))
    assert back.header.device == "NVIDIA H200"
    assert sglang_tables.export(back, engine) == files


def test_a_tile_that_the_engines_kernels_do_not_have_is_not_exported(tmp_path):
    swapped = A | {"block_m": 16, "swap": True}
    table = Table(Header(L40S.name), (row(8, swapped, 5.0), row(8, None, 9.0), row(16, A, 5.0)))
    [configs] = sglang_tables.export(table).values()
    assert configs[8] is None
    assert configs[16]["BLOCK_SIZE_M"] == 64
    # its own table keeps it, and rows without the field stay without
    path = tmp_path / "t.jsonl"
    tables.write_table(path, table)
    assert tables.read_table(path).rows == table.rows
    assert TileConfig(**swapped).to_dict()["swap"] is True
    assert "swap" not in TileConfig(**A).to_dict()
    choice = select(problem(8), H200, Request(), tables_of(H200, row(8, swapped, 5.0)))
    assert choice.config == TileConfig(**swapped)
    # nor K tiles side by side
    beside = A | {"block_m": 16, "block_n": 16, "parts": 4}
    table = Table(Header(L40S.name), (row(8, beside, 5.0), row(8, None, 9.0), row(16, A, 5.0)))
    [configs] = sglang_tables.export(table).values()
    assert configs[8] is None
    assert configs[16]["BLOCK_SIZE_M"] == 64
    # but the plain tile that was the best before it
    named = replace(table.rows[0], extra=(("plain", A | {"num_stages": 2}),))
    [configs] = sglang_tables.export(Table(table.header, (named, *table.rows[1:]))).values()
    assert configs[8]["num_stages"] == 2


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_block_tile_is_exported_although_it_lost_and_never_a_null(engine):
    # SGLang's look-up reads BLOCK_SIZE_K of every entry, and vLLM passes each to its only kernel
    scheme = Scheme("block", "group", True, block=(128, 128), group=128)
    key = (scheme.name, 4096, 4096)
    rows = (
        Row(*key, 16, "triton_block", config=tuple(A.items()), us=12.0),
        Row(*key, 16, "torch_scaled_mm", "default", us=9.0),
        Row(*key, 64, "torch_scaled_mm", "default", us=9.0),
    )
    [configs] = sglang_tables.export(Table(Header("NVIDIA H200"), rows), engine).values()
    assert set(configs) == {16}
    assert configs[16]["num_stages"] == 3
    assert sglang_tables.export(Table(Header("NVIDIA H200"), rows[2:]), engine) == {}


def test_fields_of_an_engines_other_kernels_go_back_as_they_came(tmp_path):
    tile = {
        "BLOCK_SIZE_M": 16,
        "BLOCK_SIZE_N": 128,
        "BLOCK_SIZE_K": 32,
        "GROUP_SIZE_M": 32,
        "num_warps": 4,
        "num_stages": 3,
        "SWAP_AB": True,
        "SPLIT_K": 8,
    }
    name = "N=4096,K=1280,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[32, 32].json"
    [back] = sglang_tables.read_files(sglang_tables.write_files({name: {1: tile}}, tmp_path))
    assert sglang_tables.export(back) == {name: {1: tile}}


def test_sglang_lookups_use_the_plainly_nearest_m(monkeypatch):
    assert sglang_tables.get_w8a8_channelwise_fp8_configs(24576, 4096) is None
    monkeypatch.setenv("ANYFP8_DEVICE_NAME", "NVIDIA L40S")
    configs = sglang_tables.get_w8a8_channelwise_fp8_configs(24576, 4096)
    assert len(configs) == 17
    look = sglang_tables.get_w8a8_channelwise_fp8_config
    assert look(24576, 4096, 1) == configs[1]
    assert look(24576, 4096, 3) == configs[2]
    assert look(24576, 4096, 700) is None
    assert look(24576, 4096, 10**6) == configs[8192]
    assert look(1, 1, 1) is None
    assert sglang_tables.get_w8a8_block_fp8_configs(24576, 4096, 128, 128) is None
    monkeypatch.setenv("SGLANG_ENABLE_FP8_GEMM_CONFIG_TUNE", "0")
    assert sglang_tables.get_w8a8_channelwise_fp8_configs(24576, 4096) is None
