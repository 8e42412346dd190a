"""Draft heads for a frozen causal LM: trained, verified, and decoded with exactly."""

__version__ = "0.1.0"
