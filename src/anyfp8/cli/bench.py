"""anyfp8 bench quantize, gemm, linear, decode."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Peers = Annotated[
    Path | None,
    typer.Option(
        help="Folder with other libraries' kernels; docs/benchmarking.md says how it is made."
    ),
]
Ms = Annotated[str | None, typer.Option("--m", help="Rows, such as 1,16,4096.")]
Lines = Annotated[Path | None, typer.Option("--json", help="Write JSON Lines here; - for stdout.")]
Html = Annotated[Path | None, typer.Option(help="Write one page with plots, as report does.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(help="A model such as qwen3-8b, or N,K; may be repeated  [default: qwen3-8b]"),
]
SchemeName = Annotated[str, typer.Option(help="Scheme of the layers.")]
Accumulate = Annotated[str, typer.Option(help="auto, fast or fp32_128.")]
KillSwitch = Annotated[
    str, typer.Option(help="off: what the selection chooses; on: the default path; or both.")
]
Every = Annotated[bool, typer.Option("--all-backends", help="Race each willing backend too.")]
SlowPeers = Annotated[bool, typer.Option("--slow-peers", help="Those that tune for minutes too.")]
Seconds = Annotated[float, typer.Option(help="For everything; rounds shrink to fit.")]
Rounds = Annotated[int, typer.Option(min=1, help="Most paired rounds of a run.")]
Seed = Annotated[int | None, typer.Option(help="Of the data  [default: the time]")]
Warm = Annotated[bool, typer.Option(help="Compile in parallel processes first.")]


@group.command("quantize")
def bench_quantize(
    kinds: Annotated[str, typer.Option(help="token,group,group-column  [default: all]")] = "",
    k: Annotated[str | None, typer.Option("--k", help="Columns, such as 4096,12288.")] = None,
    m: Ms = None,
    peers: Peers = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all results here.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Independent races; all must agree.")] = 2,
    rounds: Rounds = 11,
    seconds: Annotated[float, typer.Option(help="No cell is begun after it.")] = 100.0,
    html: Html = None,
) -> None:
    """The activation quantizers."""
    from anyfp8.tools import bench_command as tool

    options = {"kinds": kinds, "k": k, "m": m, "peers": peers, "out": json, "runs": runs}
    tool.quantize_command(**options, rounds=rounds, seconds=seconds, html=html)


@group.command("gemm")
def bench_gemm(
    shapes: Shapes = None,
    m: Ms = None,
    scheme: SchemeName = "w8a8-channel-token",
    accumulate: Accumulate = "auto",
    kill_switch: KillSwitch = "both",
    all_backends: Every = False,
    peers: Peers = None,
    slow_peers: SlowPeers = False,
    seconds: Seconds = 150.0,
    rounds: Rounds = 15,
    seed: Seed = None,
    warm: Warm = True,
    json: Lines = None,
    html: Html = None,
) -> None:
    """Products of quantized operands. Exit status 1 when one of ours is wrong."""
    _bench(**locals(), op="gemm")


@group.command("linear")
def bench_linear(
    shapes: Shapes = None,
    m: Ms = None,
    scheme: SchemeName = "w8a8-channel-token",
    accumulate: Accumulate = "auto",
    kill_switch: KillSwitch = "both",
    all_backends: Every = False,
    peers: Peers = None,
    slow_peers: SlowPeers = False,
    seconds: Seconds = 150.0,
    rounds: Rounds = 15,
    seed: Seed = None,
    warm: Warm = True,
    json: Lines = None,
    html: Html = None,
) -> None:
    """Layers: bf16 in, quantization included. Exit status 1 when one of ours is wrong."""
    _bench(**locals(), op="linear")


@group.command("decode")
def bench_decode(
    model: Annotated[
        str, typer.Option(help="qwen3-8b, llama-3-70b, or a config.json.")
    ] = "qwen3-8b",
    tp: Annotated[int, typer.Option(min=1, help="One rank of so many.")] = 1,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Build so many and extrapolate  [default: all]")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,32",
    context: Annotated[int, typer.Option(min=1, help="Tokens a step attends to.")] = 1024,
    prefill: Annotated[int, typer.Option(min=0, help="Tokens of a prompt; 0: none.")] = 512,
    scheme: SchemeName = "w8a8-channel-token",
    kill_switch: KillSwitch = "both",
    bf16: Annotated[bool, typer.Option(help="Race a bf16 stack too.")] = True,
    seconds: Seconds = 100.0,
    rounds: Rounds = 15,
    seed: Seed = None,
    warm: Warm = True,
    json: Lines = None,
    html: Html = None,
) -> None:
    """A decoder stack: TPOT and prefill. Exit status 1 when one of ours is wrong."""
    from anyfp8.tools import bench_command as tool

    tool.decode_command(
        model, tp=tp, layers=layers, batch=batch, context=context, prefill=prefill, scheme=scheme,
        kill_switch=kill_switch, dense=bf16, seconds=seconds, rounds=rounds, seed=seed, warm=warm,
        out=json, html=html,
    )  # fmt: skip


def _bench(*, op: str, shapes: list[str] | None, json: Path | None, **options: Any) -> None:
    from anyfp8.tools import bench_command as tool

    tool.multiply_command(op, shapes=shapes or ["qwen3-8b"], out=json, **options)
