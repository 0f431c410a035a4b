"""Two ranks against one: TP = 2 of a Qwen3-8B-shaped stack, judged and timed; a torchrun program.

Each rank loads the whole model and its own half, on its own device. Three judgements:

* every row-parallel linear, element by element, against the sum over ranks of the reference on each
  rank's own part. A rank's sum is rounded to bf16 before the ranks are added, and the total once
  more: 2^-8 of each value at most, beside what FP8 units with a short accumulator leave open.
* the same against the linear of one rank, which rounds once, where both quantize activations alike.
  They don't where each token has a scale: a rank takes one of its own columns, at least as fine.
* the model's outputs against its own weights in fp32 with activations in fp32: two ranks may err
  at most 1.1 times what one does.

Times are medians, of the slower rank, under CUDA graphs: the stack of decoder layers as
transformers runs it, its FP8 linears with their sums over ranks, and those sums alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

import anyfp8
from anyfp8 import Fp8Linear, Request, reference
from anyfp8.checkpoint import LayerData, save_checkpoint
from anyfp8.integrations.transformers import skeleton
from anyfp8.problem import QTensor, Scheme

SCHEMES = ("w8a8-block128x128-group128", "w8a8-channel-token")


def short_accumulator(scheme: Scheme, k: int) -> float:
    """What FP8 units may lose of the largest output: `anyfp8.testing_gemm`'s rule for one element.

    2^-14 for each sum of 32 products that stays in their accumulator, four times that at worst.
    """
    held = k if scheme.block is None else 128
    return 4 * -(-held // 32) * 2.0**-14


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where checkpoints go")
    parser.add_argument("out", type=Path, help="JSON lines")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=12288)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048])
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    return parser.parse_args()


def write(folder: Path, scheme: Scheme, given: argparse.Namespace, device: torch.device) -> None:
    """A random Qwen3 in FP8."""
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": given.vocab,
        "hidden_size": given.hidden,
        "intermediate_size": given.ffn,
        "num_hidden_layers": given.layers,
        "num_attention_heads": given.heads,
        "num_key_value_heads": given.kv_heads,
        "head_dim": given.head_dim,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    model = skeleton(config)
    generator = torch.Generator(device=device).manual_seed(0)
    layers, plain = [], {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if len(shape) == 1:
            plain[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        w = torch.randn(shape, generator=generator, device=device) / shape[1] ** 0.5
        if "embed" in name or "lm_head" in name:
            plain[name] = w.bfloat16().cpu()
            continue
        q = reference.quantize_weight(w, scheme)
        q = QTensor(q.codes.cpu(), q.scale.cpu(), q.block)
        layers.append(LayerData(name.removesuffix(".weight"), scheme, q))
    save_checkpoint(folder, config=config, layers=layers, plain=plain)


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids, use_cache=False).logits.double()


def error(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y - want).norm() / want.norm())


def row_parallel(whole, half, device: torch.device) -> tuple[float, float, int]:
    """Over the row-parallel linears: the largest difference / bound against the reference of all
    parts and against one rank, and how many linears there are."""
    rank, count = dist.get_rank(), 0
    by_parts = by_one = 0.0
    linears = dict(whole.named_modules())
    generator = torch.Generator(device=device).manual_seed(1)
    for name, module in half.named_modules():
        if not isinstance(module, Fp8Linear) or module.in_features == linears[name].in_features:
            continue
        full, width = linears[name], module.in_features
        x = torch.randn(7, full.in_features, generator=generator, device=device).bfloat16()
        part = x[:, rank * width : (rank + 1) * width].contiguous()
        q = QTensor(module.weight, module.weight_scale, module.scheme.block)
        w8a8 = module.quantizes_activations
        with torch.inference_mode():
            y, alone = module(part).double(), full(x).double()
            # weight-only backends multiply the weight in 16 bits
            w = reference.dequantize(q, torch.float32 if w8a8 else torch.bfloat16).double()
            own = part.double() @ w.T
            if w8a8:
                own = reference.linear(part.float(), q, module.scheme).double()
            magnitude, parts = own.abs(), own
            for sum_over_ranks in (magnitude, parts):
                dist.all_reduce(sum_over_ranks)
        short = short_accumulator(module.scheme, width) * float(magnitude.max()) if w8a8 else 0.0
        # fp32 sums in another order
        short += 1e-5 * float(magnitude.max())
        rounding = magnitude + y.abs()
        bound = 2**-8 * rounding + short
        by_parts = max(by_parts, float(((y - parts).abs() / bound).max()))
        bound = 2**-8 * (rounding + alone.abs()) + 2 * short
        by_one = max(by_one, float(((y - alone).abs() / bound).max()))
        count += 1
    return by_parts, by_one, count


def stack(model, x: torch.Tensor):
    """The decoder layers on hidden states [B, T, hidden], as a call without arguments."""
    positions = torch.arange(x.shape[1], device=x.device)[None]
    rope = model.model.rotary_emb(x, positions)

    def run() -> torch.Tensor:
        h = x
        for layer in model.model.layers:
            h = layer(h, position_embeddings=rope, position_ids=positions, attention_mask=None)
        return h

    return run


def only_linears(model, x: torch.Tensor):
    """The stack's FP8 linears one after another, with the sums over ranks that they ask for."""
    layers = [m for m in model.modules() if isinstance(m, Fp8Linear)]
    rows = x.reshape(-1, x.shape[-1])
    widths = {layer.in_features for layer in layers}
    inputs = {k: torch.randn(len(rows), k, device=x.device).to(x.dtype) for k in widths}

    def run() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    return run


def only_sums(model, x: torch.Tensor):
    """The stack's sums over ranks alone, two a layer; nothing on one rank."""
    count = 2 * len(model.model.layers)

    def run() -> None:
        for _ in range(count):
            dist.all_reduce(x)

    return run


PARTS = {"stack": stack, "linears": only_linears}


def graphed(run):
    """The call as a CUDA graph's replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def median_us(call, device: torch.device, replays: int) -> float:
    for _ in range(5 if device.type == "cuda" else 1):
        call()
    times = []
    for _ in range(replays):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize()
            times.append(1e3 * start.elapsed_time(stop))
        else:
            begin = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - begin))
    slower = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slower, op=dist.ReduceOp.MAX)
    return round(float(slower), 2)


def timed(models, given: argparse.Namespace, device: torch.device) -> list[dict]:
    """Times of each part on every shape, as CUDA graphs where there is a GPU."""
    shapes = [(m, 1) for m in given.decode] + [(1, t) for t in given.prefill]
    rows, graph = [], device.type == "cuda"
    with torch.inference_mode():
        for batch, length in shapes:
            x = torch.randn(batch, length, given.hidden, device=device).bfloat16()
            for part, make in PARTS.items():
                row: dict = {"part": part, "batch": batch, "tokens": length, "graph": graph}
                for ranks, model in models.items():
                    row[f"tp{ranks}_us"] = timed_once(make(model, x), graph, device, given)
                row["speedup"] = round(row["tp1_us"] / row["tp2_us"], 3)
                rows.append(row)
            row = {"part": "sums", "batch": batch, "tokens": length, "graph": graph}
            sums = only_sums(models[2], torch.zeros_like(x))
            rows.append(row | {"tp2_us": timed_once(sums, graph, device, given)})
    return rows


def timed_once(run, graph: bool, device: torch.device, given: argparse.Namespace) -> float:
    run()
    return median_us(graphed(run) if graph else run, device, given.replays)


def judge(scheme: str, given: argparse.Namespace, device: torch.device) -> dict:
    folder = given.folder / scheme
    started = time.perf_counter()
    if dist.get_rank() == 0:
        write(folder, Scheme.parse(scheme), given, device)
    dist.barrier()
    marks = {"write": time.perf_counter() - started}
    start = time.perf_counter()
    whole = anyfp8.load(folder, device=device)
    marks["load_tp1"] = time.perf_counter() - start
    start = time.perf_counter()
    half = anyfp8.load(folder, device=device, tp=2)
    marks["load_tp2"] = time.perf_counter() - start
    ids = torch.arange(3, 67, device=device)[None] % given.vocab
    start = time.perf_counter()
    one, two = logits(whole, ids), logits(half, ids)
    marks["first_run"] = time.perf_counter() - start
    exact = anyfp8.load(
        folder,
        device=device,
        dtype=torch.float32,
        request=Request(backend="dequant", force_weight_only=True),
    )
    want = logits(exact, ids)
    del exact
    others = [torch.empty_like(two) for _ in range(2)]
    dist.all_gather(others, two)
    found = {
        "scheme": scheme,
        "layers": given.layers,
        "hidden": given.hidden,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "ranks_equal": bool(torch.equal(others[0], others[1])),
        "error_tp1": error(one, want),
        "error_tp2": error(two, want),
        "tp2_against_tp1": error(two, one),
        "top1_agreement": float((two.argmax(-1) == one.argmax(-1)).double().mean()),
        "bytes_tp1": sum(m.nbytes for m in whole.modules() if isinstance(m, Fp8Linear)),
        "bytes_tp2": sum(m.nbytes for m in half.modules() if isinstance(m, Fp8Linear)),
        "seconds": marks,
    }
    by_parts, by_one, count = row_parallel(whole, half, device)
    found |= {"row_parallel_layers": count, "over_bound": by_parts}
    alike = not ("token" in scheme and device.type == "cuda")
    found["over_bound_tp1"] = by_one if alike else None
    equal = by_parts <= 1 and (by_one <= 1 or not alike)
    near = found["error_tp2"] <= 1.1 * found["error_tp1"] + 1e-6
    found["equal"] = bool(equal and near and found["ranks_equal"])
    report(given.out, found)
    found["times"] = timed({1: whole, 2: half}, given, device)
    found["seconds"]["all"] = time.perf_counter() - started
    return found


def report(out: Path, found: dict) -> None:
    """One line of JSON; a later line of the same scheme has more."""
    if dist.get_rank() == 0:
        with out.open("a") as handle:
            handle.write(json.dumps(found) + "\n")


def main() -> None:
    given = arguments()
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    for scheme in given.schemes:
        found = judge(scheme, given, device)
        report(given.out, found)
    # nobody may leave while another still talks: gloo aborts the one that is left
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
