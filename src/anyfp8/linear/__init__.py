"""x → y: the layer that holds FP8 weights, and how a model's linears become such layers."""

from anyfp8.linear.convert import ConvertReport, convert
from anyfp8.linear.dispatch import linear
from anyfp8.linear.layer import Fp8Linear
from anyfp8.linear.plans import replan
from anyfp8.linear.warm import Warmed, warmup

__all__ = ["ConvertReport", "Fp8Linear", "Warmed", "convert", "linear", "replan", "warmup"]
