"""One rank of a tensor-parallel load, run as a process: RANK SIZE STORE FOLDER OUT [SCHEME]."""

import sys

import torch
import torch.distributed as dist

import anyfp8

if __name__ == "__main__":
    rank, size, store, folder, out, *scheme = sys.argv[1:]
    torch.set_num_threads(1)
    file = dist.FileStore(store, int(size))
    dist.init_process_group("gloo", store=file, rank=int(rank), world_size=int(size))
    model = anyfp8.load(
        folder,
        device="cpu",
        tp=int(size),
        dtype=torch.float32,
        scheme=scheme[0] if scheme else None,
    )
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        logits = model(ids).logits
    shapes = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, anyfp8.Fp8Linear)
    }
    tokens = model.generate(ids[:, :4], max_new_tokens=4, do_sample=False)
    torch.save({"logits": logits, "shapes": shapes, "tokens": tokens}, out)
    # nobody may leave while another still talks: gloo aborts the one that is left
    dist.barrier()
    dist.destroy_process_group()
