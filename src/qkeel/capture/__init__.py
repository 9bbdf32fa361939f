"""One recorded pass of a model: its attention calls, and what is known about them."""
