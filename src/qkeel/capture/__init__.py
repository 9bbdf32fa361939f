"""One recorded pass of a model: its attention calls, and what was asked of them."""
