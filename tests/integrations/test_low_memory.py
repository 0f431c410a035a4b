"""Loading costs the model and two tensors; reading from disk costs what safetensors costs."""

import os
import statistics
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from safetensors.torch import load_file

from anyfp8.checkpoint import open_checkpoint
from anyfp8.tools.quantize import quantize_checkpoint


def sharded(folder, layers):
    """A random Llama of 51 million linear weights in a layer, in FP8, in several shards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-0.1, 0.1)
    model.save_pretrained(folder / "bf16")
    quantize_checkpoint(
        folder / "bf16", folder / "fp8", scheme="w8a8-channel-token", shard_bytes=64 << 20
    )
    return folder / "fp8"


# in a process of its own: the peak that the kernel saw, above what the imports cost
LOAD = textwrap.dedent("""
    import json, sys
    from pathlib import Path
    import torch
    from anyfp8.problem import Scheme
    from anyfp8.reference import quantize_weight
    from anyfp8.integrations.transformers import load, skeleton
    from anyfp8.linear import Fp8Linear

    def kib(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1])

    folder = Path(sys.argv[1])
    skeleton(json.loads((folder / "config.json").read_text()))
    # what the code itself costs when it first runs
    quantized = quantize_weight(torch.ones(64, 64), Scheme("channel"))
    small = Fp8Linear(64, 64, Scheme("channel"))
    small.load(quantized)
    small.prepare()
    before = kib("VmRSS")
    model = load(folder, device="cpu")
    layers = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    stored = sum(layer.nbytes for layer in layers) + sum(
        p.nbytes for m in model.modules() if m not in layers for p in m.parameters(recurse=False)
    )
    largest = sorted(layer.nbytes for layer in layers)[-2:]
    print((kib("VmHWM") - before) * 1024, stored, sum(largest))
""")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_peaks_at_the_stored_model_and_two_tensors(tmp_path):
    folder = sharded(tmp_path, layers=4)
    found = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True, check=True
    )
    peak, stored, largest = map(int, found.stdout.split())
    # on a CPU the stored model, and so its largest tensors, are the dequant backend's 16-bit copies
    assert stored > 2 * 4 * 51e6
    assert peak <= stored + largest


def forget(files):
    """Drop the files from the page cache, as far as the kernel does so."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@pytest.fixture(scope="module")
def gibibyte(tmp_path_factory):
    return sharded(tmp_path_factory.mktemp("gibibyte"), layers=20)


@pytest.mark.perf
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_layers_are_read_and_checked_at_0_8_of_the_speed_of_safetensors(gibibyte, cold):
    files = sorted(gibibyte.glob("*.safetensors"))
    checkpoint = open_checkpoint(gibibyte)
    target = torch.empty(1 << 26, dtype=torch.uint8)

    def take(tensor):
        # load_file maps a file and reads nothing: a copy reads it
        target[: tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))

    def plain():
        for file in files:
            for tensor in load_file(file).values():
                take(tensor)

    def ours():
        # looks at every byte for NaN codes; a copy after that would read them once more
        for _ in checkpoint.layers():
            pass
        for _, tensor in checkpoint.tensors():
            take(tensor)

    seconds = {plain: [], ours: []}
    for _ in range(7):
        for read, times in seconds.items():
            if cold:
                forget(files)
            start = time.perf_counter()
            read()
            times.append(time.perf_counter() - start)
    ratio = statistics.median(seconds[plain]) / statistics.median(seconds[ours])
    assert ratio >= 0.8, (ratio, seconds)
