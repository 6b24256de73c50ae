"""Train and measure DSpark draft models for speculative decoding of Ling-3.0-flash."""

__version__ = "0.1.0"
