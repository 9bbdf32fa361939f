"""Statistics of attention logits, per head: how rows become them, how they merge, how far a step moves them."""
