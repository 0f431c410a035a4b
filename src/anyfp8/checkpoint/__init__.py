"""file -> what each layer is: plans, readers, sources and writers of checkpoints."""

from anyfp8.checkpoint.plan import CheckpointPlan, LayerPlan
from anyfp8.checkpoint.planner import read_plan
from anyfp8.checkpoint.reader import Checkpoint, LayerData, merge_layers, open_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointPlan",
    "LayerData",
    "LayerPlan",
    "merge_layers",
    "open_checkpoint",
    "read_plan",
]
