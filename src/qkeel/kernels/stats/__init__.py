"""Statistics of logits without a T×T matrix: from blocks of rows, or from logsumexps."""
