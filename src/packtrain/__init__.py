"""Pack your data once, train it anywhere, bring the model home."""

__version__ = "0.1.0"
