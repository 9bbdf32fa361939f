"""qkeel keeps attention logits on an even keel."""

__version__ = "0.1.0"
