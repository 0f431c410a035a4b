"""anyfp8: FP8-quantized LLM linear layers on the GPU you have."""

__version__ = "0.1.0"
