"""file -> what each layer is: plans, readers, sources and writers of checkpoints."""

from anyfp8.checkpoint.planner import read_plan
from anyfp8.checkpoint.reader import Checkpoint, LayerData, merge_layers, open_checkpoint
from anyfp8.checkpoint.recast import RecastReport, recast
from anyfp8.checkpoint.save import save_checkpoint
from anyfp8.checkpoint.sources import Source, is_quantized, open_source
from anyfp8.checkpoint.stream import QuantizeReport, quantize_stream
from anyfp8.checkpoint.writer import check_output

__all__ = [
    "Checkpoint",
    "LayerData",
    "QuantizeReport",
    "RecastReport",
    "Source",
    "check_output",
    "is_quantized",
    "merge_layers",
    "open_checkpoint",
    "open_source",
    "quantize_stream",
    "read_plan",
    "recast",
    "save_checkpoint",
]
